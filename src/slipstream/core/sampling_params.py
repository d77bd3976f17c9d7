"""What a caller may ask of sampling. Names and meanings follow vLLM's `SamplingParams`; each field is checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from slipstream.core.errors import InvalidRequestError

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
"""Characters of one stop string."""
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_CHARACTERS = 16384
"""Of all bad words together."""
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0


def _refuse(name: str, limit: str, value: object) -> InvalidRequestError:
    shown = repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return InvalidRequestError(f"{name} must be {limit}, got {shown}", param=name)


def _real(name: str, value: object, limit: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _refuse(name, limit, value)
    try:
        number = float(value)
    except OverflowError:
        raise _refuse(name, limit, value) from None
    if not math.isfinite(number):
        raise _refuse(name, limit, value)
    return number


def _whole(name: str, value: object, low: int, high: int | None, limit: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _refuse(name, limit, value)
    number = int(value)
    if number < low or (high is not None and number > high):
        raise _refuse(name, limit, value)
    return number


def _items(name: str, value: object, limit: str) -> list[object]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _refuse(name, limit, value)
    return list(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    limit = "a list of token ids (integers of 0 or more)"
    return tuple(_whole(name, item, 0, None, limit) for item in _items(name, value, limit))


def _strings(name: str, value: object, most: int | None, longest: int | None = None) -> tuple[str, ...]:
    limit = "a list of non-empty strings" if most is None else f"a string or a list of at most {most} non-empty strings"
    items = _items(name, value, limit)
    if most is not None and len(items) > most:
        raise _refuse(name, limit, value)
    strings = tuple(item for item in items if isinstance(item, str) and item)
    if len(strings) != len(items):
        raise _refuse(name, limit, value)
    if longest is not None and (length := max(map(len, strings), default=0)) > longest:
        limit = f"made of strings of at most {longest} characters"
        raise InvalidRequestError(f"{name} must be {limit}, got one of {length}", param=name)
    return strings


def _check_length(name: str, kind: str, length: int, most: int) -> None:
    if length > most:
        raise InvalidRequestError(f"{name} must be at most {most} {kind}, got {length}", param=name)


def _biases(value: object) -> dict[int, float]:
    limit = f"a mapping of token ids to numbers in [-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]"
    if not isinstance(value, Mapping):
        raise _refuse("logit_bias", limit, value)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # JSON has no integer keys, so "123" stands for 123.
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20 else key
        number = _real("logit_bias", bias, limit)
        if abs(number) > MAX_LOGIT_BIAS:
            raise _refuse("logit_bias", limit, bias)
        biases[_whole("logit_bias", token, 0, None, limit)] = number
    return biases


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, when they end, and what is reported of them.

    Wrong values raise `InvalidRequestError` with `param` set to the field's name and the limit in the message.
    Lists are kept as tuples. `slipstream.ops.sample` states the order in which the rules are applied.
    """

    n: int = 1
    """Choices per request, 1 to 128."""
    max_tokens: int | None = None
    """Tokens to generate at most, 0 or more (0: only the prompt is scored); None: the room left in the context."""
    seed: int | None = None
    """Any integer of 64 bits; a negative one means itself plus 2**64. None: the engine draws one and reports it."""

    # rules
    temperature: float = 1.0
    """0 or more; 0 is greedy: the most likely token, the lowest id if several are equal."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1: all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities sum to this or more; in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one; in [0, 1]."""
    typical_p: float = 1.0
    """Keep the fewest tokens, nearest to the entropy first, whose probabilities sum to this or more; in (0, 1]."""
    repetition_penalty: float = 1.0
    """Above 0. Positive logits of tokens in prompt or output are divided by it, negative ones multiplied."""
    frequency_penalty: float = 0.0
    """In [-2, 2]; taken from a token's logit once per occurrence in the output."""
    presence_penalty: float = 0.0
    """In [-2, 2]; taken from the logit of every token that occurs in the output."""
    logit_bias: Mapping[int, float] | None = None
    """Token id to what is added to its logit, in [-100, 100]."""
    bad_words: Sequence[str] | None = None
    """Up to 1,024 words, of up to 16,384 characters together, that must not be generated."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be generated."""

    # ends
    min_tokens: int = 0
    """Before so many tokens neither the end tokens (unless `ignore_eos`) nor `stop_token_ids` can be generated."""
    stop: Sequence[str] = ()
    """Up to 16 strings of up to 1,024 characters; the output ends before the first to appear. One string will do."""
    stop_token_ids: Sequence[int] = ()
    """The output ends with the first of these tokens, up to 1,024."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on after the model's end tokens."""

    # reports
    logprobs: int | None = None
    """Alternatives to report per generated token, 0 to 20; 0: the chosen token alone. None: nothing is reported."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    echo: bool = False
    """The prompt comes before the output."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_numbers()
        self._check_lists()
        for name in ("include_stop_str_in_output", "ignore_eos", "echo", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _refuse(name, "true or false", getattr(self, name))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_counts(self) -> None:
        self._set("n", _whole("n", self.n, 1, MAX_CHOICES, f"an integer from 1 to {MAX_CHOICES}"))
        if self.max_tokens is not None:
            self._set("max_tokens", _whole("max_tokens", self.max_tokens, 0, None, "an integer of 0 or more"))
        self._set("min_tokens", _whole("min_tokens", self.min_tokens, 0, None, "an integer of 0 or more"))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _refuse("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        top_k = _whole("top_k", self.top_k, -1, 2**31 - 1, "an integer from -1 to 2**31 - 1 (0 and -1: off)")
        self._set("top_k", max(top_k, 0))
        if self.seed is not None:
            limit = "an integer from -2**63 to 2**64 - 1"
            self._set("seed", _whole("seed", self.seed, -(2**63), 2**64 - 1, limit))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                limit = f"an integer from 0 to {MAX_LOGPROBS}"
                self._set(name, _whole(name, getattr(self, name), 0, MAX_LOGPROBS, limit))

    def _check_numbers(self) -> None:
        def check(name: str, limit: str, low: float, high: float = math.inf, *, above: bool = False) -> None:
            number = _real(name, getattr(self, name), limit)
            if number < low or number > high or (above and number == low):
                raise _refuse(name, limit, number)
            self._set(name, number)

        check("temperature", "a finite number of 0 or more", 0.0)
        check("top_p", "in (0, 1]", 0.0, 1.0, above=True)
        check("min_p", "in [0, 1]", 0.0, 1.0)
        check("typical_p", "in (0, 1]", 0.0, 1.0, above=True)
        check("repetition_penalty", "a finite number above 0", 0.0, above=True)
        for name in ("frequency_penalty", "presence_penalty"):
            check(name, f"in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]", -MAX_PENALTY, MAX_PENALTY)

    def _check_lists(self) -> None:
        stop = self.stop
        if stop is None or isinstance(stop, str):
            stop = () if stop is None else (stop,)
        self._set("stop", _strings("stop", stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH))
        stop_ids = () if self.stop_token_ids is None else self.stop_token_ids
        self._set("stop_token_ids", _token_ids("stop_token_ids", stop_ids))
        _check_length("stop_token_ids", "token ids", len(self.stop_token_ids), MAX_STOP_TOKENS)
        if self.bad_words is not None:
            self._set("bad_words", _strings("bad_words", self.bad_words, None))
            _check_length("bad_words", "words", len(self.bad_words), MAX_BAD_WORDS)
            _check_length("bad_words", "characters together", sum(map(len, self.bad_words)), MAX_BAD_CHARACTERS)
        if self.logit_bias is not None:
            self._set("logit_bias", _biases(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise _refuse("allowed_token_ids", "null or a list of at least one token id", [])

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> SamplingParams:
        """Make from a dict; an unknown name raises `InvalidRequestError` with that name as `param`."""
        known = {field.name for field in fields(cls)}
        for name in mapping:
            if name not in known:
                raise InvalidRequestError(f"unknown sampling parameter {name!r}", param=str(name))
        return cls(**mapping)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken, without noise."""
        return self.temperature == 0.0

    def validate_for_model(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` if a token id is not below `vocab_size`, or more of them are allowed."""
        kind = f"token ids (the vocabulary's size {vocab_size})"
        _check_length("allowed_token_ids", kind, len(self.allowed_token_ids or ()), vocab_size)
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise _refuse(name, f"made of token ids below the vocabulary's size {vocab_size}", token)
