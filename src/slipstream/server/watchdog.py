"""Notices an engine that has stopped answering."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
from typing import Protocol

from slipstream.core.errors import EngineDeadError, SlipstreamError

logger = logging.getLogger(__name__)


class Watched(Protocol):
    """What is looked at: an EngineWorker or an EngineProcess."""

    @property
    def busy_for(self) -> float: ...

    @property
    def state(self) -> str: ...

    def fail_open(self, error: SlipstreamError) -> None: ...

    def recover(self) -> None: ...


class Watchdog:
    """A thread that looks at the engine once a second.

    When a step takes longer than `limit` seconds, or the engine's thread is gone, it writes all threads' stacks to
    stderr, gives every open request an EngineDeadError and has the engine recover, if it can. `stalled` is true until
    the engine goes on.
    """

    def __init__(self, engine: Watched, limit: float, *, every: float = 1.0) -> None:
        self.stalled = False
        self._engine = engine
        self._limit = limit
        self._every = every
        self._stop = threading.Event()
        self._dead = False
        self._thread = threading.Thread(target=self._watch, name="slipstream-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self._look()
            except Exception:
                logger.exception("the watchdog failed; it goes on")

    def _look(self) -> None:
        busy = self._engine.busy_for
        if self._engine.state == "dead" and not self._dead:
            self._dead = True
            self._give_up("the engine has ended", "the engine has ended")
        elif busy > self._limit and not self.stalled:
            self.stalled = True
            reason = f"the engine has not answered for {busy:.0f} s"
            self._give_up(f"{reason} (limit {self._limit:g} s)", reason)
            self._engine.recover()
        elif self.stalled and busy <= self._limit:
            self.stalled = False
            logger.warning("the engine goes on")
        elif self.stalled:
            # A request may have passed the check of the state just before it changed.
            self._engine.fail_open(EngineDeadError(f"the engine has not answered for {busy:.0f} s"))

    def _give_up(self, text: str, told: str) -> None:
        logger.error("%s; the stacks of all threads follow", text)
        faulthandler.dump_traceback(sys.__stderr__ or sys.stderr, all_threads=True)
        self._engine.fail_open(EngineDeadError(told))
