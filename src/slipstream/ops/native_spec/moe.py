"""Mixture of experts: which experts a row takes, with what share, and their sum."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream.ops.native_spec.arithmetic import F32, exp, fma, gated, lanes_sum, largest
from slipstream.ops.native_spec.linear import apply
from slipstream.ops.native_spec.weights import Weight


def shares(logits: F32, top_k: int, renormalise: bool) -> tuple[npt.NDArray[np.int64], F32]:
    """Chosen experts in ascending order and their shares, each [R, top_k]; logits [R, E].

    p = exp(logit - largest) / lanes_sum of those. The `top_k` largest are chosen, the lower index among equals.
    `renormalise`: divided by the sum of the chosen ones, added in order of the index.
    """
    with np.errstate(all="ignore"):
        e = exp(logits - largest(logits)[:, None])
        p = e / lanes_sum(e)[:, None]
        chosen = np.sort(np.argsort(-p, axis=-1, kind="stable")[:, :top_k], axis=-1)
        share = np.take_along_axis(p, chosen, axis=-1)
        if renormalise:
            total = share[:, 0]
            for i in range(1, top_k):
                total = total + share[:, i]
            share = share / total[:, None]
    return chosen, share


def moe(
    x: F32, router: Weight, gate: list[Weight], up: list[Weight], down: list[Weight], top_k: int, renormalise: bool
) -> F32:
    """x [R, hidden] -> [R, hidden]: from 0, out = fma(share, down(silu(gate) * up), out), experts ascending.

    Rows are quantised before integer weights, those of `down` too.
    """
    chosen, share = shares(apply(x, router), top_k, renormalise)
    out = np.zeros((len(x), down[0].dequantised().shape[0]), np.float32)
    for index in range(len(gate)):
        row, place = np.nonzero(chosen == index)
        if len(row):
            hidden = gated(apply(x[row], gate[index]), apply(x[row], up[index]))
            out[row] = fma(share[row, place, None], apply(hidden, down[index]), out[row])
    return out
