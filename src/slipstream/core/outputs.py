"""What a caller gets back. Field names follow vLLM's `RequestOutput` and `CompletionOutput`."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One token's natural-log probability under the model's own distribution (before penalties and temperature).

    `rank` is 1 for the most likely token. `decoded_token` is the token's text on its own.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Token id to its Logprob: the chosen token first, then the most likely ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request: all of it so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Clock readings of a request in seconds (monotonic clock), and counts."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request's state: all its choices and what is known of the prompt.

    `seed` is the seed in use (the caller's, or the one drawn for it). `num_cached_tokens` counts prompt tokens taken
    from the prefix cache. `prompt_logprobs[0]` is None, since nothing precedes the first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    seed: int | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
