"""One continuation of a request while the engine works on it."""

from __future__ import annotations

from enum import Enum

from slipstream.cache.manager import SequencePages
from slipstream.core.errors import InvalidRequestError, RequestFailedError, SlipstreamError
from slipstream.core.outputs import TokenLogprobs
from slipstream.core.request import Request
from slipstream.sampling.state import SequenceSampler
from slipstream.text.detokenizer import Detokenizer
from slipstream.text.stop_strings import StopStrings


class State(Enum):
    """Where a sequence is: waiting for room (also after preemption), in steps, or done."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens, pages, sampler and text state of choice `index` of a request.

    `tokens` holds prompt and output; the first `computed` of them are in the cache. `leader` is the choice whose prompt
    this one waits for, to take it from the prefix tree.
    """

    __slots__ = (
        "computed",
        "detokenizer",
        "index",
        "last_token_time",
        "leader",
        "num_cached_tokens",
        "order",
        "pages",
        "prompt_len",
        "prompt_logprobs",
        "request",
        "sampler",
        "state",
        "stop_strings",
        "tokens",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        *,
        order: int,
        sampler: SequenceSampler,
        detokenizer: Detokenizer | None,
        leader: Sequence | None,
    ) -> None:
        self.request = request
        self.index = index
        self.order = order
        self.tokens = list(request.prompt_ids)
        self.prompt_len = len(self.tokens)
        self.computed = 0
        self.pages = SequencePages(request.namespace)
        self.sampler = sampler
        self.detokenizer = detokenizer
        params = request.params
        self.stop_strings = StopStrings(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        self.leader = leader
        self.state = State.WAITING
        self.last_token_time: float | None = None
        self.num_cached_tokens: int | None = None  # not known before the first admission
        scores = params.prompt_logprobs is not None and index == 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if scores else None

    @property
    def rank(self) -> tuple[int, int]:
        """Lower is served first: priority, then arrival."""
        return self.request.priority, self.order

    @property
    def remaining(self) -> int:
        """Tokens that are not in the cache yet; the last one's row samples the next token."""
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def wants_scores(self) -> bool:
        """Whether some prompt token's logprob is still owed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len

    def no_token_error(self) -> SlipstreamError:
        """Why no token could be chosen for the next place: the request's own rules, or the model."""
        rules = self.sampler.exhausted_by()
        if not rules:
            return RequestFailedError("no token could be chosen: the model gave no finite logits")
        return InvalidRequestError(
            f"no token is left to generate at place {self.num_output + 1} of the output: all are excluded by "
            + ", ".join(rules),
            param=rules[0],
        )

    @property
    def held_up(self) -> bool:
        """Whether this choice still waits for the first one's prompt."""
        leader = self.leader
        return leader is not None and leader.state is not State.FINISHED and leader.computed < leader.prompt_len
