"""Statistics of interleaved runs A, B, A, B, ... that all benches share."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.cli.bench_latency import PROBES_AGREE


@dataclass(frozen=True)
class Pair:
    """Two values measured one after the other, and the read bandwidths (bytes/s) probed before, between and after."""

    first: float
    second: float
    probes: Sequence[float]

    @property
    def disturbed(self) -> bool:
        """Whether the memory changed its speed meanwhile by more than the limit, so that the ratio says little."""
        return max(self.probes) > (1 + PROBES_AGREE) * min(self.probes)


def interval(ratios: Sequence[float], draws: int = 2000) -> dict[str, float]:
    """Median of ratios with a bootstrap 95 % interval. The draws are the same every time."""
    chooser = random.Random(0)
    medians = sorted(statistics.median(chooser.choices(ratios, k=len(ratios))) for _ in range(draws))
    return {
        "median": statistics.median(ratios),
        "low": medians[int(draws * 0.025)],
        "high": medians[int(draws * 0.975)],
        "pairs": len(ratios),
    }


def ratio(pairs: Sequence[Pair]) -> dict[str, float | None]:
    """`interval` of first / second over undisturbed pairs, and how many were `dropped`; None each if none is left."""
    return undisturbed((pair.first / pair.second, pair.disturbed) for pair in pairs)


def undisturbed(values: Iterable[tuple[float, bool]]) -> dict[str, float | None]:
    """`interval` of the values that are not disturbed, and how many were `dropped`; None each if none is left."""
    every = list(values)
    used = [value for value, disturbed in every if not disturbed]
    found: dict[str, float | None] = dict.fromkeys(("median", "low", "high"))
    found["pairs"] = 0
    if used:
        found.update(interval(used))
    return {**found, "dropped": len(every) - len(used)}
