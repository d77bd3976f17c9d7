"""A caller's request, ready for the engine."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from slipstream.core.errors import SlipstreamError
from slipstream.core.outputs import RequestMetrics, TokenLogprobs
from slipstream.core.sampling_params import SamplingParams


@dataclass(slots=True)
class Request:
    """What was asked for, checked and tokenized.

    `max_tokens` is the number of tokens each choice may have, with the room in the context counted in. `priority`:
    lower is served first. `namespace` holds all but the tokens that changes keys and values, such as a cache salt.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    prompt: str | None = None
    priority: int = 0
    namespace: Hashable = None
    bad_word_ids: list[list[int]] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


@dataclass(slots=True)
class ChoiceDelta:
    """What one step added to one choice of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestUpdate:
    """What one step did for one request. After one with `finished` or `error` nothing follows."""

    request: Request
    deltas: list[ChoiceDelta] = field(default_factory=list)
    finished: bool = False
    error: SlipstreamError | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
