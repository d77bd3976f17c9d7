"""Running the requests of one HTTP request and keeping count of them."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from slipstream.core.errors import InvalidRequestError, SlipstreamError
from slipstream.core.outputs import CompletionOutput, RequestOutput
from slipstream.core.request import ChoiceDelta, Request, RequestUpdate
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.collect import OutputCollector

MAX_ID = 128
MAX_PROMPTS = 1024
"""Of one HTTP request."""
MAX_CHOICES = 1024
"""Prompts times n of one HTTP request."""
SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))


def params_from(body: Any, defaults: SamplingParams, **more: Any) -> SamplingParams:
    """Sampling parameters of a body: `more`, else its fields of the same names; null and None mean the default."""
    given = {name: getattr(body, name, None) for name in SAMPLING_FIELDS} | more
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors inside speak of fields as the client called them."""
    try:
        yield
    except InvalidRequestError as error:
        param = error.param
        if param is not None and param in names:
            error.param = names[param]
        # Names of one word are words of the language too; they are replaced only where they are the field at fault.
        shown = [re.escape(own) for own in names if own == param or "_" in own]
        if shown:
            pattern = rf"(?<!the )\b({'|'.join(shown)})\b"
            error.message = re.sub(pattern, lambda found: names[found[1]], error.message)
            error.args = (error.message,)
        raise


def check_prompts(count: int, name: str) -> None:
    """Refuse too many prompts in the field `name`."""
    if count > MAX_PROMPTS:
        raise InvalidRequestError(f"{name} has {count} entries; at most {MAX_PROMPTS}", param=name)


def check_choices(per_prompt: Sequence[int]) -> None:
    """Refuse too many choices over all prompts; `per_prompt` has the n of each."""
    choices = sum(per_prompt)
    if choices > MAX_CHOICES:
        raise InvalidRequestError(
            f"n must give at most {MAX_CHOICES} choices in one request, got {choices} over {len(per_prompt)} prompts",
            param="n",
        )


def limit_output(requests: Iterable[Request], default: int) -> None:
    """Give requests without `max_tokens` the route's default. Raises InvalidRequestError if `min_tokens` is higher."""
    for request in requests:
        if request.params.max_tokens is not None:
            continue
        if request.params.min_tokens > default:
            raise InvalidRequestError(
                f"min_tokens must be at most max_tokens ({default} by default), got {request.params.min_tokens}",
                param="min_tokens",
            )
        request.max_tokens = min(request.max_tokens, default)


def new_id(prefix: str, given: str | None) -> str:
    """The id of an answer. Engine ids are never the client's: two clients may choose the same."""
    return f"{prefix}-{checked_id(given, 'request_id')}"


def checked_id(given: str | None, name: str) -> str:
    """The client's id, or a new one. Raises InvalidRequestError naming the field."""
    if given is not None and not 1 <= len(given) <= MAX_ID:
        raise InvalidRequestError(f"{name} must have 1 to {MAX_ID} characters, got {len(given)}", param=name)
    return uuid.uuid4().hex if given is None else given


@dataclass
class Usage:
    """Tokens of an HTTP request over all its prompts and choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass
class News:
    """What a step added to one choice. `choice` counts over all prompts; `first` marks a choice's first news."""

    request: Request
    choice: int
    delta: ChoiceDelta
    first: bool
    prompt_logprobs: list[Any] | None = None


@dataclass
class Job:
    """The engine requests of one HTTP request, one per prompt, in the order of the prompts."""

    engine: AsyncEngine
    requests: Sequence[Request]
    usage: Usage = field(default_factory=Usage)
    finish_reasons: list[str] = field(default_factory=list)
    on_end: Callable[[Job], None] | None = None

    def __post_init__(self) -> None:
        self._place: dict[str, int] = {}
        self._cached: dict[str, int] = {}
        place = 0
        for request in self.requests:
            self._place[request.id] = place
            place += request.params.n
        self.usage.prompt_tokens = sum(len(request.prompt_ids) for request in self.requests)

    async def updates(self) -> AsyncGenerator[list[RequestUpdate], None]:
        """Batches of updates, counted. Raises the error of the first request that fails."""
        try:
            async with aclosing(self.engine.stream(self.requests)) as batches:
                async for batch in batches:
                    self._count(batch)
                    yield batch
        except SlipstreamError:
            self.finish_reasons.append("error")
            raise
        finally:
            if self.on_end is not None:
                self.on_end(self)

    async def news(self) -> AsyncGenerator[list[News], None]:
        """The same as news of choices."""
        seen: set[int] = set()
        scores: dict[str, list[Any]] = {}
        async with aclosing(self.updates()) as batches:
            async for batch in batches:
                found = []
                for update in batch:
                    if update.prompt_logprobs is not None:
                        scores[update.request.id] = update.prompt_logprobs
                    for delta in update.deltas:
                        choice = self._place[update.request.id] + delta.index
                        first = choice not in seen
                        seen.add(choice)
                        known = scores.get(update.request.id) if first else None
                        found.append(News(update.request, choice, delta, first, known))
                yield found

    async def outputs(self) -> list[RequestOutput]:
        """Everything, once it is done."""
        collectors = {request.id: OutputCollector(request) for request in self.requests}
        async with aclosing(self.updates()) as batches:
            async for batch in batches:
                for update in batch:
                    collectors[update.request.id].add(update)
        return [collectors[request.id].output for request in self.requests]

    def place(self, request: Request) -> int:
        """The number of a request's first choice, counted over all prompts."""
        return self._place[request.id]

    def choices(self, outputs: Iterable[RequestOutput]) -> Iterator[tuple[int, RequestOutput, CompletionOutput]]:
        """Each choice with its number over all prompts."""
        for output in outputs:
            for choice in output.outputs:
                yield self._place[output.request_id] + choice.index, output, choice

    def _count(self, batch: Iterable[RequestUpdate]) -> None:
        usage = self.usage
        for update in batch:
            if update.error is not None:
                raise update.error
            self._cached[update.request.id] = max(update.num_cached_tokens, self._cached.get(update.request.id, 0))
            for delta in update.deltas:
                usage.completion_tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self.finish_reasons.append(delta.finish_reason)
        usage.cached_tokens = sum(self._cached.values())
