"""How busy other processes kept this machine while something was measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle, and waiting for disks
_COUNTED = 8  # up to and with time that a hypervisor took; guests are counted in user time already


@dataclass(frozen=True, slots=True)
class _Reading:
    clock: float
    busy: float | None
    own: float


class ForeignLoad:
    """Time that others used of this process's CPUs since it was made."""

    def __init__(self) -> None:
        self._cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._start = self._read()

    def share(self) -> float | None:
        """Share of those CPUs' time that others used, 0 to 1; None where the system does not tell."""
        now = self._read()
        elapsed = (now.clock - self._start.clock) * len(self._cpus)
        if now.busy is None or self._start.busy is None or elapsed <= 0:
            return None
        others = (now.busy - self._start.busy) - (now.own - self._start.own)
        return min(1.0, max(0.0, others / elapsed))

    def _read(self) -> _Reading:
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return _Reading(time.monotonic(), self._busy(), own)

    def _busy(self) -> float | None:
        """Seconds that the CPUs were not idle."""
        try:
            lines = _STAT.read_text().splitlines()
        except OSError:
            return None
        wanted = {f"cpu{number}" for number in self._cpus}
        ticks = 0
        for line in lines:
            name, *values = line.split()
            if name in wanted:
                ticks += sum(int(value) for i, value in enumerate(values[:_COUNTED]) if i not in _IDLE)
        return ticks / os.sysconf("SC_CLK_TCK")
