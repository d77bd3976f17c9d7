"""Feed-forward blocks: SwiGLU and mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream import ops
from slipstream.layers.basic import Linear


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden: int, intermediate: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, intermediate, bias)
        self.up_proj = Linear(hidden, intermediate, bias)
        self.down_proj = Linear(intermediate, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj.forward(ops.silu_mul(self.gate_proj.forward(x), self.up_proj.forward(x)))


class MixtureOfExperts(nn.Module):
    """`top_k` SwiGLU experts of `experts`, chosen by a softmax router."""

    def __init__(self, hidden: int, intermediate: int, experts: int, top_k: int, renormalise: bool) -> None:
        super().__init__()

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)

        self.top_k, self.renormalise = top_k, renormalise
        self.router = empty(experts, hidden)
        self.gate = empty(experts, intermediate, hidden)
        self.up = empty(experts, intermediate, hidden)
        self.down = empty(experts, hidden, intermediate)

    def forward(self, x: Tensor) -> Tensor:
        return ops.moe(x, self.router, self.gate, self.up, self.down, self.top_k, self.renormalise)
