"""The process that runs an isolated engine: `python -m slipstream.engine.child FD`, started by `EngineProcess`."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from slipstream.core.errors import LoadError, SlipstreamError
from slipstream.core.request import Request, RequestUpdate
from slipstream.engine import wire
from slipstream.engine.build import LoadedEngine
from slipstream.engine.core import Engine
from slipstream.engine.stats import EngineSnapshot, EngineStats
from slipstream.engine.worker import EngineWorker

BEAT_SECONDS = 0.5


def main(descriptor: int) -> None:
    """Load, then serve the parent until it closes the pipe. Ends the process."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    child = _Child(Connection(descriptor))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[_Forward(child)])
    try:
        child.run()
    except (EOFError, OSError):
        _exit(0)
    except Exception:
        logging.exception("the loop failed")
    _exit(1)


def _exit(code: int) -> None:
    """End at once: the engine's thread may be inside of a step, and nothing is left to save."""
    sys.stderr.flush()
    os._exit(code)


class _Child:
    _worker: EngineWorker | None = None

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._sending = threading.Lock()
        self._sink = self._send_updates  # one object, so that a step's updates go in one message

    def run(self) -> None:
        """Do what the parent says. Raises EOFError when it is gone, which may be while the model loads."""
        loader = self.pipe.recv()
        threading.Thread(target=self._start, args=(loader,), name="slipstream-start", daemon=True).start()
        threading.Thread(target=self._beat, name="slipstream-beat", daemon=True).start()
        while True:
            message = self.pipe.recv()
            worker = self._worker
            assert worker is not None, "the parent does not wait until the engine is ready"
            match message:
                case wire.Submit(request):
                    self._submit(worker, request)
                case wire.Abort(request_id):
                    worker.abort(request_id)

    def _start(self, loader: Any) -> None:
        try:
            loaded = self._load(loader)
        except Exception as error:
            known = error if isinstance(error, SlipstreamError) else LoadError(f"{type(error).__name__}: {error}")
            self.send(wire.Failed(known))
            _exit(1)
        engine = loaded.engine
        self.send(wire.Ready(engine.vocab_size, engine.max_model_len, loaded.report))

    def _load(self, loader: Any) -> LoadedEngine:
        found: list[LoadedEngine] = []

        def build() -> Engine:
            found.append(loader.engine(lambda *stage: self.send(wire.Progress(*stage))))
            return found[0].engine

        self._worker = EngineWorker(build, max_queue=loader.config.max_queue)
        return found[0]

    def _submit(self, worker: EngineWorker, request: Request) -> None:
        try:
            worker.submit(request, self._sink)
        except SlipstreamError as error:
            self._send_updates([RequestUpdate(request, finished=True, error=error)])

    def send(self, message: Any) -> None:
        """Tell the parent. Raises OSError when it is gone."""
        with self._sending:
            self.pipe.send(message)

    def _send_updates(self, updates: Sequence[RequestUpdate]) -> None:
        self.send([wire.Update.of(update) for update in updates])

    def _beat(self) -> None:
        """Signs of life, from the first moment on. An engine without its thread is of no use: the process ends."""
        pause = threading.Event()
        idle = wire.Beat(0.0, EngineSnapshot(EngineStats()))
        while (worker := self._worker) is None or worker.alive:
            try:
                self.send(idle if worker is None else wire.Beat(worker.busy_for, worker.snapshot()))
            except OSError:
                return
            pause.wait(BEAT_SECONDS)
        _exit(1)


class _Forward(logging.Handler):
    """Hands the parent what is logged here, so that there is one log in one form."""

    def __init__(self, child: _Child) -> None:
        super().__init__()
        self._child = child

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            self._child.send(wire.Logged(record.levelno, record.name, self.format(record)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
