"""Arithmetic whose bits depend on the values alone: not on the shape, the row's place or the number of threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

PIECE = 32768
"""Elements at most in one call. Above this torch splits an elementwise function between threads."""
LANES = 64
"""A multiple of every vector width torch unrolls to, so that no element is left to the scalar code of a tail."""
ONE = 2.0**40
"""What weight 1 is as a whole number in `weights_of`."""


def in_pieces(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply the elementwise function `fn` (exp, log, ...) to `x` of any shape; the result has the same shape.

    torch's vector and scalar versions of such functions may differ in the last bit, and which elements the scalar
    version gets depends on the length and on the split between threads. Here all go through the vector version.
    On other devices than the CPU `fn` is applied as it is.
    """
    size = x.numel()
    if x.device.type != "cpu" or (size % LANES == 0 and size <= PIECE and x.is_contiguous()):
        return fn(x)
    flat = x.reshape(-1)
    out = torch.empty_like(flat)
    for start in range(0, size, PIECE):
        piece = flat[start : start + PIECE]
        count = len(piece)
        if count % LANES:
            padded = piece.new_ones(count + LANES - count % LANES)
            padded[:count] = piece
            piece = padded
        out[start : start + PIECE] = fn(piece)[:count]
    return out.view(x.shape)


def _as_array(x: torch.Tensor) -> np.ndarray | None:
    """The values of a tensor that is in the host's memory and not being traced; else None."""
    if x.device.type != "cpu" or type(x) is not torch.Tensor:
        return None
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return None
    return np.ascontiguousarray(x.detach().numpy())


# On a CPU these are numpy's, whose vector code takes the tails in too. torch's hand more than some 3,000 elements to
# a library with threads of its own: slower in one thread, and it stalls for milliseconds when a core is busy.


def exp(x: torch.Tensor) -> torch.Tensor:
    """Elementwise e**x of a float32 tensor."""
    array = _as_array(x)
    return torch.exp(x) if array is None else torch.from_numpy(np.exp(array))


def log(x: torch.Tensor) -> torch.Tensor:
    """Elementwise natural logarithm of a float32 tensor of positive values."""
    array = _as_array(x)
    return torch.log(x) if array is None else torch.from_numpy(np.log(array))


def log1p(x: torch.Tensor) -> torch.Tensor:
    """Elementwise log(1 + x) of a float32 tensor of values above -1."""
    array = _as_array(x)
    return torch.log1p(x) if array is None else torch.from_numpy(np.log1p(array))


def weights_of(logits: torch.Tensor) -> torch.Tensor:
    """exp(logits) as int64 in units of 2**-40, for float32 logits of at most 0.

    Sums of whole numbers are exact, so they are the same in any order, split or shape. Up to 2**22 weights can be
    summed without overflow; a weight below 2**-40 counts as none, which is beneath what float32 sums resolve.
    """
    return (exp(logits) * ONE).to(torch.int64)


def log_sum_exp(weights_sum: torch.Tensor) -> torch.Tensor:
    """log of a sum of `weights_of`, float32."""
    return in_pieces(torch.log, weights_sum.to(torch.float32) * (1.0 / ONE))
