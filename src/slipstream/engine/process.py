"""An engine in a child process that is started again when it dies."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from slipstream.core.errors import EngineDeadError, LoadError, OverloadedError, SlipstreamError
from slipstream.core.request import Request, RequestUpdate
from slipstream.engine import wire
from slipstream.engine.build import ModelLoader, Progress
from slipstream.engine.stats import EngineSnapshot, EngineStats
from slipstream.engine.worker import Sink, hand_over

logger = logging.getLogger(__name__)

SILENCE = 3.0
"""Seconds without a sign of life after which the child counts as busy; it sends one twice a second."""

START_SILENCE = 60.0
"""The same for a child that starts: before its first sign it imports torch."""

MAX_FAILED_STARTS = 3
"""Starts in a row that may fail before the engine is given up."""


class EngineProcess:
    """What `EngineWorker` is for a thread, for a process: a fault of the model's code cannot take the server down.

    When the child dies, its requests get an EngineDeadError and another child is started; requests that come meanwhile
    wait for it. `loader` must be picklable (see `ModelLoader`). Linux and macOS only.
    """

    def __init__(self, loader: ModelLoader, *, progress: Progress | None = None) -> None:
        """Start the child and wait until it has loaded; what it raises there is raised here."""
        if not hasattr(socket, "socketpair") or os.name != "posix":
            raise LoadError("an isolated engine needs Linux or macOS")
        self._loader = loader
        self._progress = progress
        self._max_queue = loader.config.max_queue
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Request, Sink]] = {}
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._child: subprocess.Popen[bytes] | None = None
        self._state = "restarting"
        self._stopping = threading.Event()
        self._beat = wire.Beat(0.0, EngineSnapshot(EngineStats()))
        self._heard = time.monotonic()
        first: Future[wire.Ready] = Future()
        self._thread = threading.Thread(
            target=self._supervise, args=(first,), name="slipstream-supervisor", daemon=True
        )
        self._thread.start()
        self.ready = first.result()

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return None if self._child is None else self._child.pid

    @property
    def alive(self) -> bool:
        return self._state != "dead"

    @property
    def state(self) -> str:
        """ready, restarting or dead."""
        return self._state

    @property
    def busy_for(self) -> float:
        """Seconds since the child's engine began what it is doing now, or since it was last heard; 0 if idle."""
        silent = time.monotonic() - self._heard
        if self._state == "restarting":
            return silent if silent > START_SILENCE else 0.0
        if self._state == "dead":
            return 0.0
        if self._beat.busy_for > 0:
            return self._beat.busy_for + silent
        return silent if silent > SILENCE else 0.0

    def snapshot(self) -> EngineSnapshot:
        """The child's last counts and gauges, at most half a second old. They start over with a new child."""
        return self._beat.snapshot

    def submit(self, request: Request, sink: Sink, *, bounded: bool = True) -> None:
        """Queue a request; its updates go to `sink`. A full queue of the child's comes as an update."""
        with self._lock:
            if self._stopping.is_set() or self._state == "dead":
                raise EngineDeadError("the engine has stopped")
            if bounded and self._state == "restarting" and len(self._open) >= self._max_queue:
                raise OverloadedError(
                    f"the request queue is full ({self._max_queue} requests); try again later", code="queue_full"
                )
            self._open[request.id] = request, sink
            if self._state == "ready":
                self._outbox.put(wire.Submit(request))

    def abort(self, request_id: str) -> None:
        """Drop a request. An id that is not known (any more) is ignored."""
        with self._lock:
            if self._state == "ready":
                self._outbox.put(wire.Abort(request_id))
                return
            request, sink = self._open.pop(request_id, (None, None))
        if request is not None and sink is not None:
            hand_over(sink, [RequestUpdate(request, finished=True)])

    def fail_open(self, error: SlipstreamError) -> None:
        """Give every open request `error` now."""
        with self._lock:
            failed, self._open = self._open, {}
            for request_id in failed:
                self._outbox.put(wire.Abort(request_id))
        for request, sink in failed.values():
            hand_over(sink, [RequestUpdate(request, finished=True, error=error)])

    def recover(self) -> None:
        """Kill a stalled child after it has written its stacks to stderr; another one is started."""
        child = self._child
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
            child.kill()

    def stop(self, timeout: float | None = 10.0) -> None:
        """Stop the child; requests that are not done get an error."""
        self._stopping.set()
        if self._child is not None:
            self._child.kill()
        self._thread.join(timeout)

    def _supervise(self, first: Future[wire.Ready]) -> None:
        try:
            self._keep_alive(first)
        except Exception:
            logger.exception("the supervisor of the engine's process failed")
        if not first.done():
            first.set_exception(EngineDeadError("the engine's process could not be started"))
        self._state = "dead"
        self.fail_open(EngineDeadError("the engine has stopped"))

    def _keep_alive(self, first: Future[wire.Ready]) -> None:
        """One child after the other, until `stop` or until it makes no sense."""
        failures = 0
        while not self._stopping.is_set():
            was_ready = self._live(first)
            if self._stopping.is_set():
                break
            if not first.done():
                first.set_exception(EngineDeadError("the engine's process ended while it loaded"))
                break
            if first.exception() is not None:
                break
            failures = 0 if was_ready else failures + 1
            if failures >= MAX_FAILED_STARTS:
                logger.error("the engine's process could not start %d times in a row; it is given up", failures)
                break
            self._stopping.wait(failures)

    def _live(self, first: Future[wire.Ready]) -> bool:
        """One child from start to end. -> whether it had loaded."""
        self._heard = time.monotonic()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [sys.executable, "-m", "slipstream.engine.child", str(theirs.fileno())]
            # In a group of its own, Ctrl-C does not reach it; the parent decides when it ends.
            self._child = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0
            )
            theirs.close()
            pipe = Connection(ours.detach())
        if self._stopping.is_set():  # `stop` may have seen the child before
            self._child.kill()
        outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        writer = threading.Thread(target=_write, args=(pipe, outbox), name="slipstream-writer", daemon=True)
        writer.start()
        outbox.put(self._loader)
        try:
            while True:
                message = pipe.recv()
                if isinstance(message, wire.Ready):
                    if first.done():
                        logger.warning("the engine's process is ready again")
                    self._begin(outbox)
                    if not first.done():
                        first.set_result(message)
                else:
                    self._take(message, first)
        except (EOFError, OSError):
            logger.debug("the pipe to the engine's process closed")
        except Exception:
            logger.exception("what the engine's process sent could not be read")
        was_ready = self._state == "ready"
        outbox.put(None)
        self._end(was_ready)
        pipe.close()
        return was_ready

    def _begin(self, outbox: queue.SimpleQueue[Any]) -> None:
        """The child takes requests from now on; those that waited for it come first."""
        with self._lock:
            self._outbox = outbox
            self._heard = time.monotonic()
            self._state = "ready"
            for request, _ in self._open.values():
                outbox.put(wire.Submit(request))

    def _end(self, was_ready: bool) -> None:
        """The child is gone, and what it was doing with it. Requests that it never got wait for the next one."""
        assert self._child is not None
        try:
            code = self._child.wait(1.0)  # it may be about to end by itself
        except subprocess.TimeoutExpired:
            self._child.kill()
            code = self._child.wait()
        if was_ready and not self._stopping.is_set():
            logger.error("the engine's process ended (%s); starting another", _how(code))
        with self._lock:
            self._state = "restarting"
            failed: dict[str, tuple[Request, Sink]] = {}
            if was_ready:
                failed, self._open = self._open, {}
            self._beat = wire.Beat(0.0, EngineSnapshot(EngineStats()))
        for request, sink in failed.values():
            dead = EngineDeadError("the engine's process ended while it was working on this request")
            hand_over(sink, [RequestUpdate(request, finished=True, error=dead)])

    def _take(self, message: Any, first: Future[wire.Ready]) -> None:
        self._heard = time.monotonic()
        match message:
            case wire.Beat():
                self._beat = message
            case wire.Progress(stage, done, total):
                if self._progress is not None:
                    self._progress(stage, done, total)
            case wire.Failed(error):
                if first.done():
                    logger.error("the engine's process could not load: %s", error)
                else:
                    first.set_exception(error)
            case wire.Logged(level, name, text):
                logging.getLogger(name).log(level, "engine process: %s", text)
            case _:
                self._hand_out(message)

    def _hand_out(self, updates: list[wire.Update]) -> None:
        by_sink: dict[int, tuple[Sink, list[RequestUpdate]]] = {}
        for update in updates:
            request, sink = self._open.get(update.request_id, (None, None))
            if request is None or sink is None:
                continue
            if update.finished:
                with self._lock:
                    self._open.pop(update.request_id, None)
            by_sink.setdefault(id(sink), (sink, []))[1].append(update.to(request))
        for sink, own in by_sink.values():
            hand_over(sink, own)


def _write(pipe: Connection, outbox: queue.SimpleQueue[Any]) -> None:
    """Send what is queued; a child that does not read must not hold up whoever submits."""
    try:
        while (message := outbox.get()) is not None:
            pipe.send(message)
    except OSError:
        pass  # the reader sees the end of the pipe too


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    known = {number.value: number.name for number in signal.Signals}  # real-time signals have no names
    return f"signal {known.get(-code, -code)}"
