"""From what a caller passes to a checked, tokenized `Request`. Runs in the caller's thread."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import ContextLengthError, InvalidRequestError
from slipstream.core.outputs import RequestMetrics
from slipstream.core.request import Request
from slipstream.core.sampling_params import SamplingParams
from slipstream.sampling.state import bad_word_ids
from slipstream.text.chat_template import ChatTemplate, encode_chat
from slipstream.text.look_alikes import strings_in
from slipstream.text.stop_strings import stop_table
from slipstream.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids` and optionally `cache_salt` (vLLM's shape)."""


_CHAT_OPTIONS = {"tools", "documents", "add_generation_prompt", "continue_final_message"}


@dataclass(slots=True)
class _Parsed:
    text: str | None
    ids: Sequence[int] | None
    salt: str | None


class InputProcessor:
    """Checks and tokenizes requests for one model."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        template: ChatTemplate | None,
        vocab_size: int,
        max_model_len: int,
        defaults: SamplingParams,
        seed: int | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.defaults = defaults
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> Request:
        """A request from text or token ids. Raises InvalidRequestError naming the field at fault.

        `add_special_tokens` puts BOS in front of a text if the model wants it.
        """
        parsed = _parse(prompt)
        if parsed.ids is None:
            ids = self._encode(parsed.text, add_special_tokens=add_special_tokens)
        else:
            ids = self._check_ids(parsed.ids)
        salt = cache_salt if cache_salt is not None else parsed.salt
        return self._build(ids, parsed.text, params, request_id, priority, salt)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Request:
        """A request from chat messages through the model's template.

        `options` are those of `ChatTemplate.render`; `chat_template_kwargs` are further variables of the template.
        Documents and variables that the template never reads are refused.
        """
        ids = self.chat_ids(messages, chat_template_kwargs, **options)
        assert self.tokenizer is not None
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        return self._build(ids, text, params, request_id, priority, cache_salt)

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], chat_template_kwargs: Mapping[str, Any] | None, **options: Any
    ) -> list[int]:
        """The token ids of a conversation; see `chat`."""
        if self.tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer, so it cannot chat", param="messages")
        variables = dict(chat_template_kwargs or {})
        for name in _CHAT_OPTIONS & variables.keys():
            raise InvalidRequestError(
                f"chat_template_kwargs cannot set {name}, which is a field of its own", param="chat_template_kwargs"
            )
        if self.template is not None:
            if options.get("documents"):
                self.template.check_read("documents", "documents")
            for name in variables:
                self.template.check_read(name, "chat_template_kwargs")
        self._refuse_hopeless("".join(strings_in(messages)), "messages")
        return encode_chat(self.tokenizer, self.template, messages, **options, **variables)

    def _encode(self, text: str | None, *, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer; pass token ids", param="prompt")
        self._refuse_hopeless(text or "", "prompt")
        return self.tokenizer.encode(text or "", add_special_tokens=add_special_tokens)

    def _refuse_hopeless(self, text: str, param: str) -> None:
        """Refuse a text that is far too long by its beginning: tokenizing takes hundreds of bytes per character.

        What follows a text can change how its end is cut into tokens, but not halve the number of its tokens.
        """
        assert self.tokenizer is not None
        hopeless = 2 * self.max_model_len
        size = 8 * hopeless
        while size < len(text):
            count = len(self.tokenizer.encode(text[:size], add_special_tokens=False, param=param))
            if count > hopeless:
                raise ContextLengthError(
                    f"the first {size} characters of the prompt alone are {count} tokens; the model's context holds "
                    f"{self.max_model_len} tokens",
                    param=param,
                )
            size *= 2

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
            raise InvalidRequestError(
                f"prompt_token_ids must be a list of token ids, not {type(ids).__name__}", param="prompt_token_ids"
            )
        checked = []
        for index, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise InvalidRequestError(
                    f"prompt_token_ids[{index}] must be a token id from 0 to {self.vocab_size - 1}, not {token!r}",
                    param="prompt_token_ids",
                )
            checked.append(int(token))
        return checked

    def _build(
        self,
        ids: list[int],
        text: str | None,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        salt: str | None,
    ) -> Request:
        params = self.defaults if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, not {type(params).__name__}", param="sampling_params"
            )
        params.validate_for_model(self.vocab_size)
        if not ids:
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        if max(ids) >= self.vocab_size:
            raise InvalidRequestError(
                f"the prompt's text gives token {max(ids)}, but the model has {self.vocab_size} tokens", param="prompt"
            )
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise InvalidRequestError("request_id must be a string that is not empty", param="request_id")
        if any(not word.strip() for word in params.bad_words or ()):
            raise InvalidRequestError("bad_words must not hold a word of white space alone", param="bad_words")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidRequestError(f"priority must be a whole number, not {priority!r}", param="priority")
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise InvalidRequestError("cache_salt must be a string that is not empty", param="cache_salt")
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise InvalidRequestError("stop strings and bad words need a tokenizer", param="stop")
        if params.echo and text is None and self.tokenizer is not None:
            text = self.tokenizer.decode(ids, skip_special_tokens=False)
        encode = None if self.tokenizer is None else self.tokenizer
        banned = (
            bad_word_ids(params.bad_words, lambda w: encode.encode(w, add_special_tokens=False))
            if (params.bad_words and encode is not None)
            else []
        )
        if params.stop:
            stop_table(tuple(params.stop))  # made here, not in the engine's thread, where all requests would wait
        namespace: Hashable = salt
        return Request(
            id=request_id or f"req-{uuid.uuid4().hex}",
            prompt_ids=ids,
            params=params,
            max_tokens=self._room(len(ids), params),
            seed=self._seed() if params.seed is None else params.seed,
            prompt=text,
            priority=priority,
            namespace=namespace,
            bad_word_ids=banned,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
        )

    def _room(self, prompt_len: int, params: SamplingParams) -> int:
        """Tokens each choice may have; asking for more than there is room for is refused."""
        asked = params.max_tokens
        room = self.max_model_len - prompt_len
        least = max(1, params.min_tokens) if asked is None else asked
        if least > room:
            wants = f"and max_tokens {asked}"
            if asked is None:
                wants = f"and min_tokens {least}" if params.min_tokens > 1 else "and at least one token of output"
            raise ContextLengthError(
                f"the prompt has {prompt_len} tokens; with it {wants} the request needs {prompt_len + least} of the "
                f"model's context of {self.max_model_len} tokens",
                param="prompt" if room < 1 else "min_tokens" if asked is None else "max_tokens",
            )
        return room if asked is None else asked

    def _seed(self) -> int:
        with self._lock:
            return self._random.getrandbits(53)  # a double, and so JavaScript, holds it exactly


def _parse(prompt: Prompt) -> _Parsed:
    if isinstance(prompt, str):
        return _Parsed(prompt, None, None)
    if isinstance(prompt, Mapping):
        unknown = sorted(map(str, set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}))
        if unknown:
            raise InvalidRequestError(f"prompt has an unknown key {unknown[0]!r}", param=unknown[0])
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if (text is None and ids is None) or (text is not None and not isinstance(text, str)):
            raise InvalidRequestError("prompt must hold a string `prompt` or `prompt_token_ids`", param="prompt")
        return _Parsed(text, ids, prompt.get("cache_salt"))
    if isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes):
        return _Parsed(None, prompt, None)
    raise InvalidRequestError(f"prompt must be text or token ids, not {type(prompt).__name__}", param="prompt")
