"""What all routes share: the engine and its state, a pool for heavy work, limits, and the end."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from slipstream import __version__
from slipstream.core.config import EngineConfig, ServerConfig
from slipstream.core.errors import OverloadedError
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.worker import settle
from slipstream.loading import catalog
from slipstream.server.errors import unknown_model
from slipstream.server.generation import Job
from slipstream.server.watchdog import Watchdog

logger = logging.getLogger(__name__)

POOL_THREADS = 2
POOL_NICENESS = 10
"""How far the pool's threads stand behind the engine's where both want a CPU."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Service:
    """One served model. `start` makes the engine, which may take minutes; until then requests get 503."""

    def __init__(
        self, config: ServerConfig, engine_config: EngineConfig, make_engine: Callable[[], AsyncEngine]
    ) -> None:
        self.config = config
        self.engine_config = engine_config
        self.names = tuple(config.served_model_name) or (engine_config.model or catalog.DEFAULT_MODEL,)
        self.created = int(time.time())
        self.draining = False
        self.progress: tuple[str, int, int] = ("starting", 0, 0)
        self.weight_load_seconds: float | None = None
        self.disconnects = 0
        self.requests_by_status: dict[tuple[str, int], int] = {}
        self.startup_seconds: float | None = None
        self.idle = asyncio.Event()
        self.idle.set()
        self._make_engine = make_engine
        self._engine: AsyncEngine | None = None
        self._watchdog: Watchdog | None = None
        self._open = 0
        self._preparing = 0
        self._pool = ThreadPoolExecutor(POOL_THREADS, "slipstream-pool", initializer=_step_back)
        self._began = self._began_weights = time.monotonic()

    def report(self, stage: str, done: int, total: int) -> None:
        """Take in how far the loading is."""
        now = time.monotonic()
        if stage == "loading":
            if self.progress[0] != stage:
                self._began_weights = now
            self.weight_load_seconds = now - self._began_weights
        self.progress = stage, done, total

    async def start(self) -> None:
        """Make the engine in a thread of its own. Raises what making it raises."""
        made: Future[AsyncEngine] = Future()
        # Not a thread of a pool: the interpreter would wait for it when a signal ends the process while it loads.
        threading.Thread(target=settle, args=(made, self._make_engine), name="slipstream-loading", daemon=True).start()
        self._engine = await asyncio.wrap_future(made)
        self.startup_seconds = time.monotonic() - self._began
        self._watchdog = Watchdog(self._engine.worker, self.config.stall_seconds)
        for name, value in self._engine.report.items():
            logger.debug("%s: %s", name, value)
        logger.info("ready after %.1f s", self.startup_seconds)

    async def drain(self) -> None:
        """Take no more requests, and wait for those that are open, but not for ever."""
        self.draining = True
        if self._open:
            logger.info("draining: waiting up to %g s for %d open requests", self.config.drain_seconds, self._open)
        try:
            await asyncio.wait_for(self.idle.wait(), self.config.drain_seconds)
        except TimeoutError:
            logger.warning("%d requests were not done in time; they get an error", self._open)
            if self._engine is not None:
                self._engine.worker.fail_open(OverloadedError("the server stops; try again later", code="draining"))

    def close(self, timeout: float | None = 10.0) -> None:
        """Stop the engine, waiting up to `timeout` seconds for it; requests that are still open get an error."""
        if self._watchdog is not None:
            self._watchdog.stop()
            if self._watchdog.stalled:
                timeout = 0.0  # it would wait in vain
        if self._engine is not None:
            self._engine.shutdown(timeout)
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def uptime(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._began

    @property
    def fingerprint(self) -> str:
        """What answers name as the system that made them: equal seeds give equal answers where it is equal."""
        chosen = "" if self._engine is None else self._engine.report.get("numerics", "")
        return f"slipstream-{__version__}-{chosen.partition(':')[0] or self.engine_config.numerics}"

    @property
    def state(self) -> str:
        """ready, or why not: loading, draining, stalled, restarting or dead."""
        if self.draining:
            return "draining"
        if self._engine is None or self._watchdog is None:
            return "loading"
        state = self._engine.worker.state
        return "stalled" if state == "ready" and self._watchdog.stalled else state

    @property
    def loaded(self) -> AsyncEngine | None:
        """The engine, once it is there."""
        return self._engine

    def engine(self) -> AsyncEngine:
        """The engine for a new request. Raises OverloadedError while there is none that could take it."""
        state = self.state
        # A restarting engine takes requests: they wait for it.
        if self._engine is None or state not in ("ready", "restarting"):
            raise OverloadedError(f"the server is {state}; try again later", code=state)
        return self._engine

    def model(self, asked: str | None) -> str:
        """The served name for a request's `model`. Raises HttpError 404."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise unknown_model(asked, self.names)
        return asked

    async def in_pool(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Run heavy Python away from the event loop. Raises OverloadedError when too much of it waits."""
        if self._preparing >= self.engine_config.max_queue:
            raise OverloadedError("too many requests are being prepared; try again later")
        self._preparing += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))
        finally:
            self._preparing -= 1

    def opened(self) -> None:
        """A request that uses the engine has come."""
        self._open += 1
        self.idle.clear()

    def closed(self) -> None:
        """It is answered, or its client has gone."""
        self._open -= 1
        if not self._open:
            self.idle.set()

    def job(self, engine: AsyncEngine, requests: Any, arrived: float, summary: dict[str, Any]) -> Job:
        """Requests to be run together. Their clocks start when the HTTP request came."""
        for request in requests:
            request.metrics.arrival_time = arrived

        def note(job: Job) -> None:
            summary.update(
                prompt_tokens=job.usage.prompt_tokens,
                output_tokens=job.usage.completion_tokens,
                finish=",".join(sorted(set(job.finish_reasons))) or "none",
            )

        return Job(engine, requests, on_end=note)


def _step_back() -> None:
    """Let the engine's threads have the CPU first; where a thread has no niceness of its own, nothing is done."""
    if hasattr(os, "setpriority") and os.uname().sysname == "Linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), POOL_NICENESS)
