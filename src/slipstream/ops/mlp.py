"""The gated activation of SwiGLU feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.ops.fixed import in_pieces
from slipstream.ops.registry import define


def _fake(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


@define("silu_mul(Tensor gate, Tensor up) -> Tensor", fake=_fake)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, both [R, width] (Shazeer, 2020)."""
    return in_pieces(functional.silu, gate) * up
