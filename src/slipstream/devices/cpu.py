"""The CPU on the plain PyTorch path."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.errors import ConfigError
from slipstream.devices.host import allowed_cpus, available_memory, cpu_name
from slipstream.devices.tiled_step import ROW_TILE, StepModel, TiledStep

CACHE_SHARE = 0.25
"""Part of the free memory that the key/value cache may take when nothing was said."""


class LayerCache(Protocol):
    """What a device needs to know to allocate a layer's cache."""

    def shape(self, pages: int, page_size: int) -> tuple[int, ...]: ...

    def page_elements(self, page_size: int) -> int: ...


class CpuDevice:
    """This machine's processor."""

    name = "cpu"
    row_tile = ROW_TILE
    dispatch_key = "CPU"

    def __init__(self, threads: int | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.threads = threads or allowed_cpus()
        self.dtype = dtype
        torch.set_num_threads(self.threads)

    def describe(self) -> str:
        return f"{cpu_name()}, {self.threads} threads"

    def page_bytes(self, specs: Sequence[LayerCache], page_size: int) -> int:
        """Bytes that one page takes over all layers."""
        return sum(spec.page_elements(page_size) for spec in specs) * self.dtype.itemsize

    def plan_pages(
        self, specs: Sequence[LayerCache], page_size: int, *, budget: int | None, useful: int, least: int
    ) -> int:
        """How many pages to allocate, scratch included.

        `budget` is bytes (None: a share of free memory), `useful` pages could ever be in use, `least` are needed to
        serve one request of full length. Raises ConfigError when not even those fit.
        """
        per_page = self.page_bytes(specs, page_size)
        memory = int(available_memory() * CACHE_SHARE) if budget is None else budget
        pages = min(memory // per_page, useful)
        if pages < least:
            raise ConfigError(
                f"cache_memory: {memory / 2**20:.0f} MiB hold {pages} pages of {per_page / 2**20:.2f} MiB, but one "
                f"request of the full context needs {least}; give cache_memory of "
                f"{least * per_page / 2**20:.0f} MiB or more, or a smaller max_model_len",
                param="cache_memory",
            )
        return pages

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
