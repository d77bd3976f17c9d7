"""The engine for asyncio programs: an async iterator per request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from slipstream.core.config import EngineConfig
from slipstream.core.errors import EngineDeadError
from slipstream.core.outputs import RequestOutput
from slipstream.core.request import ChoiceDelta, Request, RequestUpdate
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.build import LoadedEngine, Progress, load_engine
from slipstream.engine.collect import OutputCollector
from slipstream.engine.core import Engine
from slipstream.engine.inputs import Prompt
from slipstream.engine.worker import EngineWorker


class AsyncEngine:
    """Many requests at once from one event loop. The updates of a step reach the loop in one call.

    `model` and the settings are those of `LLM`. Call `shutdown` in the end.
    """

    loaded: LoadedEngine

    def __init__(self, model: str = "", *, progress: Progress | None = None, **settings: Any) -> None:
        config = EngineConfig.from_mapping({"model": model, **settings})
        self._start(lambda: load_engine(config, progress), config.max_queue)

    @classmethod
    def over(cls, load: Callable[[], LoadedEngine], *, max_queue: int = 1024) -> AsyncEngine:
        """An AsyncEngine around what `load` makes in the engine's thread; what it raises is raised here."""
        engine = cls.__new__(cls)
        engine._start(load, max_queue)
        return engine

    def _start(self, load: Callable[[], LoadedEngine], max_queue: int) -> None:

        def build() -> Engine:
            self.loaded = load()
            return self.loaded.engine

        self._worker = EngineWorker(build, max_queue=max_queue)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, tuple[Request, asyncio.Queue[RequestUpdate]]] = {}
        self._preparing: dict[str, bool] = {}  # ids whose prompts are being tokenized: aborted already?
        self._sink = self._receive  # one object for all requests, so that a step's updates come in one call

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
            request, aborted = await self._prepare(prompt, sampling_params, request_id, priority, cache_salt)
            if aborted:
                yield _aborted(request)
                return
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
        inbox = asyncio.Queue[RequestUpdate]()
        self._queues[request.id] = request, inbox
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
        """End a request; its iterator gets a last output with finish_reason "abort". An unknown id is ignored."""
        if request_id in self._preparing:
            self._preparing[request_id] = True
        else:
            self._worker.abort(request_id)

    def shutdown(self) -> None:
        """Stop the engine's thread; open requests get an error."""
        self._worker.stop()

    @property
    def alive(self) -> bool:
        return self._worker.alive

    async def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
    ) -> tuple[Request, bool]:
        """Check and tokenize outside of the event loop. -> the request, and whether it was aborted meanwhile."""
        name = request_id if isinstance(request_id, str) else ""
        self._preparing[name] = False
        try:
            request = await asyncio.to_thread(
                self.loaded.inputs.request,
                prompt,
                params,
                request_id=request_id,
                priority=priority,
                cache_salt=cache_salt,
            )
        finally:
            aborted = self._preparing.pop(name, False)
        return request, aborted

    def _receive(self, updates: Sequence[RequestUpdate]) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._hand_out, updates)

    def _hand_out(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            request, inbox = self._queues.get(update.request.id, (None, None))
            # The id may have been given to another request since.
            if inbox is not None and request is update.request:
                inbox.put_nowait(update)


def _aborted(request: Request) -> RequestOutput:
    """The output of a request that ended before it reached the engine."""
    deltas = [ChoiceDelta(index, finish_reason="abort") for index in range(request.params.n)]
    return OutputCollector(request).add(RequestUpdate(request, deltas, finished=True))
