"""The step of the plain PyTorch path: a model run in tiles of a fixed number of rows.

torch's products and reductions give a row the same bits wherever it stands in a fixed shape, and other bits in another
shape. So every forward pass has exactly `row_tile` rows, and so has every pass through the head; fewer are padded, more
run as further tiles. A tile writes its keys and values before the next one reads them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.core.batch import Int32Array, StepBatch
from slipstream.ops.rows import Rows

ROW_TILE = 16


class StepModel(Protocol):
    """What a step needs of a model; `slipstream.models.base.Model` is the whole contract."""

    def forward(self, rows: Rows, caches: list[Tensor]) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class TiledStep:
    """Runs `model` on batches, with its caches."""

    def __init__(self, model: StepModel, caches: list[Tensor], row_tile: int = ROW_TILE) -> None:
        self.model = model
        self.caches = caches
        self.row_tile = row_tile

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Tensor:
        """One step -> logits [rows that want them, vocab] in float32, in row order."""
        table = torch.from_numpy(batch.page_table[: batch.num_sequences + 1]).long()
        context = torch.from_numpy(batch.context_len[: batch.num_sequences + 1]).long()
        wanted: list[Tensor] = []
        for start in range(0, batch.num_rows, self.row_tile):
            end = min(start + self.row_tile, batch.num_rows)
            hidden = self.model.forward(self._tile(batch, start, end, table, context), self.caches)
            chosen = np.flatnonzero(batch.wants_logits[start:end])
            if len(chosen):
                wanted.append(hidden[torch.from_numpy(chosen)])
        if not wanted:
            return torch.empty((0, 0))
        return self._head(torch.cat(wanted))

    def _head(self, hidden: Tensor) -> Tensor:
        count = hidden.shape[0]
        padded = torch.nn.functional.pad(hidden, (0, 0, 0, -count % self.row_tile))
        return torch.cat([self.model.logits(tile) for tile in padded.split(self.row_tile)])[:count]

    def _tile(self, batch: StepBatch, start: int, end: int, table: Tensor, context: Tensor) -> Rows:
        def padded(values: Int32Array, filler: int = 0) -> Tensor:
            tile = torch.full((self.row_tile,), filler, dtype=torch.int64)
            tile[: end - start] = torch.from_numpy(values[start:end])
            return tile

        return Rows(
            token=padded(batch.token),
            position=padded(batch.position),
            sequence=padded(batch.sequence),
            slot=padded(batch.slot),
            state_in=padded(batch.state_in),
            state_out=padded(batch.state_out, -1),
            page_table=table,
            context_len=context,
        )
