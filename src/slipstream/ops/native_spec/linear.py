"""Matrix products: quantised rows times integer weights, float32 rows times float weights."""

from __future__ import annotations

import numpy as np

from slipstream.ops.native_spec.arithmetic import F32, fma
from slipstream.ops.native_spec.quantise import BLOCK, Quantised, quantise
from slipstream.ops.native_spec.weights import FloatWeight, IntegerWeight, Weight


def linear(x: F32 | Quantised, weight: Weight, bias: F32 | None = None, add: F32 | None = None) -> F32:
    """(add +) (x @ W.T (+ bias)), [R, N]: `x` is quantised for integer weights, float32 [R, K] for float weights.

    bias [N], add [R, N]: y, then y + bias, then add + that.
    """
    if isinstance(weight, IntegerWeight):
        assert isinstance(x, Quantised)
        y = _integer(x, weight)
    else:
        assert not isinstance(x, Quantised)
        y = _float(x, weight)
    with np.errstate(all="ignore"):
        if bias is not None:
            y = y + bias
        if add is not None:
            y = add + y
    return y


def apply(x: F32, weight: Weight) -> F32:
    """`linear` of float32 rows, which are quantised first if the weights are integers."""
    return linear(quantise(x) if isinstance(weight, IntegerWeight) else x, weight)


def _integer(x: Quantised, weight: IntegerWeight) -> F32:
    """Blocks in order: acc = fma(scale_w * scale_x, float(dot), acc), then acc = fma(minimum, fsum, acc).

    `dot` is the exact sum of products of integers. Kinds with two scales a block have two steps a block.
    """
    rows, outputs = len(x.q), len(weight.number)
    acc = np.zeros((rows, outputs), np.float32)
    step = weight.scaled
    for start in range(0, x.q.shape[1], step):
        block = start // BLOCK
        # At most 32 * 128 * 127: exact in float64 and in float32.
        mine, theirs = (part[:, start : start + step].astype(np.float64) for part in (x.q, weight.number))
        dot = (mine @ theirs.T).astype(np.float32)
        with np.errstate(all="ignore"):
            scale = weight.scale[:, start // step] * x.scale[:, block, None]
        acc = fma(scale, dot, acc)
        if weight.minimum is not None:
            acc = fma(weight.minimum[:, block], x.fsum[:, block, None], acc)
    return acc


def _float(x: F32, weight: FloatWeight) -> F32:
    """acc = fma(w[k], x[k], acc), k ascending."""
    acc = np.zeros((len(x), len(weight.value)), np.float32)
    for k in range(weight.value.shape[1]):
        acc = fma(weight.value[:, k], x[:, k, None], acc)
    return acc
