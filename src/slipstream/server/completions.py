"""POST /v1/completions"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from slipstream.core.errors import InvalidRequestError
from slipstream.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from slipstream.core.request import Request
from slipstream.engine.inputs import InputProcessor, Prompt
from slipstream.server.bodies import CompletionBody
from slipstream.server.chunks import chunk_events
from slipstream.server.generation import (
    Job,
    News,
    check_choices,
    check_prompts,
    limit_output,
    naming,
    new_id,
    params_from,
)
from slipstream.server.logprobs import CompletionLogprobs, TokenNames, prompt_logprobs

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this route."""


def prepare(inputs: InputProcessor, body: CompletionBody) -> list[Request]:
    """The engine's requests for a body, one per prompt."""
    scores = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        scores = body.logprobs if scores is None else max(scores, body.logprobs)
    with naming({"prompt_token_ids": "prompt", "prompt_logprobs": "logprobs" if body.echo else "prompt_logprobs"}):
        prompts = prompts_of(body.prompt)
        params = params_from(body, inputs.defaults, prompt_logprobs=scores)
        check_choices([params.n] * len(prompts))
        requests = [
            inputs.request(
                prompt,
                params,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                add_special_tokens=body.add_special_tokens is not False,
            )
            for prompt in prompts
        ]
    limit_output(requests, DEFAULT_MAX_TOKENS)
    return requests


def prompts_of(prompt: Any) -> list[Prompt]:
    """The prompts in a `prompt` field: a text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt must be a text or a list that is not empty", param="prompt")
    if all(_is_token(item) for item in prompt):
        return [prompt]
    check_prompts(len(prompt), "prompt")
    for index, item in enumerate(prompt):
        if not isinstance(item, str if isinstance(prompt[0], str) else list):
            raise InvalidRequestError(
                f"prompt[{index}] must be of the same kind as the others: texts, or lists of token ids", param="prompt"
            )
    return list(prompt)


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or isinstance(prompt[0], str)


def _is_token(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


class CompletionAnswer:
    """The answer to one completions request, whole or in chunks."""

    def __init__(self, body: CompletionBody, job: Job, *, model: str, fingerprint: str) -> None:
        self._body = body
        self._job = job
        self._names = TokenNames(job.engine.inputs.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._running: dict[int, CompletionLogprobs] = {}
        # Prompts without a seed have one each, so that equal prompts differ; then each choice says its own.
        seeds = {request.seed for request in job.requests}
        self._own_seeds = len(seeds) > 1
        # BOS, which the tokenizer puts before a text, is not in the text that is echoed.
        self._texts = _is_text(body.prompt)
        self._head = {
            "id": new_id("cmpl", body.request_id),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
            "seed": None if self._own_seeds else job.requests[0].seed,
        }

    async def whole(self) -> dict[str, Any]:
        """The text_completion object."""
        outputs = await self._job.outputs()
        choices = [self._choice(*found) for found in self._job.choices(outputs)]
        return {**self._head, "choices": choices, "usage": self._job.usage.as_json()}

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """Its text_completion events."""
        return chunk_events(self._body, self._job, self._head, self._chunk)

    def _chunk(self, news: News) -> dict[str, Any]:
        delta = news.delta
        choice = {
            "index": news.choice,
            "text": delta.text,
            "logprobs": self._logprobs(
                news.choice,
                news.request.prompt_ids if news.first else [],
                news.prompt_logprobs or [],
                delta.token_ids,
                delta.logprobs,
            ),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._own_seeds:
            choice["seed"] = news.request.seed
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if news.first:
                choice["prompt_token_ids"] = news.request.prompt_ids
        if news.first and self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(news.prompt_logprobs or [], self._body.prompt_logprobs)
        return {**self._head, "choices": [choice]}

    def _choice(self, number: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": number,
            "text": choice.text,
            "logprobs": self._logprobs(
                number, output.prompt_token_ids, output.prompt_logprobs or [], choice.token_ids, choice.logprobs
            ),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._own_seeds:
            shown["seed"] = output.seed
        if self._body.return_token_ids:
            shown["token_ids"] = choice.token_ids
            shown["prompt_token_ids"] = output.prompt_token_ids
        if self._body.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [], self._body.prompt_logprobs)
        return shown

    def _logprobs(
        self,
        number: int,
        prompt_ids: Sequence[int],
        prompt_entries: Sequence[TokenLogprobs | None],
        token_ids: Sequence[int],
        entries: Sequence[TokenLogprobs] | None,
    ) -> dict[str, Any] | None:
        """The lists of a choice, with the prompt in front of the output if it is echoed."""
        if self._body.logprobs is None:
            return None
        running = self._running.setdefault(number, CompletionLogprobs(self._names, self._body.logprobs))
        lists = running.add((), ())
        if self._body.echo and prompt_ids:
            lists = running.add(prompt_ids, prompt_entries, skip_special_tokens=self._texts)
            running.end_of_prompt()
        skips = self._body.skip_special_tokens is not False
        more = running.add(token_ids, entries or [], skip_special_tokens=skips)
        return {name: lists[name] + more[name] for name in lists}
