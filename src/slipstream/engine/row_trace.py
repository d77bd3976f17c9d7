"""Follows one row of one sequence through every operation of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.models.base import CheckpointModel
from slipstream.ops.rows import Rows


class RowTrace:
    """Stands in for a model and keeps what each operation gave for the row `(sequence, position)`.

    `sequences` says which sequence each of the current step's is. An operation counts if its result has as many rows as
    the tile; a cache must have another number of pages.
    """

    def __init__(self, model: CheckpointModel, row: tuple[int, int]) -> None:
        self.model: Any = model
        self.row = row
        self.sequences: Sequence[int] = []
        self.values: list[tuple[str, Tensor]] = []

    def forward(self, rows: Rows, caches: list[Tensor]) -> Tensor:
        """The model's forward pass, followed if the row is in it."""
        here = self._index(rows)
        recorder = nullcontext() if here is None else _Recorder(self.values, here, len(rows.token))
        with recorder:
            hidden: Tensor = self.model.forward(rows, caches)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's head, which is not followed: a difference only there is one of the head."""
        logits: Tensor = self.model.logits(hidden)
        return logits

    def _index(self, rows: Rows) -> int | None:
        sequence, position = self.row
        if sequence not in self.sequences:
            return None
        number = self.sequences.index(sequence) + 1  # sequence 0 of a batch is scratch
        found = ((rows.sequence == number) & (rows.position == position)).nonzero()
        return int(found[0]) if len(found) else None


class _Recorder(TorchDispatchMode):
    def __init__(self, values: list[tuple[str, Tensor]], row: int, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values, self.row, self.rows = values, row, rows

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == self.rows:
                self.values.append((str(func), value[self.row].clone()))
        return result


def first_difference(expected: RowTrace, found: RowTrace) -> str | None:
    """The first operation whose results differ in bits, and the how many-th of its kind; None if none does."""
    counts: Counter[str] = Counter()
    for (name, one), (other_name, other) in zip(expected.values, found.values, strict=False):
        counts[name] += 1
        same = name == other_name and one.dtype == other.dtype and one.shape == other.shape
        if not same or not torch.equal(_bits(one), _bits(other)):
            return f"{name} (call {counts[name]} in the model)"
    return "the head" if expected.values and len(expected.values) == len(found.values) else None


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)
