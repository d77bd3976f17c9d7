"""The CPU on the plain PyTorch path."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from slipstream.devices.cpu_memory import CACHE_SHARE, LayerCache, Processor
from slipstream.devices.tiled_step import ROW_TILE, StepModel, TiledStep

__all__ = ["CACHE_SHARE", "CpuDevice", "LayerCache"]


class CpuDevice(Processor):
    """This machine's processor, running a model's operators in torch."""

    row_tile = ROW_TILE
    traces = True
    """Whether `compile` also takes what stands in for a model to look into it."""

    lower_sets: Sequence[str] = ()
    """Other instruction sets that steps can be run with: none, which torch chooses once for a process."""

    def __init__(self, threads: int | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(threads, dtype)
        torch.set_num_threads(self.threads)

    def page_bytes(self, specs: Sequence[LayerCache], page_size: int) -> int:
        """Bytes that one page takes over all layers."""
        return sum(spec.page_elements(page_size) for spec in specs) * self.dtype.itemsize

    def allocate(self, specs: Sequence[LayerCache], pages: int, page_size: int) -> list[Tensor]:
        """One zeroed cache tensor per layer; memory is taken when a page is first written."""
        return [self._lazy_zeros(spec.shape(pages, page_size)) for spec in specs]

    def _lazy_zeros(self, shape: tuple[int, ...]) -> Tensor:
        # torch.zeros writes every byte, which takes the whole cache's memory and seconds at the start.
        memory = mmap.mmap(-1, math.prod(shape) * self.dtype.itemsize)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)

    def compile(self, model: StepModel, caches: list[Tensor]) -> TiledStep:
        """The step of a model with its caches. Nothing is compiled on this path."""
        return TiledStep(model, caches, self.row_tile)

    def sampler(self, vocab_size: int) -> None:
        """Tokens are drawn by the op in PyTorch."""

    @contextmanager
    def running_with(self, instruction_set: str) -> Iterator[None]:
        """Steps inside use one of `lower_sets`, of which there are none."""
        raise ValueError(f"steps cannot be run with {instruction_set}")
        yield

    @contextmanager
    def running_on(self, threads: int) -> Iterator[None]:
        """Steps inside run on so many threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
