"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.ops.registry import define


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", fake=_fake)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension, in float32 (Zhang and Sennrich, 2019).

    x [..., width], weight [width] -> the shape and dtype of x. The normalised value is rounded to x's dtype before the
    weight is applied, as the published Llama code does.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
