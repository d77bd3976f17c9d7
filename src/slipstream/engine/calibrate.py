"""Measuring what steps cost on this machine, before the first request."""

from __future__ import annotations

import time

import numpy as np

from slipstream.core.batch import StepBatch
from slipstream.engine.cost_model import CostModel, StepShape, attention_units, bundle_of
from slipstream.engine.runner import Step

FAR = 2048
"""Context at which the cost of attention is measured, where the model reaches it."""
FEW, MANY = 16, 128
"""Rows whose steps are measured where a step may have any number of rows."""
LONG_MS = 20.0
"""A step that takes longer is measured once less: what disturbs it is a smaller part of it."""


def measure_costs(
    step: Step, *, max_model_len: int, page_size: int, row_tile: int, max_rows: int, repeats: int = 3
) -> CostModel:
    """Run a few steps on the scratch page and fit a CostModel. It also takes the first step's extra time on itself."""
    step.run(_scratch(row_tile, 0, page_size))

    def measure(rows: int, start: int) -> tuple[StepShape, float]:
        batch = _scratch(rows, start, page_size)
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            step.run(batch)
            times.append((time.perf_counter() - begin) * 1e3)
            if len(times) == repeats - 1 and min(times) > LONG_MS:
                break
        return StepShape(-(-rows // row_tile), attention_units(start, rows, bundle_of(row_tile))), min(times)

    if row_tile == 1:
        many = min(MANY, max_rows, max_model_len)
        few = min(FEW, many)
        far = max(0, min(FAR, max_model_len - few))
        return CostModel.fit_rows(measure(1, 0), measure(few, 0), measure(many, 0), measure(few, far))
    far = max(0, min(FAR, max_model_len - row_tile))
    return CostModel.fit(measure(row_tile, 0), measure(2 * row_tile, 0), measure(row_tile, far))


def _scratch(rows: int, start: int, page_size: int) -> StepBatch:
    """Rows of one sequence all of whose pages are the scratch page."""
    pages = (start + rows - 1) // page_size + 1
    batch = StepBatch(max_rows=rows, max_sequences=1, max_pages=pages, page_size=page_size)
    number = batch.add_sequence(np.zeros(pages, np.int32), start + rows)
    batch.add_rows(number, [0] * rows, start, wants_logits=[False] * (rows - 1) + [True])
    return batch
