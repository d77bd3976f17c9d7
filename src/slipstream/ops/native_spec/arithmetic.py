"""Single operations: fused multiply-add, sums over lanes, exponential, SiLU, bfloat16."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
Operand = npt.NDArray[Any] | np.floating[Any] | float
Float = TypeVar("Float", np.float32, np.float64)

LANES = 16


def _to_odd(total: F64, error: F64) -> F64:
    """`total` + `error`, where |error| is at most half a unit of total, with the last bit set if that is not exact.

    A value rounded like this keeps on which side of every coarser tie it lies, so rounding it again is rounding once.
    """
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    away = np.where((error > 0) == (total > 0), 1, -1)
    return (bits + np.where(inexact, away, 0)).view(np.float64)


def _two_sum(a: F64, b: F64) -> tuple[F64, F64]:
    """The rounded sum and its exact error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def fma(a: Operand, b: Operand, c: Operand) -> F32:
    """a * b + c with one rounding to float32. Arguments are float32 and broadcast; special values as in IEEE 754."""
    with np.errstate(all="ignore"):
        # 24 by 24 bits: the product is exact in float64.
        product = np.asarray(a, np.float32).astype(np.float64) * np.asarray(b, np.float32).astype(np.float64)
        shape = np.broadcast_shapes(product.shape, np.shape(c))
        product = np.broadcast_to(product, shape)
        total, error = _two_sum(product, np.broadcast_to(np.asarray(c, np.float32).astype(np.float64), shape))
        return np.asarray(_to_odd(np.asarray(total), np.asarray(error)).astype(np.float32))


def fma64(a: Operand, b: Operand, c: Operand) -> F64:
    """a * b + c with one rounding to float64, for values far from the ends of the range (Boldo and Melquiond, 2008)."""
    x, y, z = np.broadcast_arrays(*(np.asarray(v, np.float64) for v in (a, b, c)))
    with np.errstate(all="ignore"):
        high, low = _two_product(x, y)
        upper, lower = _two_sum(z, low)
        total, rest = _two_sum(high, upper)
        return np.asarray(total + _to_odd(*(np.asarray(v) for v in _two_sum(lower, rest))))


def _two_product(a: F64, b: F64) -> tuple[F64, F64]:
    """The rounded product and its exact error (Dekker)."""
    product = a * b
    (a1, a2), (b1, b2) = _split(a), _split(b)
    return product, a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2)


def _split(a: F64) -> tuple[F64, F64]:
    """Two halves of 26 bits each (Veltkamp)."""
    scaled = a * 134217729.0
    high = scaled - (scaled - a)
    return high, a - high


def lanes_sum(x: F32, squares: bool = False) -> F32:
    """Sum over the last dimension [..., n] -> [...], of squares if asked.

    16 lanes: lane j adds up elements 16 * i + j in order of i (squares with `fma`); then lane j takes in lane j + 8,
    then j + 4, j + 2, j + 1.
    """
    lanes = np.zeros((*x.shape[:-1], LANES), np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, x.shape[-1], LANES):
            part = x[..., start : start + LANES]
            mine = lanes[..., : part.shape[-1]]
            mine[:] = fma(part, part, mine) if squares else mine + part
        for width in (8, 4, 2, 1):
            lanes = lanes[..., :width] + lanes[..., width : 2 * width]
    return np.asarray(lanes[..., 0])


def largest(x: F32) -> F32:
    """Largest value of the last dimension; NaN is passed over, and without any number it is minus infinity."""
    return np.asarray(np.fmax.reduce(x, axis=-1, initial=np.float32(-np.inf)))


EXP_LOW = np.float32(-87.33654)
EXP_HIGH = np.float32(88.02969)
_LOG2_E = np.float32(1.44269504)
_LN2_HIGH = np.float32(-0.693359375)
_LN2_LOW = np.float32(2.12194440e-4)
_EXP_TERMS = [np.float32(term) for term in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1)]


def exp(x: F32) -> F32:
    """e to the x (Cephes' polynomial): 0 below `EXP_LOW`, and what `EXP_HIGH` has above it; NaN stays NaN."""
    with np.errstate(all="ignore"):
        bounded = np.clip(np.where(np.isnan(x), np.float32(0), x), EXP_LOW, EXP_HIGH)
        n = np.rint(bounded * _LOG2_E)
        r = fma(n, _LN2_LOW, fma(n, _LN2_HIGH, bounded))
        p = np.full(r.shape, np.float32(1.9875691500e-4))
        for term in (*_EXP_TERMS, np.float32(5.0000001201e-1)):
            p = fma(p, r, term)
        p = fma(p, r * r, r) + np.float32(1)
        # Times 2^n: the exponent's bits plus n. No case overflows or leaves the normal numbers.
        power = (p.view(np.int32) + (n.astype(np.int32) << 23)).view(np.float32)
        power = np.where(x < EXP_LOW, np.float32(0), power)
        return np.where(np.isnan(x), np.float32(np.nan), power)


def silu(x: F32) -> F32:
    """x / (1 + exp(-x))."""
    with np.errstate(all="ignore"):
        return x / (np.float32(1) + exp(-x))


def gated(gate: F32, up: F32) -> F32:
    """silu(gate) * up."""
    with np.errstate(all="ignore"):
        return silu(gate) * up


def to_bf16(x: F32) -> npt.NDArray[np.uint16]:
    """Nearest bfloat16, ties to even, as its 16 bits. NaN stays a NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).astype(np.uint16)


def from_bf16(bits: npt.NDArray[np.uint16]) -> F32:
    """The float32 with these upper 16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
