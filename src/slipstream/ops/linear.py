"""Dense layers and the embedding lookup."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.ops.registry import define


def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", fake=_fake_linear)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x [R, in], weight [out, in], bias [out] -> [R, out] in x's dtype."""
    return functional.linear(x, weight, bias)


def _fake_embedding(token: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((token.shape[0], weight.shape[1]))


@define("embedding(Tensor token, Tensor weight) -> Tensor", fake=_fake_embedding)
def embedding(token: Tensor, weight: Tensor) -> Tensor:
    """Rows of `weight` [V, hidden] by token id [R] -> [R, hidden]."""
    return torch.index_select(weight, 0, token)
