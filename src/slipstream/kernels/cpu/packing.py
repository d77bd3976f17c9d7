"""Stored weights -> tiles of the native step (see `kinds`), and back to values.

Nothing is computed on the way but for plain weights that are to be quantised: the packed numbers are the stored ones in
another order, so that the values are the same bits as the checkpoint's. In a block the eight vectors of 64 bytes hold
four neighbouring inputs of each output: byte 4 * o + i of vector j is output o's value of input 4 * j + i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu.kinds import BLOCK, KINDS, OUTPUTS, Kind

PACK_VERSION = 1
"""Part of the names of cached files; it grows when the layout does."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

_PIECE = 1 << 20
"""Stored bytes that are packed at once: temporaries stay small."""
_ZERO_POINT = 0x80

_STORED_BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "BF16": (1, 2),
    "F16": (1, 2),
    "F32": (1, 4),
}
"""Values and bytes of a block as stored."""

Parts = tuple[Array, Array | None]
"""A tile's quants [n, 16, blocks, bytes] and its scales, each byte of a block's rows already in their places."""


def pack(stored: Bytes, form: str, kind_name: str, outputs: int, inputs: int, out: Bytes) -> None:
    """Fill `out` (flat, `Kind.size` bytes) from a weight [outputs, inputs] stored in the checkpoint's format `form`.

    `kind_name` is the format's own kind, or a kind to quantise a plain format to (q8_0 or q4_1). ValueError if the
    stored bytes do not fit the shape.
    """
    kind = KINDS[kind_name]
    block, size = _STORED_BLOCKS[form]
    if inputs % block or stored.size != outputs * (inputs // block) * size:
        raise ValueError(f"{stored.size} bytes of {form} are not {outputs} x {inputs} values")
    if out.size != kind.size(outputs, inputs):
        raise ValueError(f"{kind_name} needs {kind.size(outputs, inputs)} bytes, not {out.size}")
    rows = stored.reshape(outputs, -1)
    tiles = out.reshape(-1, sum(kind.sections(inputs)))
    step = max(1, _PIECE // max(1, rows.shape[1] * OUTPUTS))
    pack_tiles = _packer(form, kind_name)
    with np.errstate(all="ignore"):  # scales of a damaged file may be infinite
        for start in range(0, len(tiles), step):
            piece = rows[start * OUTPUTS : (start + step) * OUTPUTS]
            count = min(step, len(tiles) - start)
            if len(piece) < count * OUTPUTS:
                piece = np.concatenate([piece, np.zeros((count * OUTPUTS - len(piece), rows.shape[1]), np.uint8)])
            pack_tiles(np.ascontiguousarray(piece), kind, inputs, tiles[start : start + count])


def _packer(form: str, kind: str) -> Callable[[Bytes, Kind, int, Bytes], None]:
    if form in ("BF16", "F16", "F32"):
        if kind in ("bf16", "f32"):
            return lambda rows, kind, inputs, out: _pack_plain(rows, form, kind, inputs, out)
        quantise = {"q8_0": _quantise_q8_0, "q4_1": _quantise_q4_1}[kind]
        return lambda rows, kind, inputs, out: _pack_parts(quantise(_floats(rows, form, inputs)), kind, inputs, out)
    split = _SPLITTERS[form]
    return lambda rows, kind, inputs, out: _pack_parts(split(rows), kind, inputs, out)


def _pack_parts(parts: Parts, kind: Kind, inputs: int, out: Bytes) -> None:
    """Put rows' quants [16 n, blocks, bytes] and scales, either [16 n, blocks] columns or ready tiles, into `out`."""
    quants, scales = parts
    tiles, blocks = len(out), kind.blocks(inputs)
    quants_size, _ = kind.sections(inputs)
    words = np.ascontiguousarray(quants).view(np.uint32).reshape(tiles, OUTPUTS, blocks, kind.quants // 64)
    target = out[:, : blocks * kind.quants].view(np.uint32).reshape(tiles, blocks, kind.quants // 64, OUTPUTS)
    target[:] = words.transpose(0, 2, 3, 1)
    out[:, blocks * kind.quants : quants_size] = 0
    assert scales is not None
    flat = np.ascontiguousarray(scales).view(np.uint8).reshape(tiles, -1)
    out[:, quants_size : quants_size + flat.shape[1]] = flat
    out[:, quants_size + flat.shape[1] :] = 0


def _columns(*columns: Array) -> Array:
    """Scales [16 n, groups] of one type, one array after another in each group: [n, groups, arrays, 16]."""
    spread = [column.reshape(-1, OUTPUTS, column.shape[1]).swapaxes(1, 2) for column in columns]
    return np.ascontiguousarray(np.stack(spread, axis=2))


def _blocks(rows: Bytes, form: str) -> Bytes:
    return rows.reshape(len(rows), -1, _STORED_BLOCKS[form][1])


def _half(blocks: Bytes, at: int) -> Array:
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view("<u2")[:, :, 0]


def _split_q4_0(rows: Bytes) -> Parts:
    blocks = _blocks(rows, "Q4_0")
    return blocks[:, :, 2:], _columns(_half(blocks, 0))


def _split_q4_1(rows: Bytes) -> Parts:
    blocks = _blocks(rows, "Q4_1")
    return blocks[:, :, 4:], _columns(_half(blocks, 0), _half(blocks, 2))


def _split_q8_0(rows: Bytes) -> Parts:
    blocks = _blocks(rows, "Q8_0")
    return blocks[:, :, 2:] ^ np.uint8(_ZERO_POINT), _columns(_half(blocks, 0))


def _fifth_bits(high: Bytes, low: Bytes) -> Bytes:
    """[.., 4] bytes of fifth bits and [.., 16] bytes of nibbles -> [.., 32] values."""
    values = np.unpackbits(high, axis=-1, bitorder="little")
    values <<= 4
    values[..., :16] |= low & 15
    values[..., 16:] |= low >> 4
    return values


def _split_q5_0(rows: Bytes) -> Parts:
    blocks = _blocks(rows, "Q5_0")
    return _fifth_bits(blocks[:, :, 2:6], blocks[:, :, 6:]) + np.uint8(_ZERO_POINT - 16), _columns(_half(blocks, 0))


def _split_q5_1(rows: Bytes) -> Parts:
    blocks = _blocks(rows, "Q5_1")
    quants = _fifth_bits(blocks[:, :, 4:8], blocks[:, :, 8:]) + np.uint8(_ZERO_POINT)
    return quants, _columns(_half(blocks, 0), _half(blocks, 2))


def _six_bits(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Scales and minima [rows, super-blocks, 8] of Q4_K and Q5_K, 6-bit numbers in bytes 4 to 15."""
    first, second, third = (blocks[:, :, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 2) & 48)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 2) & 48)], axis=-1)
    return scales, minima


def _nibbles_of_64(packed: Bytes) -> Bytes:
    """[.., 128] bytes, each 32 of them the nibbles of 64 values (low ones first) -> [.., 8, 32] values."""
    chunks = packed.reshape(*packed.shape[:-1], 4, 32)
    return np.stack([chunks & 15, chunks >> 4], axis=-2).reshape(*packed.shape[:-1], 8, 32)


def _halves(values: Bytes) -> Bytes:
    """Nibble values [.., 32] -> [.., 16] bytes: the first half low, the second half high."""
    return np.bitwise_or(values[..., :16], np.left_shift(values[..., 16:], 4), dtype=np.uint8)


def _split_q4_k(rows: Bytes) -> Parts:
    blocks = _blocks(rows, "Q4_K")
    quants = _halves(_nibbles_of_64(np.ascontiguousarray(blocks[:, :, 16:])))
    scales, minima = _six_bits(blocks)
    ends = _columns(_half(blocks, 0), _half(blocks, 2)).view(np.uint8)  # [n, groups, 2, 32]
    tiles, groups = ends.shape[:2]
    own = np.stack([_by_block(scales, tiles), _by_block(minima, tiles)], axis=3)  # [n, groups, 8, 2, 16]
    packed = np.concatenate([ends.reshape(tiles, groups, -1), own.reshape(tiles, groups, -1)], axis=2)
    return quants.reshape(len(rows), -1, 16), packed


def _by_block(values: Array, tiles: int) -> Array:
    """[16 n, groups, blocks] -> [n, groups, blocks, 16]."""
    return values.reshape(tiles, OUTPUTS, *values.shape[1:]).transpose(0, 2, 3, 1)


def _split_q5_k(rows: Bytes) -> Parts:
    blocks = _blocks(rows, "Q5_K")
    bits: Bytes = np.arange(8, dtype=np.uint8)[:, None]
    high = (blocks[:, :, None, 16:48] >> bits & 1) << 4
    quants = (_nibbles_of_64(np.ascontiguousarray(blocks[:, :, 48:])) | high) + np.uint8(_ZERO_POINT)
    scales, minima = _six_bits(blocks)
    d = _half(blocks, 0).view(np.float16).astype(np.float32)[:, :, None] * scales.astype(np.float32)
    m = -(_half(blocks, 2).view(np.float16).astype(np.float32)[:, :, None] * minima.astype(np.float32))
    columns = _columns(d.reshape(len(rows), -1), m.reshape(len(rows), -1))
    return quants.reshape(len(rows), -1, 32), columns


def _split_q6_k(rows: Bytes) -> Parts:
    blocks = _blocks(rows, "Q6_K")
    count = blocks.shape[1]
    chunks = np.ascontiguousarray(blocks[:, :, :128]).reshape(len(rows), count, 2, 64)
    low = np.stack([chunks & 15, chunks >> 4], axis=-2).reshape(len(rows), count, 8, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (np.ascontiguousarray(blocks[:, :, 128:192]).reshape(len(rows), count, 2, 1, 32) >> shifts) & 3
    high = high.reshape(len(rows), count, 8, 2, 4, 4)  # vectors 4a to 4a + 3, four inputs each
    tops = high[..., 0, :] | (high[..., 1, :] << 2) | (high[..., 2, :] << 4) | (high[..., 3, :] << 6)
    quants = np.concatenate([_halves(low), tops.reshape(len(rows), count, 8, 8)], axis=-1)
    ends = _columns(_half(blocks, 208)).view(np.uint8)  # [n, groups, 1, 32]
    tiles = ends.shape[0]
    scales = np.ascontiguousarray(blocks[:, :, 192:208])
    own = _by_block(scales, tiles)  # [n, groups, 16 half blocks, 16]
    packed = np.concatenate([ends.reshape(tiles, count, -1), own.reshape(tiles, count, -1)], axis=2)
    return quants.reshape(len(rows), -1, 24), packed


_SPLITTERS: dict[str, Callable[[Bytes], Parts]] = {
    "Q4_0": _split_q4_0,
    "Q4_1": _split_q4_1,
    "Q5_0": _split_q5_0,
    "Q5_1": _split_q5_1,
    "Q8_0": _split_q8_0,
    "Q4_K": _split_q4_k,
    "Q5_K": _split_q5_k,
    "Q6_K": _split_q6_k,
}


def _floats(rows: Bytes, form: str, inputs: int) -> Floats:
    """Plain rows as float32, inputs filled up to whole blocks with zeros."""
    values = _plain(rows, form)
    return np.pad(values, ((0, 0), (0, -inputs % BLOCK)))


def _plain(rows: Bytes, form: str) -> Floats:
    if form == "BF16":
        return (rows.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return rows.view({"F16": "<f2", "F32": "<f4"}[form]).astype(np.float32, copy=False)


def _quantise_q8_0(values: Floats) -> Parts:
    """Blocks of 32 to int8 by the scale `largest / 127`, which is rounded to float16 before it is used."""
    blocks = values.reshape(len(values), -1, BLOCK)
    scale = np.clip(np.abs(blocks).max(-1) / 127, 0, 65504).astype(np.float16)
    wide = scale.astype(np.float32)[:, :, None]
    ratio = np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide > 0)
    quants = np.clip(np.rint(ratio), -127, 127).astype(np.int8).view(np.uint8)
    return quants ^ np.uint8(_ZERO_POINT), _columns(scale)


def _quantise_q4_1(values: Floats) -> Parts:
    """Blocks of 32 to 0..15 between their least and largest value; scale and minimum are rounded to float16 first."""
    blocks = values.reshape(len(values), -1, BLOCK)
    least = np.clip(blocks.min(-1), -65504, 65504).astype(np.float16)
    low = least.astype(np.float32)
    scale = np.clip((blocks.max(-1) - low) / 15, 0, 65504).astype(np.float16)
    wide = scale.astype(np.float32)[:, :, None]
    ratio = np.divide(blocks - low[:, :, None], wide, out=np.zeros_like(blocks), where=wide > 0)
    quants = np.clip(np.rint(ratio), 0, 15).astype(np.uint8)
    return _halves(quants), _columns(scale, least)


def _pack_plain(rows: Bytes, form: str, kind: Kind, inputs: int, out: Bytes) -> None:
    """Columns of 16 outputs, one for each input."""
    values = rows.view("<u2") if kind.name == "bf16" else _plain(rows, form)
    tiles = out.view(values.dtype).reshape(len(out), -1, OUTPUTS)
    tiles[:, :inputs] = values.reshape(len(out), OUTPUTS, inputs).swapaxes(1, 2)
    tiles[:, inputs:] = 0


def unpack(packed: Bytes, kind_name: str, outputs: int, inputs: int) -> Floats:
    """The values [outputs, inputs] of a packed weight, each rounded to float32 as ggml does."""
    kind = KINDS[kind_name]
    tiles = packed.reshape(-1, sum(kind.sections(inputs)))
    blocks, (quants_size, _) = kind.blocks(inputs), kind.sections(inputs)
    if not kind.integer:
        dtype = np.uint16 if kind_name == "bf16" else np.float32
        columns = tiles.view(dtype).reshape(len(tiles), -1, OUTPUTS).swapaxes(1, 2).reshape(-1, blocks * BLOCK)
        if kind_name == "bf16":
            columns = (columns.astype(np.uint32) << 16).view(np.float32)
        return np.ascontiguousarray(columns[:outputs, :inputs])
    vectors = tiles[:, : blocks * kind.quants].reshape(len(tiles), blocks, kind.quants // 64, OUTPUTS, 4)
    scales = tiles[:, quants_size : quants_size + blocks * kind.scales + blocks // kind.group * kind.shared]
    with np.errstate(all="ignore"):
        values = _values(kind_name, vectors, np.ascontiguousarray(scales), blocks)  # [n, blocks, 8, 16, 4]
    return np.ascontiguousarray(values.transpose(0, 3, 1, 2, 4).reshape(-1, blocks * BLOCK)[:outputs, :inputs])


def _values(kind: str, vectors: Bytes, scales: Bytes, blocks: int) -> Floats:
    tiles = len(vectors)

    def spread(columns: Array) -> Floats:
        """Scales [n, blocks, 16] over the vectors of their blocks."""
        return columns.astype(np.float32)[:, :, None, :, None]

    if kind in ("q4_0", "q4_1", "q4_k"):
        quants = np.concatenate([vectors & 15, vectors >> 4], axis=2).astype(np.float32)
    elif kind == "q6_k":
        low = np.concatenate([vectors[:, :, :4] & 15, vectors[:, :, :4] >> 4], axis=2)
        shifts = np.array([0, 2, 4, 6], np.uint8)[:, None, None]
        high = (vectors[:, :, 4:, None] >> shifts) & 3
        quants = (low | (high.reshape(low.shape) << 4)).astype(np.float32)
    else:
        quants = vectors.astype(np.float32) - _ZERO_POINT
    if kind in ("q4_0", "q8_0"):
        d = scales.view(np.float16).reshape(tiles, blocks, OUTPUTS)
        return (quants - 8 if kind == "q4_0" else quants) * spread(d)
    if kind in ("q4_1", "q8_1", "q8_f"):
        both = scales.view(np.float32 if kind == "q8_f" else np.float16).reshape(tiles, blocks, 2, OUTPUTS)
        return quants * spread(both[:, :, 0]) + spread(both[:, :, 1])
    groups = scales.reshape(tiles, blocks // 8, -1)
    if kind == "q4_k":
        ends = np.ascontiguousarray(groups[:, :, :64]).view(np.float16).reshape(tiles, -1, 1, 2, OUTPUTS)
        own = groups[:, :, 64:].reshape(tiles, -1, 8, 2, OUTPUTS).astype(np.float32)
        products = (ends.astype(np.float32) * own).reshape(tiles, blocks, 2, OUTPUTS)
        return quants * spread(products[:, :, 0]) - spread(products[:, :, 1])
    ends = np.ascontiguousarray(groups[:, :, :32]).view(np.float16).reshape(tiles, -1, 1, OUTPUTS)
    own = groups[:, :, 32:].view(np.int8).reshape(tiles, -1, 16, OUTPUTS).astype(np.float32)
    products = (ends.astype(np.float32) * own).reshape(tiles, blocks, 2, 1, OUTPUTS, 1)
    halves = (quants - 32).reshape(tiles, blocks, 2, 4, OUTPUTS, 4)
    return (halves * products).reshape(quants.shape)
