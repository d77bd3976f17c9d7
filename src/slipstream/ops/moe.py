"""Mixture of experts: router and experts are one op, so that a chip can read each chosen expert once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.ops.fixed import in_pieces
from slipstream.ops.registry import define


def route(x: Tensor, router: Tensor, top_k: int, renormalise: bool) -> Tensor:
    """Softmax router: the `top_k` largest probabilities stay, the others are zero -> [R, E] float32."""
    probabilities = functional.softmax(functional.linear(x, router), dim=-1, dtype=torch.float32)
    value, index = probabilities.topk(top_k, dim=-1)
    if renormalise:
        value = value / value.sum(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(1, index, value)


def expert(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One SwiGLU expert on all rows: x [R, hidden], gate and up [ff, hidden], down [hidden, ff] -> [R, hidden]."""
    hidden = in_pieces(functional.silu, functional.linear(x, gate)) * functional.linear(x, up)
    return functional.linear(hidden, down)


def add_expert(total: Tensor, share: Tensor, output: Tensor) -> Tensor:
    """Add an expert's output to the rows that chose it; other rows keep their bits."""
    share = share[:, None].to(output.dtype)
    return torch.where(share != 0, total + output * share, total)


def _fake(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor, top_k: int, renormalise: bool) -> Tensor:
    return torch.empty_like(x)


@define(
    "moe(Tensor x, Tensor router, Tensor gate, Tensor up, Tensor down, int top_k, bool renormalise) -> Tensor",
    fake=_fake,
)
def moe(x: Tensor, router: Tensor, gate: Tensor, up: Tensor, down: Tensor, top_k: int, renormalise: bool) -> Tensor:
    """Sum over each row's `top_k` experts of router share times SwiGLU expert (the published Qwen3-MoE block).

    x [R, hidden], router [E, hidden], gate and up [E, ff, hidden], down [E, hidden, ff] -> [R, hidden]. Experts are
    added in the order of their index. `renormalise`: the chosen shares sum to one.
    """
    shares = route(x, router, top_k, renormalise)
    total = torch.zeros_like(x)
    for index in range(gate.shape[0]):
        total = add_expert(total, shares[:, index], expert(x, gate[index], up[index], down[index]))
    return total
