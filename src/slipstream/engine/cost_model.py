"""How long a step of given rows takes, measured on this machine and kept up to date."""

from __future__ import annotations

from dataclasses import dataclass

SPAN = 256
"""Context positions that count as one unit of attention work."""

UNIT_ROWS = 4
"""Rows of one sequence that share their reads of the context."""

_RISE, _FALL = 0.3, 0.05


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step costs by: tiles of rows, and units of attention."""

    tiles: int
    attention: float


def attention_units(start: int, rows: int, bundle: int = UNIT_ROWS) -> float:
    """Attention work of rows at positions from `start` on: bundles of rows times the spans of context each reads.

    `bundle`: rows that cost as much as one; see `bundle_of`.
    """
    bundles = -(-rows // bundle)
    return bundles * (1 + (start + rows / 2) / SPAN)


def bundle_of(row_tile: int) -> int:
    """Rows of one sequence whose attention costs as much as one row's: 1 where a step has no tiles."""
    return min(UNIT_ROWS, row_tile)


class CostModel:
    """Milliseconds of a step: `base + tile * tiles + unit * attention`, times a factor that follows what is measured.

    The factor rises quickly and falls slowly, so that a bound on the step time holds on a machine whose speed swings; a
    step far under its prediction (the first measurement was disturbed) brings it down at once.
    """

    def __init__(self, base_ms: float, tile_ms: float, unit_ms: float) -> None:
        self.base_ms = max(base_ms, 1e-3)
        self.tile_ms = max(tile_ms, 1e-3)
        self.unit_ms = max(unit_ms, 1e-4)
        self.factor = 1.0

    @classmethod
    def fit(
        cls, short: tuple[StepShape, float], more: tuple[StepShape, float], far: tuple[StepShape, float]
    ) -> CostModel:
        """From three measured steps: a short one, one with more tiles, one with far more attention (ms each)."""
        unit = (far[1] - short[1]) / max(far[0].attention - short[0].attention, 1e-9)
        unit = max(unit, 0.0)
        tile = (more[1] - short[1] - unit * (more[0].attention - short[0].attention)) / max(
            more[0].tiles - short[0].tiles, 1
        )
        # Every tile reads all weights, so most of a short step is its tile; a disturbed measurement may say otherwise.
        tile = min(max(tile, short[1] / short[0].tiles / 2), short[1] / short[0].tiles)
        return cls(short[1] - tile * short[0].tiles - unit * short[0].attention, tile, max(unit, tile / 200))

    @classmethod
    def fit_rows(
        cls,
        one: tuple[StepShape, float],
        few: tuple[StepShape, float],
        many: tuple[StepShape, float],
        far: tuple[StepShape, float],
    ) -> CostModel:
        """From measured steps whose tiles are single rows: of one, few and many rows, and few with far more attention.

        The weights are read once for all rows, so what a step of one row takes beyond a row of many is its base.
        """
        unit = max((far[1] - few[1]) / max(far[0].attention - few[0].attention, 1e-9), 0.0)
        row = (many[1] - few[1] - unit * (many[0].attention - few[0].attention)) / max(many[0].tiles - few[0].tiles, 1)
        # A disturbed measurement may say that rows cost nothing, or that they are all there is.
        each = many[1] / many[0].tiles
        row = min(max(row, each / 4), each)
        return cls(one[1] - row - unit * one[0].attention, row, max(unit, row / 200))

    def predict(self, shape: StepShape) -> float:
        """Milliseconds that a step of this shape will take."""
        return self.factor * (self.base_ms + self.tile_ms * shape.tiles + self.unit_ms * shape.attention)

    def observe(self, shape: StepShape, milliseconds: float) -> None:
        """Learn from a step that was run."""
        ratio = min(max(milliseconds * self.factor / self.predict(shape), 1e-3), 10.0)
        rate = _RISE if ratio > self.factor or ratio < self.factor / 2 else _FALL
        self.factor += rate * (ratio - self.factor)
