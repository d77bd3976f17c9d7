"""POST /generate, in SGLang's shape"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from slipstream.core.errors import InvalidRequestError
from slipstream.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from slipstream.core.request import Request
from slipstream.core.sampling_params import MAX_LOGPROBS, SamplingParams
from slipstream.engine.collect import OutputCollector
from slipstream.engine.inputs import InputProcessor, Prompt
from slipstream.server.bodies import GenerateBody, GenerateSampling
from slipstream.server.fields import check_neutral
from slipstream.server.generation import (
    Job,
    check_choices,
    check_prompts,
    checked_id,
    limit_output,
    naming,
    params_from,
)
from slipstream.server.logprobs import TokenNames, most_likely
from slipstream.server.responses import DONE, event

DEFAULT_MAX_TOKENS = 128
"""SGLang's default for this route."""

_NAMES = {
    "prompt_token_ids": "input_ids",
    "cache_salt": "extra_key",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "top_logprobs_num",
    "max_tokens": "sampling_params.max_new_tokens",
    "min_tokens": "sampling_params.min_new_tokens",
    "seed": "sampling_params.sampling_seed",
    **{
        name: f"sampling_params.{name}"
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "logit_bias"),
            *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        )
    },
}


def prepare(inputs: InputProcessor, body: GenerateBody) -> list[Request]:
    """The engine's requests for a body, one per prompt."""
    name, prompts = _prompts(body)
    count = len(prompts)
    each_params = _for_each(body.sampling_params, count, "sampling_params", GenerateSampling())
    wants = _for_each(body.return_logprob, count, "return_logprob", False)
    tops = _for_each(body.top_logprobs_num, count, "top_logprobs_num", 0)
    starts = _for_each(body.logprob_start_len, count, "logprob_start_len", -1)
    if min(starts) < -1:
        raise InvalidRequestError("logprob_start_len must be -1 or more", param="logprob_start_len")
    if min(tops) < 0 or max(tops) > MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs_num must be a whole number from 0 to {MAX_LOGPROBS}", param="top_logprobs_num"
        )
    requests = []
    with naming({**_NAMES, "prompt": name}):
        check_choices([inputs.defaults.n if each.n is None else each.n for each in each_params])
        for prompt, sampling, wanted, top, start in zip(prompts, each_params, wants, tops, starts, strict=True):
            check_neutral(sampling, "sampling_params.")
            params = _params(inputs.defaults, sampling, top if wanted else None, scores=bool(wanted) and start >= 0)
            request = inputs.request(prompt, params, priority=body.priority or 0, cache_salt=body.extra_key)
            requests.append(request)
        limit_output(requests, DEFAULT_MAX_TOKENS)
    return requests


def _params(defaults: SamplingParams, sampling: GenerateSampling, top: int | None, *, scores: bool) -> SamplingParams:
    return params_from(
        sampling,
        defaults,
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        seed=sampling.sampling_seed,
        include_stop_str_in_output=sampling.no_stop_trim,
        logprobs=top,
        prompt_logprobs=top if scores else None,
    )


def _prompts(body: GenerateBody) -> tuple[str, list[Prompt]]:
    """The field that holds the prompts, and what they are."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequestError("give either text or input_ids", param="text")
    given: Any = body.text if body.text is not None else body.input_ids
    name = "text" if body.text is not None else "input_ids"
    if not given:
        raise InvalidRequestError(f"{name} must not be empty", param=name)
    if isinstance(given, str) or isinstance(given[0], int):
        return name, [given]
    check_prompts(len(given), name)
    if name == "input_ids" and not all(isinstance(ids, list) for ids in given):
        raise InvalidRequestError("input_ids must be a list of token ids or a list of such lists", param=name)
    return name, list(given)


def _for_each(value: Any, count: int, name: str, default: Any) -> list[Any]:
    """A setting that may be given once or for each prompt."""
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{name} has {len(value)} entries for {count} prompts", param=name)
    return value


class GenerateAnswer:
    """The answer to one /generate, whole or in events; one object per choice, a list if there are several."""

    def __init__(self, body: GenerateBody, job: Job) -> None:
        self._body = body
        self._job = job
        self._names = TokenNames(job.engine.inputs.tokenizer)
        self._starts = _for_each(body.logprob_start_len, len(job.requests), "logprob_start_len", -1)
        self._single = len(job.requests) == 1 and job.requests[0].params.n == 1
        ids = body.rid if isinstance(body.rid, list) else [body.rid] * len(job.requests)
        if len(ids) != len(job.requests):
            raise InvalidRequestError(f"rid has {len(ids)} entries for {len(job.requests)} prompts", param="rid")
        self._ids = {request.id: checked_id(own, "rid") for request, own in zip(job.requests, ids, strict=True)}
        self._output_lists: dict[int, tuple[list[Any], list[Any]]] = {}
        self._prompt_lists: dict[str, dict[str, msgspec.Raw]] = {}
        self._place = {request.id: place for place, request in enumerate(job.requests)}

    async def whole(self) -> Any:
        """One object, or a list of them."""
        with naming(_NAMES):
            outputs = await self._job.outputs()
        shown = [self._shown(*found) for found in self._job.choices(outputs)]
        return shown[0] if self._single else shown

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Events with all there is so far of the choice that changed.

        What is said of the prompt never changes and may be long, so only a choice's first and last events have it.
        """
        collectors = {request.id: OutputCollector(request) for request in self._job.requests}
        begun: set[int] = set()
        with naming(_NAMES):
            async with aclosing(self._job.updates()) as batches:
                async for batch in batches:
                    changed = {}
                    for update in batch:
                        output = collectors[update.request.id].add(update)
                        for delta in update.deltas:
                            changed[self._job.place(update.request) + delta.index] = output, output.outputs[delta.index]
                    events = []
                    for number, (output, choice) in changed.items():
                        ends = choice.finish_reason is not None
                        shown = self._shown(number, output, choice, with_prompt=ends or number not in begun)
                        begun.add(number)
                        events.append(event(shown if self._single else {"index": number, **shown}))
                    if events:
                        yield b"".join(events)
        yield DONE

    def _shown(
        self, number: int, output: RequestOutput, choice: CompletionOutput, *, with_prompt: bool = True
    ) -> dict[str, Any]:
        times = output.metrics
        meta: dict[str, Any] = {
            "id": self._ids[output.request_id],
            "finish_reason": _finish(choice),
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": output.num_cached_tokens,
            "e2e_latency": time.monotonic() - times.arrival_time,
            "seed": output.seed,
        }
        if choice.logprobs is not None:
            tuples, tops = self._output_lists.setdefault(number, ([], []))
            known = len(tuples)
            tuples += self._tuples(choice.token_ids[known:], choice.logprobs[known:])
            tops += self._tops(output, choice.logprobs[known:])
            meta["output_token_logprobs"], meta["output_top_logprobs"] = tuples, tops
        if with_prompt:
            meta |= self._of_prompt(output)
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}

    def _of_prompt(self, output: RequestOutput) -> dict[str, msgspec.Raw]:
        """What is reported of the prompt's tokens, as JSON that is made once for all the choices and events."""
        start = self._starts[self._place[output.request_id]]
        if output.prompt_logprobs is None or start < 0:
            return {}
        made = self._prompt_lists.get(output.request_id)
        if made is None:
            entries = output.prompt_logprobs[start:]
            lists = {
                "input_token_logprobs": self._tuples(output.prompt_token_ids[start:], entries),
                "input_top_logprobs": self._tops(output, entries),
            }
            made = {name: msgspec.Raw(msgspec.json.encode(items)) for name, items in lists.items()}
            self._prompt_lists[output.request_id] = made
        return made

    def _tuples(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> list[Any]:
        return [
            self._tuple(token, None if entry is None else entry[token].logprob)
            for token, entry in zip(tokens, entries, strict=True)
        ]

    def _tuple(self, token: int, logprob: float | None) -> list[Any]:
        return [logprob, token, self._names.name(token) if self._body.return_text_in_logprobs else None]

    def _tops(self, output: RequestOutput, entries: Sequence[TokenLogprobs | None]) -> list[Any]:
        top = self._job.requests[self._place[output.request_id]].params.logprobs or 0
        return [
            [self._tuple(token, found.logprob) for token, found in most_likely(entry, top)] if entry and top else None
            for entry in entries
        ]


def _finish(choice: CompletionOutput) -> dict[str, Any] | None:
    """How it ended: the matched token or text of a stop, the length of a cut; None while it goes on."""
    if choice.finish_reason is None:
        return None
    if choice.finish_reason == "length":
        return {"type": "length", "length": len(choice.token_ids)}
    matched = choice.stop_reason if choice.stop_reason is not None else choice.token_ids[-1]
    return {"type": "stop", "matched": matched}
