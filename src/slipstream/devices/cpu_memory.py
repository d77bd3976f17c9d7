"""What the ways to run on this machine's processor share: how it is described, and memory for the cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

import torch

from slipstream.core.errors import ConfigError
from slipstream.devices.host import allowed_cpus, available_memory, cpu_name

CACHE_SHARE = 0.25
"""Part of the free memory that the key/value cache may take when nothing was said."""


class LayerCache(Protocol):
    """What a device needs to know to allocate a layer's cache."""

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    def shape(self, pages: int, page_size: int) -> tuple[int, ...]: ...

    def page_elements(self, page_size: int) -> int: ...


class Processor:
    """This machine's processor. `dtype` is what values are computed in."""

    name = "cpu"
    dispatch_key = "CPU"

    def __init__(self, threads: int | None, dtype: torch.dtype) -> None:
        self.threads = threads or allowed_cpus()
        self.dtype = dtype

    def describe(self) -> str:
        return f"{cpu_name()}, {self.threads} threads"

    def page_bytes(self, specs: Sequence[LayerCache], page_size: int) -> int:
        """Bytes that one page takes over all layers."""
        raise NotImplementedError

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


def affinity() -> list[int]:
    """The CPUs that this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
