"""Rotary position embedding in the split-half layout."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.ops.registry import define


def _fake_table(position: Tensor, inv_freq: Tensor, scale: float) -> Tensor:
    return inv_freq.new_empty((2, position.shape[0], inv_freq.shape[0]))


@define("rope_table(Tensor position, Tensor inv_freq, float scale) -> Tensor", fake=_fake_table)
def rope_table(position: Tensor, inv_freq: Tensor, scale: float) -> Tensor:
    """Cosines and sines of `position` [R] times `inv_freq` [D/2], times `scale` -> [2, R, D/2] float32.

    `scale` is YaRN's attention factor, 1.0 elsewhere.
    """
    angle = position.to(torch.float32)[:, None] * inv_freq[None, :]
    return torch.stack((angle.cos(), angle.sin())) * scale


def _fake_rope(x: Tensor, table: Tensor) -> Tensor:
    return torch.empty_like(x)


@define("rope(Tensor x, Tensor table) -> Tensor", fake=_fake_rope)
def rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate pairs (i, i + D/2) of each head by its row's angles (Su et al., 2021; the layout of published Llama
    weights).

    x [R, heads, D], table [2, R, D/2] from `rope_table` -> [R, heads, D] in x's dtype.
    """
    cos, sin = table[0].to(x.dtype)[:, None, :], table[1].to(x.dtype)[:, None, :]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
