"""The engine for asyncio programs: an async iterator per request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress

from slipstream.core.config import EngineConfig
from slipstream.core.errors import EngineDeadError
from slipstream.core.outputs import RequestOutput
from slipstream.core.request import Request, RequestUpdate
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.build import LoadedEngine, load_engine
from slipstream.engine.collect import OutputCollector
from slipstream.engine.core import Engine
from slipstream.engine.inputs import Prompt
from slipstream.engine.worker import EngineWorker


class AsyncEngine:
    """Many requests at once from one event loop. The updates of a step reach the loop in one call."""

    def __init__(self, load: Callable[[], LoadedEngine], *, max_queue: int = 1024) -> None:
        """`load` runs in the engine's thread; what it raises is raised here."""
        self.loaded: LoadedEngine

        def build() -> Engine:
            self.loaded = load()
            return self.loaded.engine

        self._worker = EngineWorker(build, max_queue=max_queue)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, asyncio.Queue[RequestUpdate]] = {}
        self._sink = self._receive  # one object for all requests, so that a step's updates come in one call

    @classmethod
    def from_config(cls, config: EngineConfig) -> AsyncEngine:
        """Load a model and start its engine."""
        return cls(lambda: load_engine(config), max_queue=config.max_queue)

    async def generate(
        self,
        prompt: Prompt | Request,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the request's output so far after each step that changed it; the last one has `finished`.

        Leaving the iterator early (`aclose`, cancellation) aborts the request within a step.
        """
        if isinstance(prompt, Request):
            request = prompt
        else:
            request = await asyncio.to_thread(
                self.loaded.inputs.request,
                prompt,
                sampling_params,
                request_id=request_id,
                priority=priority,
                cache_salt=cache_salt,
            )
        collector = OutputCollector(request)
        async with aclosing(self.updates(request)) as updates:
            async for update in updates:
                collector.add(update)
                yield collector.snapshot()

    async def updates(self, request: Request) -> AsyncGenerator[RequestUpdate, None]:
        """Yield what each step adds to a request. The caller looks at `error`; nothing is raised for it."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if loop is not self._loop:
            raise EngineDeadError("an AsyncEngine serves the event loop that used it first; make one per loop")
        if request.id in self._queues:
            raise ValueError(f"request id {request.id!r} is already in use")
        inbox = self._queues[request.id] = asyncio.Queue[RequestUpdate]()
        finished = False
        try:
            self._worker.submit(request, self._sink)
            while not finished:
                update = await inbox.get()
                finished = update.finished
                yield update
        finally:
            del self._queues[request.id]
            if not finished:
                self._worker.abort(request.id)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator gets a last output with finish_reason "abort"."""
        self._worker.abort(request_id)

    def shutdown(self) -> None:
        """Stop the engine's thread; open requests get an error."""
        self._worker.stop()

    @property
    def alive(self) -> bool:
        return self._worker.alive

    def _receive(self, updates: Sequence[RequestUpdate]) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._hand_out, updates)

    def _hand_out(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            inbox = self._queues.get(update.request.id)
            if inbox is not None:
                inbox.put_nowait(update)
