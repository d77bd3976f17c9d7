"""Mixture of experts as the CPU runs it on the PyTorch path: experts that no row chose are not read."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.ops.moe import add_expert, expert, route
from slipstream.ops.registry import implement


@implement("moe", "CPU")
def moe_cpu(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor, top_k: int, renormalise: bool) -> Tensor:
    """See `slipstream.ops.moe.moe`. Every expert sees all rows, so that its products keep one shape."""
    shares = route(x, router, top_k, renormalise)
    total = torch.zeros_like(x)
    for index in torch.nonzero((shares != 0).any(0)).flatten().tolist():
        total = add_expert(total, shares[:, index], expert(x, gate[index], up[index], down[index]))
    return total
