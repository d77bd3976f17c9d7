"""Whole models on the native device, the same programs by their definition, and the same weights in float32."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from doubles.native_programs import libraries
from slipstream.core.batch import StepBatch
from slipstream.devices.cpu import CpuDevice
from slipstream.devices.native_cpu import NativeCpuDevice
from slipstream.devices.program_cache import Options, Prepared
from slipstream.kernels.cpu.library import NativeLibrary
from slipstream.loading.checkpoint import Checkpoint, open_checkpoint
from slipstream.loading.weight_source import CheckpointSource
from slipstream.loading.weights import load_weights
from slipstream.models.decoder import Decoder
from slipstream.models.registry import build_model
from slipstream.ops.native_spec.cache import page_bytes
from slipstream.ops.native_spec.program import Batch, Interpreter

PAGE = 16

Run = Callable[[StepBatch], Tensor]
Piece = tuple[int, int, int]
"""Sequence, first position, number of rows."""
Plan = list[list[Piece]]
Rows = dict[tuple[int, int], Tensor]
"""Logits by sequence and position."""


@dataclass
class Files:
    """A model's files; each device gets a model object of its own."""

    path: Path

    def __post_init__(self) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(self.path)

    def native(
        self, library: NativeLibrary | None = None, *, threads: int = 1, max_rows: int = 64, **options: str
    ) -> tuple[Decoder, NativeCpuDevice]:
        """The model and its device, by default with the best instruction set."""
        model = build_model(self.checkpoint.config)
        source = CheckpointSource(self.checkpoint, model)
        specs, chosen = model.cache_specs(), library or libraries()[-1]
        made = {"threads": threads, "max_rows": max_rows}
        return model, NativeCpuDevice(chosen, model, specs, source, options=Options(**options), **made)

    def reference(self) -> Decoder:
        """The model in float32, its weights dequantised."""
        model = build_model(self.checkpoint.config)
        load_weights(model, self.checkpoint, torch.float32)
        return model


def native_run(made: tuple[Decoder, NativeCpuDevice], pages: int) -> Run:
    """Runs batches with caches of their own."""
    model, device = made
    return device.compile(model, device.allocate(model.cache_specs(), pages, PAGE)).run


def reference_run(model: Decoder, pages: int) -> Run:
    """The same on the PyTorch path."""
    device = CpuDevice(torch.get_num_threads())
    return device.compile(model, device.allocate(model.cache_specs(), pages, PAGE)).run


def defined_run(prepared: Prepared, pages: int) -> Run:
    """The same by the definition of the native numerics, in numpy."""
    interpreter = Interpreter(prepared.text, prepared.weights.data)
    caches = [
        np.zeros(pages * page_bytes(cache.kind, cache.heads, cache.width, PAGE), np.uint8)
        for cache in prepared.program.caches
    ]

    def run(batch: StepBatch) -> Tensor:
        rows = slice(0, batch.num_rows)
        columns = {name: getattr(batch, name)[rows] for name in ("token", "position", "sequence", "slot")}
        wants = batch.wants_logits[rows]
        interpreter.run(
            Batch(**columns, wants_logits=wants, page_table=batch.page_table, page_size=PAGE, caches=caches)
        )
        if not wants.any():
            return torch.empty((0, 0))
        assert interpreter.logits is not None
        return torch.from_numpy(interpreter.logits)

    return run


def pages_for(sequences: Sequence[Sequence[int]]) -> int:
    """Pages that sequences need, some to spare, and scratch."""
    return sum(-(-len(tokens) // PAGE) for tokens in sequences) + 4


def run_plan(
    run: Run, sequences: Sequence[Sequence[int]], plan: Plan, seed: int = 0, *, only_last: bool = False
) -> Rows:
    """Logits of all rows of a plan, or of each piece's last; pages are dealt by `seed`."""
    draw = random.Random(seed)
    free = draw.sample(range(1, pages_for(sequences)), pages_for(sequences) - 1)
    tables = [np.array([free.pop() for _ in range(-(-len(tokens) // PAGE))], np.int32) for tokens in sequences]
    stride = max(map(len, tables)) + 1
    found: Rows = {}
    for pieces in plan:
        rows = sum(count for _, _, count in pieces)
        batch = StepBatch(max_rows=rows, max_sequences=len(pieces), max_pages=stride, page_size=PAGE)
        places: list[tuple[int, int]] = []
        for sequence, start, count in pieces:
            number = batch.add_sequence(tables[sequence], start + count)
            wants = [not only_last] * (count - 1) + [True]
            batch.add_rows(number, sequences[sequence][start : start + count], start, wants_logits=wants)
            places += [(sequence, start + at) for at, wanted in enumerate(wants) if wanted]
        found |= dict(zip(places, run(batch).clone(), strict=True))
    return found


def whole(sequences: Sequence[Sequence[int]]) -> Plan:
    """Each sequence alone, in one piece."""
    return [[(index, 0, len(tokens))] for index, tokens in enumerate(sequences)]


def row_by_row(sequences: Sequence[Sequence[int]]) -> Plan:
    """Each row alone."""
    return [[(index, at, 1)] for index, tokens in enumerate(sequences) for at in range(len(tokens))]


def random_plan(sequences: Sequence[Sequence[int]], seed: int) -> Plan:
    """Random pieces of random sequences in a random order, until all is done."""
    draw = random.Random(seed)
    at = [0] * len(sequences)
    plan: Plan = []
    while going := [i for i, tokens in enumerate(sequences) if at[i] < len(tokens)]:
        pieces = []
        for sequence in draw.sample(going, draw.randint(1, len(going))):
            left = len(sequences[sequence]) - at[sequence]
            count = min(left, draw.choice((1, 1, 2, 7, left)))
            pieces.append((sequence, at[sequence], count))
            at[sequence] += count
        plan.append(pieces)
    return plan


def assert_same_rows(found: Rows, wanted: Rows, what: str) -> None:
    """Every row that was found has the bits of the wanted one."""
    assert found
    for place, row in found.items():
        assert torch.equal(row.view(torch.int32), wanted[place].view(torch.int32)), f"{what}: {place} differs"


def relative_error(found: Rows, wanted: Rows) -> float:
    """The size of the difference of all logits, relative to their size."""
    mine, theirs = (torch.stack([rows[place] for place in wanted]) for rows in (found, wanted))
    return float((mine - theirs).norm() / theirs.norm())
