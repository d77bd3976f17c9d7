"""Answers that notice when the client has gone: one JSON document, or server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.core.errors import SlipstreamError
from slipstream.server.errors import body_of, headers_of

logger = logging.getLogger(__name__)

KEEP_ALIVE = 10.0
"""Seconds of silence after which a stream gets a comment, so that nobody between here and the client gives it up."""

DONE = b"data: [DONE]\n\n"

Produce = Callable[[], Awaitable[Any]]
Events = Callable[[], AsyncGenerator[bytes, None]]


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with `content` as JSON."""
    return Response(msgspec.json.encode(content), status, dict(headers or {}), "application/json")


def error_response(error: SlipstreamError) -> Response:
    """A response that says what was wrong."""
    return json_response(body_of(error), error.status, headers_of(error))


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def failure(error: Exception) -> SlipstreamError:
    """Any exception as one that may be shown."""
    if isinstance(error, SlipstreamError):
        return error
    logger.exception("a request failed in the server", exc_info=error)
    return SlipstreamError(f"the server failed: {type(error).__name__}")


class _Watched(Response):
    """Runs `_answer` until it is done or the client is gone, whichever comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.raw_headers = []
        self._complete = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.ensure_future(self._answer(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            # A client that has read all it wanted may close before the answer's task has come to its end.
            scope["slipstream.disconnected"] = not (answer.done() or self._complete)
        finally:
            gone.cancel()
            answer.cancel()
            await asyncio.gather(answer, gone, return_exceptions=True)
        if not answer.cancelled() and (error := answer.exception()) is not None:
            raise error

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class JsonAnswer(_Watched):
    """What `produce` returns, as JSON; `produce` is cancelled when the client goes."""

    def __init__(self, produce: Produce) -> None:
        super().__init__()
        self._produce = produce

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = json_response(await self._produce())
        except Exception as error:
            response = error_response(failure(error))
        self._complete = True
        await response(scope, receive, send)


class EventStream(_Watched):
    """The events that `events` yields; it is closed when the client goes.

    The status waits for the first event, so that a request that fails before it gets the status of its error. An error
    after that is an event of its own, and the stream ends.
    """

    def __init__(self, events: Events) -> None:
        super().__init__()
        self._events = events

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def write(chunk: bytes) -> None:
            nonlocal started
            if not started:
                started = True
                await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
            await send({"type": "http.response.body", "body": chunk, "more_body": True})

        # The inner one is closed first: it may be waiting for an event, and a generator that runs cannot be closed.
        async with aclosing(self._events()) as events, aclosing(_with_comments(events)) as chunks:
            try:
                async for chunk in chunks:
                    self._complete = chunk.endswith(DONE)
                    await write(chunk)
            except Exception as error:
                shown = failure(error)
                if not started:
                    await error_response(shown)(scope, receive, send)
                    return
                await write(event(body_of(shown)))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def _with_comments(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The events, and a comment whenever none came for a while."""
    while True:
        coming = asyncio.ensure_future(anext(events))
        try:
            while not (await asyncio.wait({coming}, timeout=KEEP_ALIVE))[0]:
                yield b": still working\n\n"
            chunk = coming.result()
        except StopAsyncIteration:
            return
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        yield chunk


async def _disconnected(receive: Receive) -> None:
    """Wait until the client is gone; the body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
