"""The events of a streamed answer in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from slipstream.server.bodies import Sampling
from slipstream.server.generation import Job, News
from slipstream.server.responses import DONE, event


async def chunk_events(
    body: Sampling, job: Job, head: Mapping[str, Any], chunk_of: Callable[[News], dict[str, Any]]
) -> AsyncGenerator[bytes, None]:
    """A chunk for all news of a choice that say something, with usage as the body asks, all of a step in one piece.

    `head` are the fields that every chunk has.
    """
    options = body.stream_options
    usage_wanted = options is not None and bool(options.include_usage)
    continuous = options is not None and bool(options.continuous_usage_stats)
    async with aclosing(job.news()) as batches:
        async for batch in batches:
            events = []
            for news in batch:
                delta = news.delta
                if not (news.first or delta.text or delta.finish_reason or delta.logprobs or body.return_token_ids):
                    continue
                chunk = chunk_of(news)
                if usage_wanted or continuous:
                    chunk["usage"] = job.usage.as_json() if continuous else None
                events.append(event(chunk))
            if events:
                yield b"".join(events)
    if usage_wanted:
        yield event({**head, "choices": [], "usage": job.usage.as_json()})
    yield DONE
