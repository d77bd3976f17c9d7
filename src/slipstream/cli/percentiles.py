"""Percentiles as all benches count them: by nearest rank, so each is a value that was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

Figures = dict[str, float | None]

PERCENTILES = (50, 95, 99)
COLUMNS = ("mean", *(f"p{percent}" for percent in PERCENTILES))


def nearest_rank(ordered: Sequence[float], percent: int) -> float:
    """The smallest of `ordered` (ascending, not empty) that `percent` % of the values do not exceed."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def distribution(values: Iterable[float], *, scale: float = 1.0) -> Figures:
    """Mean and percentiles of values times `scale`; None each if there are none."""
    ordered = sorted(value * scale for value in values)
    if not ordered:
        return dict.fromkeys(COLUMNS)
    return {"mean": statistics.fmean(ordered), **{f"p{p}": nearest_rank(ordered, p) for p in PERCENTILES}}
