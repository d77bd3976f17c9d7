"""How fast this machine reads memory now: the limit that decoding is measured against."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from slipstream.devices.host import allowed_cpus

PROBE_BYTES = 256 * 2**20
_SIDE = 8192
_REST_SECONDS = 0.02


class ReadProbe:
    """Reads 256 MB with `threads` threads (default: the CPUs that the process may use) in several ways.

    The best of them is the machine's read bandwidth. One way alone would understate it: which one is fastest depends
    on the processor and on torch's build.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or allowed_cpus()
        self._matrix = torch.ones(_SIDE, PROBE_BYTES // 4 // _SIDE)
        self._flat = self._matrix.view(-1)
        self._vector = torch.ones(self._matrix.shape[1])

    def measure(self, repeats: int = 3) -> float:
        """Bytes per second, the best of all ways and repeats. Takes about a tenth of a second.

        torch's number of threads is afterwards what it was: the native step leaves torch with one.
        """
        ways: tuple[Callable[[], torch.Tensor], ...] = (
            lambda: torch.sum(self._flat),
            lambda: torch.mv(self._matrix, self._vector),
            lambda: torch.max(self._flat),
            lambda: torch.dot(self._flat, self._flat),
        )
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        best = float("inf")
        try:
            with torch.inference_mode():
                for way in ways:
                    for _ in range(repeats):
                        begin = time.perf_counter()
                        way()
                        best = min(best, time.perf_counter() - begin)
        finally:
            torch.set_num_threads(before)
        time.sleep(_REST_SECONDS)  # torch's helpers look for work for some milliseconds before they sleep
        return PROBE_BYTES / best
