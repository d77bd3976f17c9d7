"""A streamed answer of an OpenAI-compatible server: what it held and when its pieces came."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

REJECTED = "HTTP 503"
"""How a server says that its queue is full."""


@dataclass
class Answer:
    """One request as the client saw it. Times are readings of the client's clock in seconds.

    `times` are those of the pieces that carry output; `counts` the tokens that the server had reported at each of them,
    or None. `prompt_tokens` and `output_tokens` are the server's counts, None if it gave none. `failure` says why a
    request does not count, `detail` is the server's own message.
    """

    sent: float
    times: list[float] = field(default_factory=list)
    counts: list[int | None] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    failure: str | None = None
    detail: str = ""

    @property
    def tokens(self) -> int:
        """Output tokens: the server's count, else the number of pieces."""
        return len(self.times) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def e2e(self) -> float:
        """Until the last output."""
        return self.times[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time of an output token after the first; None if there is only one."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between the pieces."""
        return [b - a for a, b in itertools.pairwise(self.times)]

    def inter_token(self) -> list[float]:
        """Seconds between tokens: each gap is shared by the tokens of the piece that ended it.

        How many those are, the server says with each piece, or all pieces are taken as equal.
        """
        known = _differences(self.counts)
        if known is not None:
            return [gap / n for gap, n in zip(self.gaps, known, strict=True) for _ in range(n)]
        share = max(1.0, self.tokens / max(1, len(self.times)))
        return [gap / share for gap in self.gaps]

    def fail(self, reason: str, detail: str = "") -> None:
        """Mark the request as failed; the first reason stays."""
        if self.failure is None:
            self.failure, self.detail = reason, detail[:200]


def _differences(counts: Sequence[int | None]) -> list[int] | None:
    """Tokens of each piece after the first, from running counts; None unless each piece has one."""
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    return [max(1, b - a) for a, b in itertools.pairwise(known)]


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    refusal: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        """Whether it carries tokens. In a completion an empty text can stand for a token without text."""
        if self.delta is not None:
            delta = self.delta
            fields = (delta.content, delta.reasoning_content, delta.reasoning, delta.tool_calls, delta.refusal)
            return any(fields)
        return bool(self.text) or (self.text == "" and self.finish_reason is None)


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class AnswerStream:
    """Reads server-sent events as they come. Bytes may be cut anywhere."""

    def __init__(self, sent: float) -> None:
        self.answer = Answer(sent)
        self._rest = b""
        self._ended = False

    def feed(self, data: bytes, now: float) -> None:
        """Take in bytes that came at `now`. Lines they complete count as of then."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def finish(self, now: float) -> Answer:
        """The answer, once the connection has nothing more."""
        self.feed(b"\n", now)
        if not self.answer.times:
            self.answer.fail("no output in the stream")
        elif not self._ended:
            self.answer.fail("the stream broke off")
        return self.answer

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            self.answer.fail("an event that cannot be read", str(error))
            return
        if event.error is not None:
            self.answer.fail("an error in the stream", error_message(event.error))
        usage = event.usage
        for choice in event.choices or ():
            if choice.has_output:
                self.answer.times.append(now)
                self.answer.counts.append(None if usage is None else usage.completion_tokens)
            if choice.finish_reason is not None:
                self._ended = True
        if usage is not None and usage.completion_tokens is not None:
            self.answer.output_tokens, self.answer.prompt_tokens = usage.completion_tokens, usage.prompt_tokens
            if usage.prompt_tokens_details is not None:
                self.answer.cached_tokens = usage.prompt_tokens_details.cached_tokens


def error_message(error: Any) -> str:
    """What a server says in an error object, whichever form it has."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        if isinstance(inner, dict):
            return str(inner.get("message") or inner.get("detail") or inner)
        return str(inner)
    return str(error)
