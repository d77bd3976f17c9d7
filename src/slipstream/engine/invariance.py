"""Checks on this machine that a row's result does not depend on what runs beside it, how it was cut, on threads, or
on the instruction set.

Random sequences are run alone and whole, and then in other ways; every row's logits must have the same bits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.core.batch import StepBatch
from slipstream.engine.numerics import Device
from slipstream.engine.row_trace import RowTrace, first_difference
from slipstream.models.base import CheckpointModel

Piece = tuple[int, int, int]
"""Sequence, first position, number of rows."""
Plan = list[list[Piece]]
"""The pieces of each step."""


LEAST_TILE = 16
"""Rows that the sequences are built around where a device has no tile of its own."""


@dataclass(frozen=True)
class Difference:
    """A row that came out otherwise. `first_op` is the first operation whose row differs, None if none was found."""

    way: str
    sequence: int
    position: int
    largest: float
    first_op: str | None

    def __str__(self) -> str:
        where = f"first in {self.first_op}" if self.first_op else "but not when traced"
        return (
            f"{self.way}: sequence {self.sequence}, position {self.position} differs by up to {self.largest:.3g} "
            f"in its logits, {where}"
        )


@dataclass
class InvarianceReport:
    """What was compared with running alone and whole, and the first difference that each way gave."""

    ways: list[str] = field(default_factory=list)
    rows: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.differences


def check_invariance(
    model: CheckpointModel, device: Device, *, page_size: int = 32, rounds: int = 2, seed: int = 0
) -> InvarianceReport:
    """Compare all ways of running a few short sequences. It changes no state of the model."""
    check = _Check(model, device, page_size, random.Random(seed))
    whole = [[(index, 0, length)] for index, length in enumerate(check.lengths)]
    expected = check.run(whole)
    report = InvarianceReport()

    def compare(way: str, plan: Plan, threads: int = device.threads, instruction_set: str | None = None) -> None:
        lowered = nullcontext() if instruction_set is None else device.running_with(instruction_set)
        with device.running_on(threads), lowered:
            found = check.run(plan)
        report.ways.append(way)
        report.rows += sum(check.lengths)
        difference = _first_row(expected, found)
        if difference is not None:
            sequence, position, largest = difference
            op = check.find_op(whole, plan, (sequence, position), threads)
            report.differences.append(Difference(way, sequence, position, largest, op))

    compare("row by row", [[(i, at, 1)] for i, length in enumerate(check.lengths) for at in range(length)])
    for number in range(1, rounds + 1):
        compare(f"batched in random chunks, round {number}", check.random_plan())
    if device.threads > 1:
        compare("whole on 1 thread", whole, 1)
        compare("batched in random chunks on 1 thread", check.random_plan(), 1)
    for name in device.lower_sets:
        compare(f"batched in random chunks with {name} instructions", check.random_plan(), instruction_set=name)
    return report


class _Check:
    """The sequences, and how to run them."""

    def __init__(self, model: CheckpointModel, device: Device, page_size: int, chooser: random.Random) -> None:
        self.model, self.device, self.page_size, self.random = model, device, page_size, chooser
        tile = self.tile = max(device.row_tile, LEAST_TILE)
        # Within a tile, exactly one, one more, and over a page's edge.
        wanted = (3, tile, tile + 1, page_size + tile + 5)
        self.lengths = [min(length, model.max_position) for length in wanted]
        self.tokens = [[chooser.randrange(model.vocab_size) for _ in range(length)] for length in self.lengths]
        self.max_pages = -(-max(self.lengths) // page_size)
        # Twice the pages that are needed, so that tables differ; and never as many as a tile's rows (see RowTrace).
        self.num_pages = max(2 * self.max_pages * len(self.lengths), tile) + 1
        self.caches = device.allocate(model.cache_specs(), self.num_pages, page_size)

    def run(self, plan: Plan, trace: RowTrace | None = None) -> list[Tensor]:
        """Logits of every row, [length, vocab] per sequence. Pages are dealt anew; what is in them stays."""
        step = self.device.compile(trace or self.model, self.caches)
        pages = self.random.sample(range(1, self.num_pages), self.max_pages * len(self.lengths))
        tables = [pages[i * self.max_pages : (i + 1) * self.max_pages] for i in range(len(self.lengths))]
        parts: list[list[Tensor]] = [[] for _ in self.lengths]
        for pieces in plan:
            if trace is not None:
                trace.sequences = [sequence for sequence, _, _ in pieces]
            logits = step.run(self._batch(pieces, tables))
            for (sequence, _, _), rows in zip(pieces, logits.split([count for _, _, count in pieces]), strict=True):
                parts[sequence].append(rows.clone())  # a step may write to the same memory again
        return [torch.cat(rows) for rows in parts]

    def _batch(self, pieces: Sequence[Piece], tables: Sequence[Sequence[int]]) -> StepBatch:
        batch = StepBatch(
            max_rows=sum(count for _, _, count in pieces),
            max_sequences=len(pieces),
            max_pages=self.max_pages,
            page_size=self.page_size,
        )
        for sequence, start, count in pieces:
            number = batch.add_sequence(torch.tensor(tables[sequence], dtype=torch.int32).numpy(), start + count)
            batch.add_rows(number, self.tokens[sequence][start : start + count], start, wants_logits=True)
        return batch

    def random_plan(self) -> Plan:
        """Steps with random pieces of random sequences in a random order, until all is done."""
        at = [0] * len(self.lengths)
        plan: Plan = []
        while going := [i for i, length in enumerate(self.lengths) if at[i] < length]:
            pieces = []
            for sequence in self.random.sample(going, self.random.randint(1, len(going))):
                left = self.lengths[sequence] - at[sequence]
                count = min(left, self.random.choice((1, 2, 5, self.tile, left)))
                pieces.append((sequence, at[sequence], count))
                at[sequence] += count
            plan.append(pieces)
        return plan

    def find_op(self, whole: Plan, plan: Plan, row: tuple[int, int], threads: int) -> str | None:
        """Run both plans again and follow one row through the model's operations, where the device can."""
        if not self.device.traces:
            return None
        expected, found = RowTrace(self.model, row), RowTrace(self.model, row)
        with self.device.running_on(self.device.threads):
            self.run(whole, expected)
        with self.device.running_on(threads):
            self.run(plan, found)
        return first_difference(expected, found)


def _first_row(expected: Sequence[Tensor], found: Sequence[Tensor]) -> tuple[int, int, float] | None:
    """Sequence, position and largest difference of the first row whose bits differ."""
    for sequence, (one, other) in enumerate(zip(expected, found, strict=True)):
        # As integers, so that NaN equals itself and 0.0 differs from -0.0.
        rows = (one.view(torch.int32) != other.view(torch.int32)).any(dim=1).nonzero()
        if len(rows):
            position = int(rows[0])
            return sequence, position, float((one[position] - other[position]).abs().max())
    return None
