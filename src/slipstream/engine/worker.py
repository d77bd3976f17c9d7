"""The engine's own thread: an inbox in, updates out to whoever waits for them."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from slipstream.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestFailedError,
    SlipstreamError,
)
from slipstream.core.request import Request, RequestUpdate
from slipstream.engine.core import Engine
from slipstream.engine.stats import EngineSnapshot

logger = logging.getLogger(__name__)

Sink = Callable[[Sequence[RequestUpdate]], None]
"""Gets the updates of one step that are for it, in the engine's thread. It must return quickly and never raise."""


Result = TypeVar("Result")


class EngineWorker:
    """Builds an engine in a thread of its own and runs it there. All methods may be called from any thread.

    All of torch's parallel work belongs into this thread, the loading of weights too: once a second thread has used its
    own pool of OpenMP threads, GNU's runtime sees more threads than CPUs and puts them to sleep after every operation
    (measured: 85 ms a step in place of 50).

    A request that cannot be served gets an error and nobody else notices. A step that fails gives an error to the
    requests in it; a failure outside of the model gives one to every request. The thread goes on in both cases.
    """

    engine: Engine

    def __init__(self, build: Callable[[], Engine], *, max_queue: int = 1024) -> None:
        """Start the thread and wait for `build`; what it raises is raised here."""
        self.max_queue = max_queue
        self._inbox: deque[tuple[Request, Sink] | str | Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._open: dict[str, tuple[Request, Sink]] = {}
        self._stopping = False
        self._busy_since: float | None = None
        self._updates: Sequence[RequestUpdate] = ()
        ready: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._main, args=(build, ready), name="slipstream-engine", daemon=True)
        self._thread.start()
        self.engine = ready.result()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def state(self) -> str:
        """ready or dead."""
        return "ready" if self.alive and not self._stopping else "dead"

    @property
    def busy_for(self) -> float:
        """Seconds since the engine's thread began what it is doing now; 0 while it waits for work."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def snapshot(self) -> EngineSnapshot:
        """Counts and gauges, at worst one step old."""
        return self.engine.snapshot()

    def submit(self, request: Request, sink: Sink, *, bounded: bool = True) -> None:
        """Queue a request; its updates go to `sink`. Raises OverloadedError when the queue is full (if `bounded`)."""
        with self._wake:
            if self._stopping or not self._thread.is_alive():
                raise EngineDeadError("the engine has stopped")
            if not isinstance(request.id, str):
                raise InvalidRequestError(f"request_id must be a string, not {request.id!r}", param="request_id")
            if bounded and self._num_waiting() >= self.max_queue:
                raise OverloadedError(
                    f"the request queue is full ({self.max_queue} requests); try again later", code="queue_full"
                )
            self._inbox.append((request, sink))
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """Drop a request before the next step. An id that is not known (any more) is ignored."""
        if not isinstance(request_id, str):
            return
        with self._wake:
            if not self._stopping:
                self._inbox.append(request_id)
                self._wake.notify()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function in the engine's thread, between two steps, and wait for it. What it raises is raised here."""
        if threading.current_thread() is self._thread:
            return function()
        done: Future[Result] = Future()
        with self._wake:
            if self._stopping or not self._thread.is_alive():
                raise EngineDeadError("the engine has stopped")
            self._inbox.append(lambda: settle(done, function))
            self._wake.notify()
        return done.result()

    def fail_open(self, error: SlipstreamError) -> None:
        """Give every open request `error` now, from the caller's thread; the engine may not be answering.

        Should it come back, it finds the requests aborted.
        """
        open_requests, self._open = self._open, {}
        with self._wake:
            queued = [entry for entry in self._inbox if isinstance(entry, tuple)]
            kept = [entry for entry in self._inbox if not isinstance(entry, tuple)]
            self._inbox.clear()
            self._inbox.extend([*kept, *open_requests])
        for request, sink in [*open_requests.values(), *queued]:
            hand_over(sink, [RequestUpdate(request, finished=True, error=error)])

    def recover(self) -> None:
        """What can be done for a stalled engine: nothing from outside of its thread. It may come back by itself."""

    def stop(self, timeout: float | None = 10.0) -> None:
        """Stop after the step in progress; requests that are not done get an error."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)

    def _main(self, build: Callable[[], Engine], ready: Future[Engine]) -> None:
        settle(ready, build)
        if ready.exception() is None:
            self.engine = ready.result()
            # A model and a vocabulary are hundreds of thousands of objects; walking them stops a step for long.
            gc.collect()
            gc.freeze()
            self.engine.before_launch = self._flush
            self._run()

    def _run(self) -> None:
        engine = self.engine
        while True:
            if self._inbox or self._stopping or not engine.has_work:
                self._flush()
                if not self._take_in():
                    return
            self._busy_since = time.monotonic()
            try:
                updates = engine.step()
            except Exception as error:
                logger.exception("the engine failed outside of a model step")
                dead = EngineDeadError(f"the engine failed: {type(error).__name__}: {error}")
                updates = engine.fail_all(dead)
            self._flush()  # does nothing if the step came to its launch
            self._updates = updates

    def _flush(self) -> None:
        """Hand over the updates of the step before.

        While another step follows that is done right before its launch, where this thread gives the interpreter lock
        away: the receivers could not run sooner, and would only be woken up twice.
        """
        if self._updates:
            updates, self._updates = self._updates, ()
            self._deliver(updates)

    def _take_in(self) -> bool:
        """Wait until there is something to do and take in what callers want. -> False: stopped."""
        with self._wake:
            while not (self._inbox or self.engine.has_work or self._stopping):
                self._busy_since = None
                self._wake.wait()
            self._busy_since = time.monotonic()
            entries = list(self._inbox)
            self._inbox.clear()
            stopping = self._stopping
        for entry in entries:
            self._take(entry)
        if stopping:
            self._deliver(self.engine.fail_all(EngineDeadError("the engine has stopped")))
            self._busy_since = None
        return not stopping

    def _take(self, entry: tuple[Request, Sink] | str | Callable[[], None]) -> None:
        if callable(entry):
            entry()
            return
        if isinstance(entry, str):
            update = self.engine.abort(entry)
            if update is not None:
                self._deliver([update])
            return
        request, sink = entry
        if request.id in self._open:
            taken = RequestFailedError(f"request id {request.id!r} is already in use", param="request_id")
            hand_over(sink, [RequestUpdate(request, finished=True, error=taken)])
            return
        self._open[request.id] = request, sink
        try:
            self.engine.add(request)
        except Exception as error:
            failed = error if isinstance(error, SlipstreamError) else RequestFailedError(f"the request failed: {error}")
            self._deliver([RequestUpdate(request, finished=True, error=failed)])

    def _deliver(self, updates: Sequence[RequestUpdate]) -> None:
        """Hand each sink its updates of this step at once."""
        by_sink: dict[int, tuple[Sink, list[RequestUpdate]]] = {}
        for update in updates:
            if update.error is not None and update.error.__cause__ is not None:
                logger.error("request %s: %s", update.request.id, update.error, exc_info=update.error.__cause__)
            entry = self._open.get(update.request.id)
            if entry is None:
                continue
            if update.finished:
                self._open.pop(update.request.id, None)
            sink = entry[1]
            own = by_sink.get(id(sink))
            if own is None:
                by_sink[id(sink)] = sink, [update]
            else:
                own[1].append(update)
        for sink, those in by_sink.values():
            hand_over(sink, those)

    def _num_waiting(self) -> int:
        """Requests without a place among the running; each is counted by its first choice."""
        queued = sum(isinstance(entry, tuple) for entry in self._inbox)
        return queued + sum(sequence.index == 0 for sequence in tuple(self.engine.scheduler.waiting))


def hand_over(sink: Sink, updates: Sequence[RequestUpdate]) -> None:
    """Call a sink; one that fails does not hurt the others."""
    try:
        sink(updates)
    except Exception:
        logger.exception("a receiver of updates failed")


def settle(future: Future[Result], function: Callable[[], Result]) -> None:
    """Run a function and put what it returns or raises into a future."""
    future.set_running_or_notify_cancel()  # who waits may give up; the future cannot be cancelled any more
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
