"""How fast this machine reads memory now: the limit that decoding is measured against."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

PROBE_BYTES = 256 * 2**20
_SIDE = 8192


class ReadProbe:
    """Reads 256 MB with all of torch's threads in several ways; the best of them is the machine's read bandwidth.

    One way alone would understate it: which one is fastest depends on the processor and on torch's build.
    """

    def __init__(self) -> None:
        self._matrix = torch.ones(_SIDE, PROBE_BYTES // 4 // _SIDE)
        self._flat = self._matrix.view(-1)
        self._vector = torch.ones(self._matrix.shape[1])

    def measure(self, repeats: int = 3) -> float:
        """Bytes per second, the best of all ways and repeats. Takes about a tenth of a second."""
        ways: tuple[Callable[[], torch.Tensor], ...] = (
            lambda: torch.sum(self._flat),
            lambda: torch.mv(self._matrix, self._vector),
            lambda: torch.max(self._flat),
            lambda: torch.dot(self._flat, self._flat),
        )
        best = float("inf")
        with torch.inference_mode():
            for way in ways:
                for _ in range(repeats):
                    begin = time.perf_counter()
                    way()
                    best = min(best, time.perf_counter() - begin)
        return PROBE_BYTES / best
