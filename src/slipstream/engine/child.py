"""The process that runs an isolated engine: `python -m slipstream.engine.child FD`, started by `EngineProcess`."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from slipstream.core.errors import LoadError, SlipstreamError
from slipstream.core.request import Request, RequestUpdate
from slipstream.engine import wire
from slipstream.engine.build import LoadedEngine
from slipstream.engine.core import Engine
from slipstream.engine.worker import EngineWorker

BEAT_SECONDS = 0.5


def main(descriptor: int) -> int:
    """Load, then serve the parent until it closes the pipe. -> exit code."""
    # Ctrl-C reaches the whole foreground group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s engine process: %(message)s")
    child = _Child(Connection(descriptor))
    try:
        return child.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0
    finally:
        # The engine's thread may be inside of a step; nothing is left to save.
        sys.stderr.flush()
        os._exit(0)


class _Child:
    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._sending = threading.Lock()
        self._sink = self._send_updates  # one object, so that a step's updates go in one message

    def run(self) -> int:
        loader = self.pipe.recv()
        try:
            loaded, worker = self._load(loader)
        except Exception as error:
            known = error if isinstance(error, SlipstreamError) else LoadError(f"{type(error).__name__}: {error}")
            self._send(wire.Failed(known))
            return 1
        engine = loaded.engine
        self._send(wire.Ready(engine.vocab_size, engine.max_model_len, loaded.report))
        threading.Thread(target=self._beat, args=(worker,), daemon=True).start()
        while True:
            match self.pipe.recv():
                case wire.Submit(request):
                    self._submit(worker, request)
                case wire.Abort(request_id):
                    worker.abort(request_id)

    def _load(self, loader: Any) -> tuple[LoadedEngine, EngineWorker]:
        found: list[LoadedEngine] = []

        def build() -> Engine:
            found.append(loader.engine(lambda *stage: self._send(wire.Progress(*stage))))
            return found[0].engine

        worker = EngineWorker(build, max_queue=loader.config.max_queue)
        return found[0], worker

    def _submit(self, worker: EngineWorker, request: Request) -> None:
        try:
            worker.submit(request, self._sink)
        except SlipstreamError as error:
            self._send_updates([RequestUpdate(request, finished=True, error=error)])

    def _send_updates(self, updates: Sequence[RequestUpdate]) -> None:
        self._send([wire.Update.of(update) for update in updates])

    def _send(self, message: Any) -> None:
        with self._sending:
            self.pipe.send(message)

    def _beat(self, worker: EngineWorker) -> None:
        pause = threading.Event()
        while worker.alive:
            try:
                self._send(wire.Beat(worker.busy_for, worker.snapshot()))
            except OSError:
                return
            pause.wait(BEAT_SECONDS)
        # An engine without its thread is of no use; the parent starts another.
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
