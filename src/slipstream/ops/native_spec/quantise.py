"""Activations in blocks of 32 eight-bit numbers with one scale each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream.ops.native_spec.arithmetic import F32, I32

BLOCK = 32
SMALLEST = np.float32(1e-30)
"""Blocks whose largest magnitude is below this are all zero."""


@dataclass
class Quantised:
    """Rows as stored: q int8 [R, 32 * blocks], scale and fsum float32 [R, blocks]; elements past the width are 0.

    `fsum` is scale times the sum of q, which is what a weight's minimum is multiplied by.
    """

    q: npt.NDArray[np.int8]
    scale: F32
    fsum: F32

    @property
    def neg8(self) -> I32:
        """Minus 8 times each block's sum of q, int32 [R, blocks]: what an offset of 8 in the weights adds to a dot."""
        return (-8 * self._sums(BLOCK)).astype(np.int32)

    @property
    def neg8h(self) -> I32:
        """The same for half blocks of 16, int32 [R, 2 * blocks]."""
        return (-8 * self._sums(BLOCK // 2)).astype(np.int32)

    def _sums(self, width: int) -> npt.NDArray[np.int64]:
        return np.asarray(self.q.reshape(len(self.q), -1, width).sum(-1, dtype=np.int64))


def scale_and_inverse(x: F32) -> tuple[F32, F32, npt.NDArray[np.bool_]]:
    """Of the last dimension [..., n]: scale, what to multiply by, and whether its numbers are kept; each [...].

    a = the largest magnitude. scale = a / 127 and inverse = 127 / a. Below `SMALLEST` the scale is 0, with an infinity
    or a NaN it is NaN; all numbers become 0 then.
    """
    bits = np.ascontiguousarray(x).view(np.uint32) & np.uint32(0x7FFFFFFF)
    # Compared as whole numbers: a NaN is larger than infinity, infinity than everything else.
    a = bits.max(-1).view(np.float32)
    with np.errstate(all="ignore"):
        usable = np.isfinite(a) & (a >= SMALLEST)
        scale = np.where(np.isfinite(a), np.where(usable, a / np.float32(127), np.float32(0)), np.float32(np.nan))
        inverse = np.where(usable, np.float32(127) / a, np.float32(0))
    return scale.astype(np.float32), inverse.astype(np.float32), usable


def to_int8(x: F32) -> tuple[npt.NDArray[np.int8], F32]:
    """Each last dimension [..., n] with one scale -> int8 [..., n], float32 scale [...]: q = rint(x * (127 / a))."""
    scale, inverse, usable = scale_and_inverse(x)
    with np.errstate(all="ignore"):
        q = np.where(usable[..., None], np.rint(x * inverse[..., None]), np.float32(0))
    return q.astype(np.int8), scale


def quantise(x: F32) -> Quantised:
    """Rows [R, width] in blocks of 32; the last block is filled up with zeros."""
    rows, width = x.shape
    blocks = -(-width // BLOCK)
    padded = np.zeros((rows, blocks * BLOCK), np.float32)
    padded[:, :width] = x
    q, scale = to_int8(padded.reshape(rows, blocks, BLOCK))
    with np.errstate(all="ignore"):
        fsum = scale * q.sum(-1, dtype=np.int32).astype(np.float32)
    return Quantised(q.reshape(rows, -1), scale, fsum)
