"""Linear layers, norms and embeddings. Parameters are made empty on the meta device; loading puts the tensors in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slipstream import ops


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


class Linear(nn.Module):
    """`x @ weight.T + bias`, x [R, inputs] -> [R, outputs]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = _empty(outputs, inputs)
        self.bias = _empty(outputs) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """Rows of [vocab, hidden] by token id."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = _empty(vocab, hidden)

    def forward(self, token: Tensor) -> Tensor:
        return ops.embedding(token, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = _empty(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)
