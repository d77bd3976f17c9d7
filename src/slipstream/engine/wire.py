"""What an engine in another process and its parent say to each other, over a pipe of pickled values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.core.errors import SlipstreamError
from slipstream.core.outputs import RequestMetrics, TokenLogprobs
from slipstream.core.request import ChoiceDelta, Request, RequestUpdate
from slipstream.engine.stats import EngineSnapshot


@dataclass(frozen=True, slots=True)
class Submit:
    """Parent to child: run a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """Parent to child: drop a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Child to parent, while it loads."""

    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Child to parent: loaded; these are the limits of the model and what was decided."""

    vocab_size: int
    max_model_len: int
    report: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Failed:
    """Child to parent: it could not load, and exits."""

    error: SlipstreamError


@dataclass(frozen=True, slots=True)
class Logged:
    """Child to parent: a line for the log, which only the parent writes."""

    level: int
    logger: str
    text: str


@dataclass(frozen=True, slots=True)
class Beat:
    """Child to parent, regularly: how long its engine has been at one step, and its counts."""

    busy_for: float
    snapshot: EngineSnapshot


@dataclass(frozen=True, slots=True)
class Update:
    """A RequestUpdate without its request, which the parent has. `metrics` comes with the last one."""

    request_id: str
    deltas: list[ChoiceDelta]
    finished: bool
    error: SlipstreamError | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    num_cached_tokens: int
    metrics: RequestMetrics | None

    @classmethod
    def of(cls, update: RequestUpdate) -> Update:
        return cls(
            update.request.id,
            update.deltas,
            update.finished,
            update.error,
            update.prompt_logprobs,
            update.num_cached_tokens,
            update.request.metrics if update.finished else None,
        )

    def to(self, request: Request) -> RequestUpdate:
        """The update for the parent's copy of the request."""
        if self.metrics is not None:
            request.metrics = self.metrics
        return RequestUpdate(
            request,
            self.deltas,
            finished=self.finished,
            error=self.error,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
        )
