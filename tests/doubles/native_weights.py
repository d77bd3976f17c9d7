"""Random weights of every kind, and packing them by the layout's description, independently of the package's packer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.ops.native_spec.arithmetic import F32, from_bf16
from slipstream.ops.native_spec.weights import KINDS, packed_size, section_sizes

Array = npt.NDArray[Any]

# Stored numbers of each kind: least, one past the largest, and what is taken off them.
NUMBERS = {
    "q4_0": (0, 16, 8),
    "q4_1": (0, 16, 0),
    "q8_0": (-128, 128, 0),
    "q8_1": (0, 32, 0),
    "q8_f": (0, 32, 0),
    "q4_k": (0, 16, 0),
    "q6_k": (0, 64, 32),
}


@dataclass
class Fields:
    """What a file stores of a weight: numbers [N, K] and the parts of its scales by name, each with outputs first.

    d and m (or dmin) are float16 [N, blocks] ([N, super-blocks] for kinds of 256; float32 for q8_f); sc and mn are the
    small integers of q4_k [N, blocks] and q6_k [N, 2 * blocks]. Float kinds have `numbers` alone, as stored.
    """

    kind: str
    numbers: Array
    scales: dict[str, Array]

    def values(self) -> F32:
        """float32 [N, K], as ggml dequantises."""
        if self.kind == "f32":
            return self.numbers.astype(np.float32)
        if self.kind == "bf16":
            return from_bf16(self.numbers)
        s = {name: part.astype(np.float32) for name, part in self.scales.items()}
        inputs = self.numbers.shape[1]
        n = (self.numbers - NUMBERS[self.kind][2]).astype(np.float32)

        def spread(part: Array, width: int) -> Array:
            return np.repeat(part, width, axis=1)[:, :inputs]

        with np.errstate(all="ignore"):
            if self.kind == "q4_k":
                scale = spread(np.repeat(s["d"], 8, axis=1) * s["sc"], 32)
                return scale * n - spread(np.repeat(s["dmin"], 8, axis=1) * s["mn"], 32)
            if self.kind == "q6_k":
                return spread(np.repeat(s["d"], 16, axis=1) * s["sc"], 16) * n
            y = spread(s["d"], 32) * n
            return y + spread(s["m"], 32) if "m" in s else y


def random_fields(
    rng: np.random.Generator, kind: str, outputs: int, inputs: int, *, size: float = 0.05, wild: bool = False
) -> Fields:
    """Weights whose values are about `size`; `wild` puts zeros, denormals, infinities and NaN among scales."""
    if kind in ("f32", "bf16"):
        values = (rng.normal(size=(outputs, inputs)) * size).astype(np.float32)
        if wild:
            values = sprinkle(rng, values)
        bits = values.view(np.uint32)
        return Fields(kind, values if kind == "f32" else (bits >> 16).astype(np.uint16), {})
    low, high, _ = NUMBERS[kind]
    numbers = rng.integers(low, high, size=(outputs, inputs))
    groups = -(-inputs // KINDS[kind].unit)
    dtype: Any = np.float32 if kind == "q8_f" else np.float16

    def scale(divisor: float) -> Array:
        x = (rng.normal(size=(outputs, groups)) * size / divisor).astype(dtype)
        return sprinkle(rng, x) if wild else x

    scales = {"d": scale(4 if low == 0 else 64)}
    if kind == "q4_k":
        scales = {"d": scale(256), "dmin": scale(256)}
        scales |= {name: rng.integers(0, 64, size=(outputs, groups * 8)) for name in ("sc", "mn")}
    elif kind == "q6_k":
        scales = {"d": scale(2048), "sc": rng.integers(-128, 128, size=(outputs, groups * 16))}
    elif kind in ("q4_1", "q8_1", "q8_f"):
        scales["m"] = scale(2)
    return Fields(kind, numbers, scales)


def sprinkle(rng: np.random.Generator, x: Array, share: float = 0.02) -> Array:
    """`x` with some of its values replaced by extreme ones of its type."""
    limits = np.finfo(x.dtype)
    extreme = np.array(
        [0.0, -0.0, limits.smallest_subnormal, -limits.smallest_normal, limits.max, limits.min, np.inf, -np.inf, np.nan]
    ).astype(x.dtype)
    return np.where(rng.random(x.shape) < share, rng.choice(extreme, size=x.shape), x)


def _fill(x: Array, rows: int, columns: int, value: int = 0) -> Array:
    out = np.full((rows, columns), value, x.dtype)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def _bytes(x: Array) -> Array:
    return np.ascontiguousarray(x).view(np.uint8).reshape(-1)


def pack(fields: Fields) -> npt.NDArray[np.uint8]:
    """The packed bytes, tile by tile and block by block."""
    kind, (outputs, inputs) = fields.kind, fields.numbers.shape
    unit = KINDS[kind].unit
    width = -(-inputs // unit) * unit
    tiles = -(-outputs // 16)
    stored = fields.numbers + 128 if kind == "q8_0" else fields.numbers
    if kind in ("q8_1", "q8_f"):
        stored = stored + 128
    numbers = _fill(stored, tiles * 16, width)
    scales = {name: _fill(part, tiles * 16, part.shape[1]) for name, part in fields.scales.items()}
    quant_bytes, scale_bytes = section_sizes(kind, inputs)
    out = []
    for tile in range(tiles):
        mine = slice(16 * tile, 16 * tile + 16)
        if kind in ("f32", "bf16"):
            out.append(_bytes(numbers[mine].T))
            continue
        quants = [_quants(kind, numbers[mine, 32 * b : 32 * b + 32]) for b in range(width // 32)]
        parts = [_scales(kind, {k: v[mine] for k, v in scales.items()}, u) for u in range(width // unit)]
        for section, size in ((quants, quant_bytes), (parts, scale_bytes)):
            joined = np.concatenate(section)
            out.append(np.concatenate([joined, np.zeros(size - joined.size, np.uint8)]))
    packed = np.concatenate(out)
    assert packed.size == packed_size(kind, outputs, inputs)
    return packed


def _quants(kind: str, block: Array) -> Array:
    """[16, 32] stored numbers -> bytes."""
    vectors = np.zeros((8, 64), np.uint8)
    for j in range(8):
        for i in range(4):
            vectors[j, i::4] = block[:, 4 * j + i]
    if kind.startswith("q8"):
        return vectors.reshape(-1)
    low = [(vectors[i] & 15) | ((vectors[i + 4] & 15) << 4) for i in range(4)]
    if kind != "q6_k":
        return np.concatenate(low)
    high = [sum((vectors[4 * a + c] >> 4) << (2 * c) for c in range(4)) for a in range(2)]
    return np.concatenate([*low, *high]).astype(np.uint8)


def _scales(kind: str, scales: dict[str, Array], unit: int) -> Array:
    """The scales of one block, or of a super-block of 256 -> bytes."""
    dtype: Any = np.float32 if kind == "q8_f" else np.float16
    out = [_bytes(scales[name][:, unit].astype(dtype)) for name in ("d", "m", "dmin") if name in scales]
    for b in range(8 * unit, 8 * unit + 8):
        if kind == "q4_k":
            out += [scales[name][:, b].astype(np.uint8) for name in ("sc", "mn")]
        elif kind == "q6_k":
            out += [_bytes(scales["sc"][:, 2 * b + h].astype(np.int8)) for h in (0, 1)]
    return np.concatenate(out)
