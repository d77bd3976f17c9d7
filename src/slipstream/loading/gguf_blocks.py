"""Dequantisation of ggml's block formats to float32, with numpy.

A quantised row is a sequence of blocks; a block holds its scales and a fixed number of small integers. The layouts and
the order of operations are ggml's (ggml/src/ggml-quants.c, `dequantize_row_*`): every value is one product, or one
product and one sum, each rounded to float32, so results are the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from slipstream.core.errors import LoadError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Format:
    """A stored format: `block` elements take `size` bytes. Without `unpack` it is known by size only, and refused."""

    name: str
    block: int
    size: int
    unpack: Callable[[Bytes, Floats], None] | None = field(default=None, repr=False)

    @property
    def readable(self) -> bool:
        return self.unpack is not None


# Values one call of `unpack` handles: temporaries stay in a core's second-level cache.
_PIECE = 1 << 16


def dequantize(raw: Bytes, fmt: Format, out: Floats) -> None:
    """Fill `out` (any shape, contiguous float32) from `raw` (flat uint8, whole blocks of `fmt`).

    Works in pieces, so it needs a few hundred KiB beside `out`. Raises LoadError if `fmt` cannot be read.
    """
    if fmt.unpack is None:
        raise LoadError(f"format {fmt.name} cannot be read; Slipstream reads {readable_names()}")
    blocks = raw.reshape(-1, fmt.size)
    values = out.reshape(-1, fmt.block)
    if len(blocks) != len(values):
        raise ValueError(f"{len(blocks)} blocks of {fmt.name} do not fill {out.size} values")
    step = max(1, _PIECE // fmt.block)
    # Scales may be infinite or NaN in a damaged file; ggml multiplies them without complaint, and so do we.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            fmt.unpack(blocks[start : start + step], values[start : start + step])


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes, half: int) -> Bytes:
    """[n, m * half] bytes to [n, m, 2, half] values: the low nibbles of `half` bytes, then their high nibbles."""
    packed = packed.reshape(len(packed), -1, half)
    out = np.empty((*packed.shape[:2], 2, half), np.uint8)
    np.bitwise_and(packed, 15, out=out[:, :, 0])
    np.right_shift(packed, 4, out=out[:, :, 1])
    return out


def _f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f4")


def _f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.view("<f2")


def _bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    np.subtract(_nibbles(blocks[:, 2:], 16).reshape(-1, 32), 8, out=out, dtype=np.float32)
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    out[:] = _nibbles(blocks[:, 4:], 16).reshape(-1, 32)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """[n, 4] bytes of fifth bits (bit i is value i's) and [n, 16] nibbles to [n, 32] values."""
    values = np.unpackbits(high, axis=1, bitorder="little")
    values <<= 4
    values |= _nibbles(low, 16).reshape(-1, 32)
    return values


def _q5_0(blocks: Bytes, out: Floats) -> None:
    np.subtract(_five_bits(blocks[:, 2:6], blocks[:, 6:]), 16, out=out, dtype=np.float32)
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    out[:] = _five_bits(blocks[:, 4:8], blocks[:, 8:])
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum [n, 8, 1] of the eight sub-blocks of Q4_K and Q5_K.

    Bytes 4 to 15 hold sixteen 6-bit numbers: four scales, four minima, and four bytes with the low nibbles of the other
    eight, whose two high bits sit on top of the first eight.
    """
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=1)
    d = _half(blocks, 0) * scales.astype(np.float32)
    m = _half(blocks, 2) * minima.astype(np.float32)
    return d[:, :, None], m[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    d, m = _scales_and_minima(blocks)
    values = out.reshape(-1, 8, 32)
    values[:] = _nibbles(blocks[:, 16:], 32).reshape(-1, 8, 32)
    values *= d
    values -= m


def _q5_k(blocks: Bytes, out: Floats) -> None:
    d, m = _scales_and_minima(blocks)
    bits = np.arange(8, dtype=np.uint8)[None, :, None]
    quants = (blocks[:, None, 16:48] >> bits) & 1
    quants <<= 4
    quants |= _nibbles(blocks[:, 48:], 32).reshape(-1, 8, 32)
    values = out.reshape(-1, 8, 32)
    values[:] = quants
    values *= d
    values -= m


def _q6_k(blocks: Bytes, out: Floats) -> None:
    d = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    low = _nibbles(blocks[:, :128], 64).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    high <<= 4
    high |= low
    values = out.reshape(-1, 16, 16)
    np.subtract(high.reshape(-1, 16, 16), 32, out=values, dtype=np.float32)
    values *= d[:, :, None]


# Numbers are ggml's `enum ggml_type`; formats that newer files may use are listed so that they can be refused by name.
FORMATS: dict[int, Format] = {
    0: Format("F32", 1, 4, _f32),
    1: Format("F16", 1, 2, _f16),
    2: Format("Q4_0", 32, 18, _q4_0),
    3: Format("Q4_1", 32, 20, _q4_1),
    6: Format("Q5_0", 32, 22, _q5_0),
    7: Format("Q5_1", 32, 24, _q5_1),
    8: Format("Q8_0", 32, 34, _q8_0),
    9: Format("Q8_1", 32, 36),
    10: Format("Q2_K", 256, 84),
    11: Format("Q3_K", 256, 110),
    12: Format("Q4_K", 256, 144, _q4_k),
    13: Format("Q5_K", 256, 176, _q5_k),
    14: Format("Q6_K", 256, 210, _q6_k),
    15: Format("Q8_K", 256, 292),
    16: Format("IQ2_XXS", 256, 66),
    17: Format("IQ2_XS", 256, 74),
    18: Format("IQ3_XXS", 256, 98),
    19: Format("IQ1_S", 256, 50),
    20: Format("IQ4_NL", 32, 18),
    21: Format("IQ3_S", 256, 110),
    22: Format("IQ2_S", 256, 82),
    23: Format("IQ4_XS", 256, 136),
    24: Format("I8", 1, 1),
    25: Format("I16", 1, 2),
    26: Format("I32", 1, 4),
    27: Format("I64", 1, 8),
    28: Format("F64", 1, 8),
    29: Format("IQ1_M", 256, 56),
    30: Format("BF16", 1, 2, _bf16),
    34: Format("TQ1_0", 256, 54),
    35: Format("TQ2_0", 256, 66),
    39: Format("MXFP4", 32, 17),
    40: Format("NVFP4", 64, 36),
    41: Format("Q1_0", 128, 18),
}


def readable_names() -> str:
    """The formats that can be read, for messages."""
    return ", ".join(fmt.name for fmt in FORMATS.values() if fmt.readable)
