"""How a checkpoint's tensors are named to what packs them."""

from __future__ import annotations

from dataclasses import dataclass

BUFFER_PREFIX = "buffer."
"""Begins the names of vectors that are buffers of the model, not tensors of the checkpoint."""


@dataclass(frozen=True)
class Stored:
    """A tensor as the checkpoint holds it."""

    name: str
    form: str
    shape: tuple[int, ...]
