"""What the engine asks of a model, and what a loader needs to fill one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from slipstream.cache.spec import CacheSpec
from slipstream.ops.rows import Rows


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a checkpoint tensor goes: a parameter, or entry `index` of a stacked one."""

    parameter: str
    index: int | None = None


class Model(Protocol):
    """The contract between a model and the engine. Nothing in `forward` may depend on data but through ops."""

    vocab_size: int
    max_position: int

    def cache_specs(self) -> list[CacheSpec]:
        """One spec per cached layer, in the order `forward` takes caches."""
        ...

    def forward(self, rows: Rows, caches: list[Tensor]) -> Tensor:
        """Hidden states [R, hidden] after the last norm. Entries of `caches` are rebound to the written caches."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, vocab] in float32 of rows of `forward`'s result."""
        ...


class CheckpointModel(nn.Module, ABC):
    """A model whose parameters come from a checkpoint."""

    vocab_size: int
    max_position: int

    @abstractmethod
    def cache_specs(self) -> list[CacheSpec]:
        """See `Model`."""

    @abstractmethod
    def forward(self, rows: Rows, caches: list[Tensor]) -> Tensor:
        """See `Model`."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model`."""

    @abstractmethod
    def checkpoint_table(self) -> dict[str, Slot]:
        """Every checkpoint tensor this model needs, and where it goes."""

    def ignored(self, name: str) -> bool:
        """Whether a checkpoint tensor without a place may be left over."""
        return name.endswith("rotary_emb.inv_freq")
