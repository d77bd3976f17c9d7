"""The CPU with the native step: a model's program over packed weights, run by the native library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slipstream.core.config import LEAST_NATIVE_PAGE
from slipstream.core.errors import ConfigError
from slipstream.devices.cpu_memory import LayerCache, Processor, affinity
from slipstream.devices.native_step import NativeStep
from slipstream.devices.not_lowerable import NotLowerable
from slipstream.devices.packed_file import huge_memory
from slipstream.devices.program_cache import Options, Prepared, Progress, WeightSource, prepare
from slipstream.devices.reference_calls import ReferenceCall, needed_inputs
from slipstream.kernels.cpu.library import ISAS, NativeLibrary, NativePool, NativeProgram
from slipstream.kernels.cpu.sampling import NativeSampler

HEAD_STEP, WIDEST_HEAD = 32, 256
"""Widths of attention heads that the library's kernels take."""
SMALL_PAGES = 4 * 2**20
"""Bytes of a layer's cache before huge pages begin: a first token would take one of 2 MiB in every layer."""


class NativeCpuDevice(Processor):
    """This machine's processor, running a model's program. It runs the one model that it was prepared for."""

    row_tile = 1
    traces = False

    def __init__(
        self,
        library: NativeLibrary,
        model: nn.Module,
        specs: Sequence[LayerCache],
        source: WeightSource,
        *,
        threads: int | None = None,
        options: Options | None = None,
        max_rows: int = 512,
        progress: Progress | None = None,
    ) -> None:
        """Prepare the program of `model`, whose parameters stay empty. Raises NotLowerable, or ProgramRefused by the
        library."""
        check_heads(specs)
        super().__init__(threads, torch.float32)
        self.library, self.options, self.max_rows = library, options or Options(), max_rows
        self._model: Any = model
        self.prepared: Prepared = prepare(model, specs, source, self.options, progress)
        self._spare: NativeProgram | None = self._new_program(self.max_rows)
        self._pools: dict[int, NativePool] = {}
        self._references = _reference_calls(self.prepared, model, source)
        # The step's threads are the library's own; torch's, which spin while they wait, would be in their way.
        torch.set_num_threads(1)

    def describe(self) -> str:
        return f"{super().describe()}, native {self.library.describe()}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: all but tables that only single rows are read of."""
        program = self.prepared.program
        only_looked_up = {each.number("weight") for each in program.code if each.name == "embed"}
        only_looked_up -= {each.number("weight") for each in program.code if each.name == "linear"}
        return sum(weight.size for number, weight in enumerate(program.weights) if number not in only_looked_up)

    def page_bytes(self, specs: Sequence[LayerCache], page_size: int) -> int:
        """Bytes that one page takes over all layers."""
        return page_bytes(specs, page_size, self.options.cache_kind)

    def allocate(self, specs: Sequence[LayerCache], pages: int, page_size: int) -> list[Tensor]:
        """One zeroed cache per layer, flat bytes [pages, bytes of a page]; memory is taken when it is first written."""
        if page_size < LEAST_NATIVE_PAGE:
            raise ConfigError(
                f"page_size must be {LEAST_NATIVE_PAGE} or more with native numerics, not {page_size}",
                param="page_size",
            )

        def zeros(size: int) -> Tensor:
            return torch.from_numpy(np.frombuffer(huge_memory(pages * size, SMALL_PAGES), np.uint8)).view(pages, size)

        return [zeros(_page_bytes(spec, page_size, self.options.cache_kind)) for spec in specs]

    def compile(self, model: Any, caches: list[Tensor]) -> NativeStep:
        """The step of the model that this was prepared for, with its caches."""
        if model is not self._model:
            raise ValueError("this device was prepared for another model")
        native, self._spare = self._spare or self._new_program(self.max_rows), None
        return NativeStep(
            self.library,
            self.prepared.program,
            native,
            self._pool(self.threads),
            self.prepared.weights,
            caches,
            vocab_size=self._model.vocab_size,
            references=self._references,
            remake=self._new_program,
        )

    def sampler(self, vocab_size: int) -> NativeSampler:
        """What draws tokens from the step's logits, on the same threads."""
        return NativeSampler(self.library, vocab_size, pool=self._pool(self.threads))

    @contextmanager
    def running_on(self, threads: int) -> Iterator[None]:
        """Steps compiled inside run on so many threads."""
        before = self.threads
        self.threads = threads
        try:
            yield
        finally:
            self.threads = before

    @property
    def lower_sets(self) -> list[str]:
        """The instruction sets that this processor runs beside the device's own, which give the same bits."""
        return list(ISAS[: self.library.isa])

    @contextmanager
    def running_with(self, instruction_set: str) -> Iterator[None]:
        """Steps compiled inside use a lower instruction set."""
        before = self.library
        self.library, self._spare = replace(before, isa=ISAS.index(instruction_set)), None
        try:
            yield
        finally:
            self.library, self._spare = before, None

    def _pool(self, threads: int) -> NativePool:
        if threads not in self._pools:
            self._pools[threads] = NativePool(self.library, threads, affinity())
        return self._pools[threads]

    def _new_program(self, max_rows: int) -> NativeProgram:
        weights = self.prepared.weights
        return NativeProgram(self.library, self.prepared.text, weights.address, weights.size, max_rows=max_rows)


def check_heads(specs: Sequence[LayerCache]) -> None:
    """Raises NotLowerable if the library's kernels do not take heads of such a width."""
    for spec in specs:
        if spec.head_dim % HEAD_STEP or spec.head_dim > WIDEST_HEAD:
            raise NotLowerable(
                f"heads are {spec.head_dim} wide; the native step takes multiples of {HEAD_STEP} up to {WIDEST_HEAD}"
            )


def page_bytes(specs: Sequence[LayerCache], page_size: int, kind: str) -> int:
    """Bytes that one page takes over all layers in a cache of `kind` (bf16 or int8)."""
    return sum(_page_bytes(spec, page_size, kind) for spec in specs)


def _page_bytes(spec: LayerCache, page_size: int, kind: str) -> int:
    if kind == "bf16":
        return spec.page_elements(page_size) * 2
    return spec.page_elements(page_size) + spec.kv_heads * 2 * page_size * 4  # int8, and a scale for each key and value


def _reference_calls(prepared: Prepared, model: nn.Module, source: WeightSource) -> list[ReferenceCall]:
    """The operators that torch runs, with the parameters that they need in float32."""
    inputs: dict[str, Tensor] = {f"buffer.{name}": buffer for name, buffer in model.named_buffers()}
    stored = source.stored() if prepared.program.references else {}
    parameters = dict(model.named_parameters())
    for needed in needed_inputs(prepared.program.references):
        kind, _, name = needed.partition(".")
        if kind != "parameter":
            continue
        parts = [source.tensor(part.name).float() for part in stored[name]]
        inputs[needed] = torch.stack(parts) if len(parameters[name].shape) > parts[0].dim() else parts[0]
    return [ReferenceCall(description, inputs) for description in prepared.program.references]
