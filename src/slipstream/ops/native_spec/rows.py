"""What is done to each row alone: normalisation, rotation, the rotation's table."""

from __future__ import annotations

from fractions import Fraction
from math import factorial

import numpy as np

from slipstream.ops.native_spec.arithmetic import F32, F64, I32, fma, fma64, lanes_sum


def norm(x: F32, weight: F32, eps: float, heads: int = 1) -> F32:
    """RMS norm of rows [R, width], or of each of `heads` equal parts alone; weight [width / heads].

    r = 1 / sqrt(lanes_sum(x * x) / width + eps), each operation rounded; y = weight * (x * r).
    """
    parts = x.reshape(len(x), heads, -1)
    one = np.float32(1)
    with np.errstate(all="ignore"):
        mean = lanes_sum(parts, squares=True) / np.float32(parts.shape[-1])
        r = one / np.sqrt(mean + np.float32(eps))
        return np.asarray(weight * (parts * r[..., None])).reshape(x.shape)


def rope(x: F32, table: F32, heads: int, width: int) -> F32:
    """Rotate each head's pairs (i, i + width / 2): x [R, heads * width], table [R, width] as `rope_table` makes it."""
    half = width // 2
    parts = x.reshape(len(x), heads, width)
    cos, sin = table[:, None, :half], table[:, None, half:]
    first, second = parts[..., :half], parts[..., half:]
    with np.errstate(all="ignore"):
        turned = [fma(first, cos, -(second * sin)), fma(second, cos, first * sin)]
    return np.concatenate(turned, axis=-1).reshape(x.shape)


def rope_table(position: I32, inv_freq: F32, scale: float = 1.0) -> F32:
    """Cosines, then sines of position * inv_freq: position [R], inv_freq [D / 2] -> [R, D].

    The angle is a float32. Its sine and cosine are computed in double, rounded to float32, then multiplied by `scale`.
    """
    angle = position.astype(np.float32)[:, None] * inv_freq
    sin, cos = _sincos(angle.astype(np.float64))
    both = np.concatenate([cos.astype(np.float32), sin.astype(np.float32)], axis=-1)
    return both * np.float32(scale)


def _taylor(first: int, count: int) -> list[float]:
    """Factors of x^first, x^(first + 2), ...: alternately -1 / n! and 1 / n!."""
    return [float(Fraction((-1) ** (i + 1), factorial(first + 2 * i))) for i in range(count)]


_SIN = _taylor(3, 7)
_COS = _taylor(2, 8)


def _horner(z: F64, terms: list[float]) -> F64:
    value = np.full(z.shape, terms[-1])
    for term in terms[-2::-1]:
        value = value * z + term
    return value


def _sincos(angle: F64) -> tuple[F64, F64]:
    """Sine and cosine: reduction by pi / 2 in two parts with fused multiply-adds, then polynomials without them."""
    n = np.rint(angle * 0.6366197723675814)
    r = fma64(-n, 6.123233995736766e-17, fma64(-n, 1.5707963267948966, angle))
    z = r * r
    sin = r + r * z * _horner(z, _SIN)
    cos = 1.0 + z * _horner(z, _COS)
    quadrant = n.astype(np.int64) & 3
    odd = (quadrant & 1).astype(bool)
    sin, cos = np.where(odd, cos, sin), np.where(odd, sin, cos)
    return np.where(quadrant >= 2, -sin, sin), np.where((quadrant == 1) | (quadrant == 2), -cos, cos)
