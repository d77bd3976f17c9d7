"""Packed weights: the layout of each kind, and the numbers that it stands for.

A tile is 16 outputs; tiles follow each other. A tile is the quants of all blocks of 32 inputs, then the scales of all
blocks, each part filled up to 64 bytes. Missing outputs of the last tile and missing inputs of the last block (of the
last 256 for kinds ending in _k) are zero. The 512 numbers of a block are eight vectors of 64 bytes: byte 4 * o + i of
vector j belongs to output o and input 4 * j + i.

kind   quants of a block                     scales                                            value of number n
q4_0   vectors i and i + 4 share bytes       f16 d[16] per block                               d * (n - 8)
q4_1   same (i low, i + 4 high nibble)       f16 d[16], f16 m[16] per block                    d * n + m
q8_0   one byte each, the number plus 128    f16 d[16]                                         d * n
q8_1   same                                  f16 d[16], f16 m[16]                              d * n + m
q8_f   same                                  f32 d[16], f32 m[16]                              d * n + m
q4_k   as q4_0                               per 8 blocks: f16 d[16], f16 dmin[16], then       (d * sc) * n - dmin * mn
                                             per block u8 sc[16], u8 mn[16]
q6_k   low nibbles as q4_0, then two         per 8 blocks: f16 d[16], then per block           (d * sc) * (n - 32)
       vectors with the upper two bits of    i8 sc[2][16], one for each 16 inputs
       vectors 4 * a .. 4 * a + 3
bf16   u16 [inputs][16]                      none
f32    f32 [inputs][16]                      none
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.ops.native_spec.arithmetic import F32, I32, from_bf16

TILE = 16
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Kind:
    """Bytes of a block's quants; bytes of the scales of a group of `unit` inputs; number of inputs with one scale."""

    quants: int
    scales: int
    unit: int = 32
    scaled: int = 32


KINDS = {
    "q4_0": Kind(256, 32),
    "q4_1": Kind(256, 64),
    "q8_0": Kind(512, 32),
    "q8_1": Kind(512, 64),
    "q8_f": Kind(512, 128),
    "q4_k": Kind(256, 320, unit=256),
    "q6_k": Kind(384, 288, unit=256, scaled=16),
    "bf16": Kind(32 * TILE * 2, 0),
    "f32": Kind(32 * TILE * 4, 0),
}


@dataclass
class IntegerWeight:
    """number int32 [N, K] without its offset, scale float32 [N, K / scaled], minimum [N, K / 32]; K whole blocks."""

    kind: str
    number: I32
    scale: F32
    minimum: F32 | None
    inputs: int

    @property
    def scaled(self) -> int:
        """Inputs that share a scale: 16 or 32."""
        return KINDS[self.kind].scaled

    def dequantised(self) -> F32:
        """float32 [N, inputs]: product and sum each rounded, as ggml does it."""
        blocks = self.number.reshape(len(self.number), -1, self.scaled).astype(np.float32)
        with np.errstate(all="ignore"):
            values = self.scale[..., None] * blocks
            if self.minimum is not None:
                values = values + self.minimum[..., None]
        return values.reshape(len(values), -1)[:, : self.inputs]


@dataclass
class FloatWeight:
    """value float32 [N, inputs]."""

    kind: str
    value: F32

    def dequantised(self) -> F32:
        return self.value


Weight = IntegerWeight | FloatWeight


def section_sizes(kind: str, inputs: int) -> tuple[int, int]:
    """Bytes of a tile's quants and of its scales."""
    it = KINDS[kind]
    units = -(-inputs // it.unit)
    quants, scales = units * (it.unit // 32) * it.quants, units * it.scales
    return -(-quants // 64) * 64, -(-scales // 64) * 64


def packed_size(kind: str, outputs: int, inputs: int) -> int:
    """Bytes of a packed weight."""
    return -(-outputs // TILE) * sum(section_sizes(kind, inputs))


def unpack(kind: str, packed: Bytes, outputs: int, inputs: int) -> Weight:
    """The numbers of a packed weight, from its bytes (flat uint8, as many as `packed_size` says)."""
    it = KINDS[kind]
    quant_bytes, _ = section_sizes(kind, inputs)
    tiles = packed.reshape(-1, sum(section_sizes(kind, inputs)))
    units = -(-inputs // it.unit)
    blocks = units * (it.unit // 32)
    quants = np.ascontiguousarray(tiles[:, : blocks * it.quants])
    scales = np.ascontiguousarray(tiles[:, quant_bytes : quant_bytes + units * it.scales])
    if kind in ("bf16", "f32"):
        values = from_bf16(quants.view(np.uint16)) if kind == "bf16" else quants.view(np.float32)
        values = values.reshape(len(tiles), -1, TILE).transpose(0, 2, 1).reshape(len(tiles) * TILE, -1)
        return FloatWeight(kind, values[:outputs, :inputs].copy())
    number = _by_output(_vectors(kind, quants.reshape(len(tiles), blocks, it.quants)))
    scale, minimum = _scales(kind, scales.reshape(len(tiles), units, it.scales))
    scale = _by_output(scale)[:outputs]
    return IntegerWeight(
        kind, number[:outputs], scale, None if minimum is None else _by_output(minimum)[:outputs], inputs
    )


def _by_output(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[tiles, n, 16, ...] -> [tiles * 16, n * ...]."""
    moved = np.moveaxis(x, 2, 1)
    return moved.reshape(moved.shape[0] * TILE, -1)


def _vectors(kind: str, quants: Bytes) -> I32:
    """[tiles, blocks, bytes] -> numbers without their offset, int32 [tiles, blocks, 16, 32]."""
    number: npt.NDArray[Any]
    if kind.startswith("q8"):
        number, offset = quants.reshape(*quants.shape[:2], 8, 64), 128
    else:
        low = quants[..., :256].reshape(*quants.shape[:2], 4, 64)
        number = np.concatenate([low & 15, low >> 4], axis=2)
        offset = {"q4_0": 8, "q4_1": 0, "q4_k": 0, "q6_k": 32}[kind]
        if kind == "q6_k":
            high = quants[..., 256:].reshape(*quants.shape[:2], 2, 1, 64)
            shift = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
            number = number | (((high >> shift) & 3) << 4).reshape(number.shape)
    split = number.reshape(*number.shape[:2], 8, TILE, 4).transpose(0, 1, 3, 2, 4)
    return split.reshape(*number.shape[:2], TILE, 32).astype(np.int32) - offset


def _scales(kind: str, raw: Bytes) -> tuple[F32, F32 | None]:
    """[tiles, units, bytes] -> scale and minimum, float32 [tiles, groups, 16]; a minimum is added to a value."""
    shape = (len(raw), -1, TILE)
    if kind == "q8_f":
        both = raw.view(np.float32)
        return both[..., :TILE], both[..., TILE:]
    if kind in ("q4_0", "q8_0", "q4_1", "q8_1"):
        halves = raw.view(np.float16).astype(np.float32)
        return halves[..., :TILE], halves[..., TILE:] if kind.endswith("_1") else None
    d = np.ascontiguousarray(raw[..., :32]).view(np.float16).astype(np.float32)[:, :, None]
    with np.errstate(all="ignore"):
        if kind == "q6_k":
            parts = np.ascontiguousarray(raw[..., 32:]).view(np.int8).reshape(*raw.shape[:2], 16, TILE)
            return (d * parts.astype(np.float32)).reshape(shape), None
        dmin = np.ascontiguousarray(raw[..., 32:64]).view(np.float16).astype(np.float32)[:, :, None]
        parts8 = raw[..., 64:].reshape(*raw.shape[:2], 8, 2, TILE).astype(np.float32)
        return (d * parts8[..., 0, :]).reshape(shape), (-(dmin * parts8[..., 1, :])).reshape(shape)
