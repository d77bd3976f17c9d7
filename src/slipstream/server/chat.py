"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from slipstream.core.errors import InvalidRequestError
from slipstream.core.outputs import CompletionOutput
from slipstream.core.request import Request
from slipstream.engine.inputs import InputProcessor
from slipstream.server.bodies import ChatBody
from slipstream.server.chunks import chunk_events
from slipstream.server.generation import Job, News, naming, new_id, params_from
from slipstream.server.logprobs import TokenNames, chat_logprobs, prompt_logprobs


def prepare(inputs: InputProcessor, body: ChatBody) -> list[Request]:
    """The engine's request for a body; renders and tokenizes, so it does not belong into the event loop."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    limits = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise InvalidRequestError(
            f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}; give one",
            param="max_tokens",
        )
    if None not in (body.cache_salt, body.prompt_cache_key) and body.cache_salt != body.prompt_cache_key:
        raise InvalidRequestError(
            "cache_salt and prompt_cache_key are the same setting here; give one of them", param="prompt_cache_key"
        )
    own_names = {"logprobs": "top_logprobs", "prompt": "messages"}
    if body.max_completion_tokens is not None:
        own_names["max_tokens"] = "max_completion_tokens"
    if body.cache_salt is None:
        own_names["cache_salt"] = "prompt_cache_key"
    continues = bool(body.continue_final_message)
    begins = body.add_generation_prompt
    with naming(own_names):
        params = params_from(
            body,
            inputs.defaults,
            max_tokens=next(iter(limits), None),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        return [
            inputs.chat(
                body.messages,
                params,
                priority=body.priority or 0,
                cache_salt=body.cache_salt if body.cache_salt is not None else body.prompt_cache_key,
                chat_template_kwargs=body.chat_template_kwargs,
                documents=body.documents,
                continue_final_message=continues,
                add_generation_prompt=not continues if begins is None else begins,
            )
        ]


class ChatAnswer:
    """The answer to one chat, whole or in chunks."""

    def __init__(self, body: ChatBody, job: Job, *, model: str, fingerprint: str) -> None:
        self._body = body
        self._job = job
        self._request = job.requests[0]
        self._names = TokenNames(job.engine.inputs.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._head = {
            "id": new_id("chatcmpl", body.request_id),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
            "seed": self._request.seed,
        }

    async def whole(self) -> dict[str, Any]:
        """The chat.completion object."""
        (output,) = await self._job.outputs()
        answer = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(choice) for choice in output.outputs],
            "usage": self._job.usage.as_json(),
        }
        if output.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(
                output.prompt_logprobs, self._request.params.prompt_logprobs or 0
            )
        if self._body.return_token_ids:
            answer["prompt_token_ids"] = output.prompt_token_ids
        return answer

    def chunks(self) -> AsyncGenerator[bytes, None]:
        """Its chat.completion.chunk events."""
        head = {**self._head, "object": "chat.completion.chunk"}
        return chunk_events(self._body, self._job, head, lambda news: self._chunk(head, news))

    def _chunk(self, head: dict[str, Any], news: News) -> dict[str, Any]:
        delta = news.delta
        message: dict[str, Any] = {"role": "assistant"} if news.first else {}
        if delta.text or news.first:
            message["content"] = delta.text
        choice = {
            "index": news.choice,
            "delta": message,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
        chunk = {**head, "choices": [choice]}
        if news.first and self._body.return_token_ids:
            chunk["prompt_token_ids"] = news.request.prompt_ids
        if news.first and news.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = prompt_logprobs(news.prompt_logprobs, self._request.params.prompt_logprobs or 0)
        return chunk

    def _choice(self, choice: CompletionOutput) -> dict[str, Any]:
        shown = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

    def _logprobs(self, entries: Any) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(entries or [], self._names, self._body.top_logprobs or 0)
