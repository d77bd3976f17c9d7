"""A step of the native program: one call of the library for a batch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from slipstream.core.batch import StepBatch
from slipstream.core.errors import SlipstreamError
from slipstream.devices.packed_file import PackedWeights
from slipstream.devices.reference_calls import ReferenceCall
from slipstream.kernels.cpu.library import NativeBatch, NativeLibrary, NativePool, NativeProgram, floats_at
from slipstream.kernels.cpu.program import LOGITS, Program

_ROW_INPUTS = ("token", "position", "sequence", "slot", "state_in", "state_out")


class NativeStep:
    """Runs a program on batches, with its caches. Logits are a view of memory that the next step writes to.

    `remake` makes the program anew for more rows than it was made for.
    """

    def __init__(
        self,
        library: NativeLibrary,
        program: Program,
        native: NativeProgram,
        pool: NativePool,
        weights: PackedWeights,
        caches: Sequence[Tensor],
        *,
        vocab_size: int,
        references: Sequence[ReferenceCall],
        remake: Callable[[int], NativeProgram],
    ) -> None:
        self._library, self._program, self._native, self._weights = library, program, native, weights
        self._caches = list(caches)
        self._vocab_size = vocab_size
        self._references = references
        self._remake = remake
        self._call = library.handle.ss_program_run
        self.use(pool)
        addresses = [cache.data_ptr() for cache in caches]
        self._cache_addresses = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        self._arguments = NativeBatch(caches=self._cache_addresses)
        self._pointer = ctypes.pointer(self._arguments)
        self._bound: StepBatch | None = None
        self._logits = torch.empty((0, vocab_size))
        self._between = [i for i, each in enumerate(program.code) if each.name == "reference"]

    def use(self, pool: NativePool) -> None:
        """Run on the threads of `pool` from now on."""
        self._pool = pool

    def run(self, batch: StepBatch) -> Tensor:
        """One step -> logits [rows that want them, vocab] in float32, in row order."""
        if batch is not self._bound:
            self._bind(batch)
        arguments = self._arguments
        rows = batch.num_rows
        wanted = int(np.count_nonzero(batch.wants_logits[:rows]))
        if rows > self._native.max_rows:
            self._native = self._remake(rows)
        if wanted > len(self._logits):
            self._grow(wanted)
        arguments.num_rows = rows
        arguments.num_wanted = wanted
        if self._between:
            self._run_pieces(batch, rows, wanted)
        elif self._call(self._native.address, self._pool.address, self._pointer, 0, self._native.length):
            self._fail(rows)
        return self._logits[:wanted]

    def _bind(self, batch: StepBatch) -> None:
        """Point at a batch's arrays, which stay where they are for its life."""
        arguments = self._arguments
        for name in ("token", "position", "sequence", "slot", "page_table"):
            array = getattr(batch, name)
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
            setattr(arguments, name, array.ctypes.data)
        assert batch.wants_logits.dtype == np.bool_
        arguments.wants_logits = batch.wants_logits.ctypes.data
        arguments.page_size = batch.page_size
        arguments.table_stride = batch.page_table.shape[1]
        self._bound = batch

    def _grow(self, wanted: int) -> None:
        capacity = max(16, 1 << (wanted - 1).bit_length())
        self._logits = torch.empty((capacity, self._vocab_size))
        self._arguments.logits = self._logits.data_ptr()

    def _fail(self, rows: int) -> None:
        raise SlipstreamError(f"the native step refused a batch of {rows} rows")

    # Programs with operators that torch runs

    @torch.no_grad()
    def _run_pieces(self, batch: StepBatch, rows: int, wanted: int) -> None:
        ends = [-1, *self._between, self._native.length]
        for before, after in pairwise(ends):
            if before >= 0:
                self._run_reference(before, batch, rows, wanted)
            first = before + 1
            if first < after and self._call(self._native.address, self._pool.address, self._pointer, first, after):
                self._fail(rows)

    def _run_reference(self, index: int, batch: StepBatch, rows: int, wanted: int) -> None:
        instruction = self._program.code[index]
        reference = self._references[instruction.number("op")]
        count = wanted if reference.wanted else rows
        if count == 0:
            return

        def row_input(source: str) -> Tensor:
            name = source.removeprefix("rows.")
            values = getattr(batch, name)
            count = rows if name in _ROW_INPUTS else batch.num_sequences + 1
            return torch.from_numpy(values[:count]).long()

        result = reference.run([self._view(number, count) for number in instruction.reads()], count, row_input)
        out = instruction.number("out")
        target = self._logits[:count] if out == LOGITS else self._view(out, count)
        target.copy_(result)

    def _view(self, number: int, rows: int) -> Tensor:
        """The first rows of a float32 buffer."""
        address, row_bytes = self._native.buffer(number)
        stride = row_bytes // 4
        values = torch.from_numpy(floats_at(address, stride * rows))
        return values.view(rows, stride)[:, : self._program.buffers[number].width]
