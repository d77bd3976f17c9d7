"""What an engine counts, and a picture of it that may leave the engine's thread or process."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.core.histogram import SECONDS, SHORT_SECONDS, TOKENS, Histogram
from slipstream.core.request import Request


def _seconds() -> Histogram:
    return Histogram(SECONDS)


def _tokens() -> Histogram:
    return Histogram(TOKENS)


@dataclass(slots=True)
class EngineStats:
    """Counts since the start, and the last step's times in ms.

    `host_ms` is the step without the time in which the host had nothing to do: the model's call and the sampling. It
    holds schedule, fill, handing over what the step before gave, and taking the results in.

    Histograms are in seconds and tokens. `finished` counts requests by how they ended: stop, length, abort or error.
    """

    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    failed_steps: int = 0
    step_ms: float = 0.0
    host_ms: float = 0.0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "abort", "error"), 0))
    step: Histogram = field(default_factory=_seconds)
    host: Histogram = field(default_factory=lambda: Histogram(SHORT_SECONDS))
    time_to_first_token: Histogram = field(default_factory=_seconds)
    inter_token: Histogram = field(default_factory=_seconds)
    time_per_output_token: Histogram = field(default_factory=_seconds)
    end_to_end: Histogram = field(default_factory=_seconds)
    queue: Histogram = field(default_factory=_seconds)
    prefill: Histogram = field(default_factory=_seconds)
    decode: Histogram = field(default_factory=_seconds)
    prompt_length: Histogram = field(default_factory=_tokens)
    output_length: Histogram = field(default_factory=_tokens)

    def observe_step(self, rows: int, step_s: float, host_s: float) -> None:
        """Count a step that succeeded."""
        self.steps += 1
        self.rows += rows
        self.step_ms, self.host_ms = step_s * 1e3, host_s * 1e3
        self.step.observe(step_s)
        self.host.observe(host_s)

    def observe_finished(self, request: Request, reason: str, output_tokens: int) -> None:
        """Count a request that ended; `output_tokens` is the sum over its choices."""
        self.finished[reason] = self.finished.get(reason, 0) + 1
        times = request.metrics
        ended = times.finished_time
        if reason not in ("stop", "length") or ended is None:
            return
        self.end_to_end.observe(ended - times.arrival_time)
        self.prompt_length.observe(len(request.prompt_ids))
        self.output_length.observe(output_tokens)
        first, last = times.first_token_time, times.last_token_time
        if first is None or last is None or times.first_scheduled_time is None:
            return
        self.prefill.observe(first - times.first_scheduled_time)
        self.decode.observe(last - first)
        per_choice = output_tokens / request.params.n
        if per_choice > 1:
            self.time_per_output_token.observe((last - first) / (per_choice - 1))


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine's counts and what it is doing now. `pages_total` leaves the scratch page out."""

    stats: EngineStats
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
