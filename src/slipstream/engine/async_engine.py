"""The engine for asyncio programs: an async iterator per request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from slipstream.core.config import EngineConfig
from slipstream.core.errors import EngineDeadError
from slipstream.core.outputs import RequestOutput
from slipstream.core.request import ChoiceDelta, Request, RequestUpdate
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.build import LoadedEngine, ModelLoader, Progress
from slipstream.engine.collect import OutputCollector
from slipstream.engine.core import Engine
from slipstream.engine.inputs import InputProcessor, Prompt
from slipstream.engine.process import EngineProcess
from slipstream.engine.worker import EngineWorker


class AsyncEngine:
    """Many requests at once from one event loop. The updates of a step reach the loop in one call.

    `model` and the settings are those of `LLM`. `isolate` runs the model in a process of its own, which is started
    again when it dies. Call `shutdown` in the end.
    """

    inputs: InputProcessor
    report: Mapping[str, str]

    def __init__(
        self, model: str = "", *, isolate: bool = False, progress: Progress | None = None, **settings: Any
    ) -> None:
        loader = ModelLoader(EngineConfig.from_mapping({"model": model, **settings}))
        if isolate:
            self._start_process(loader, progress)
        else:
            self._start_thread(lambda: loader.engine(progress), loader.config.max_queue)

    @classmethod
    def over(cls, load: Callable[[], LoadedEngine], *, max_queue: int = 1024) -> AsyncEngine:
        """An AsyncEngine around what `load` makes in the engine's thread; what it raises is raised here."""
        engine = cls.__new__(cls)
        engine._start_thread(load, max_queue)
        return engine

    @classmethod
    def isolated(cls, loader: ModelLoader, *, progress: Progress | None = None) -> AsyncEngine:
        """An AsyncEngine around what `loader`, which must be picklable, makes in another process."""
        engine = cls.__new__(cls)
        engine._start_process(loader, progress)
        return engine

    def _start_thread(self, load: Callable[[], LoadedEngine], max_queue: int) -> None:
        def build() -> Engine:
            loaded = load()
            self.inputs, self.report = loaded.inputs, loaded.report
            return loaded.engine

        self._begin(EngineWorker(build, max_queue=max_queue))

    def _start_process(self, loader: ModelLoader, progress: Progress | None) -> None:
        process = EngineProcess(loader, progress=progress)
        ready = process.ready
        self.inputs = loader.inputs(vocab_size=ready.vocab_size, max_model_len=ready.max_model_len)
        self.report = ready.report
        self._begin(process)

    def _begin(self, worker: EngineWorker | EngineProcess) -> None:
        self.worker = worker
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
        async with aclosing(self.stream([request])) as batches:
            async for batch in batches:
                for update in batch:
                    yield update

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[list[RequestUpdate], None]:
        """Run requests together. Yields all news there are whenever there are any, in order, until all have finished.

        Leaving early, and a request that is refused, abort the others.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if loop is not self._loop:
            raise EngineDeadError("an AsyncEngine serves the event loop that used it first; make one per loop")
        inbox = asyncio.Queue[RequestUpdate]()
        unfinished: set[str] = set()
        try:
            for request in requests:
                if request.id in self._queues:
                    raise ValueError(f"request id {request.id!r} is already in use")
                self._queues[request.id] = request, inbox
                unfinished.add(request.id)
                self.worker.submit(request, self._sink)
            while unfinished:
                batch = [await inbox.get()]
                while not inbox.empty():
                    batch.append(inbox.get_nowait())
                unfinished.difference_update(update.request.id for update in batch if update.finished)
                yield batch
        finally:
            for request in requests:
                if self._queues.get(request.id, (None,))[0] is request:
                    del self._queues[request.id]
            for request_id in unfinished:
                self.worker.abort(request_id)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator gets a last output with finish_reason "abort". An unknown id is ignored."""
        if request_id in self._preparing:
            self._preparing[request_id] = True
        else:
            self.worker.abort(request_id)

    def shutdown(self, timeout: float | None = 10.0) -> None:
        """Stop the engine, waiting up to `timeout` seconds for it; open requests get an error."""
        self.worker.stop(timeout)

    @property
    def alive(self) -> bool:
        return self.worker.alive

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
                self.inputs.request,
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
