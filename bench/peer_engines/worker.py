"""A subject's process, seen from the harness: started once, stopped while another subject is measured."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parents[1]
LOAD_SECONDS = 420.0
PIECE_SECONDS = 300.0
CLOSE_SECONDS = 20.0


class PeerError(RuntimeError):
    """A subject failed, ended or did not answer in time."""


class Worker:
    """Runs a command that answers as `worker_loop.serve` does, in a process group of its own. It prints to `log`."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, "PYTHONPATH": str(BENCH)},
                bufsize=0,
                start_new_session=True,
            )
        self._unread = b""

    def wait_loaded(self) -> float:
        """Wait for the model. -> seconds that loading took"""
        return float(self._answer(LOAD_SECONDS)["load_s"])

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Ask the subject; see `worker_loop.Subject`. Raises PeerError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": method, **arguments}).encode() + b"\n")
        except OSError as error:
            raise PeerError(f"{self.name}: {error}; {self._last_words()}") from error
        return self._answer(PIECE_SECONDS)

    def pause(self) -> None:
        """Stop all of its threads where they are."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it and wait, so that its CPU time counts as this process's own."""
        self.resume()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self, seconds: float) -> dict[str, Any]:
        stream = self._process.stdout
        assert stream is not None
        while b"\n" not in self._unread:
            ready, _, _ = select.select([stream], [], [], seconds)
            if not ready:
                raise PeerError(f"{self.name}: no answer in {seconds:.0f} seconds; {self._last_words()}")
            read = os.read(stream.fileno(), 1 << 16)
            if not read:
                raise PeerError(f"{self.name}: the process ended; {self._last_words()}")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        """The end of what it printed."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else "it printed nothing"
