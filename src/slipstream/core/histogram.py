"""Counts of values by size, cheap enough for the engine's loop."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
"""Bounds for anything a user waits for, in seconds."""

SHORT_SECONDS = (0.00005, 0.0001, 0.00015, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)
"""Bounds for the engine's own work between two steps, in seconds."""

TOKENS = tuple(2**power for power in range(20))
"""Bounds for lengths, in tokens."""


@dataclass(slots=True)
class Histogram:
    """`counts[i]` values were at most `bounds[i]` and above the bound before; the last count has no bound."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
