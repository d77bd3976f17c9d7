"""Packed weights hold the checkpoint's values, bit for bit, whatever the format and the shape."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.kernels.cpu.kinds import KIND_OF_FORMAT, KINDS
from slipstream.kernels.cpu.packing import pack, unpack
from slipstream.loading.gguf_blocks import FORMATS, dequantize

FORMAT_BY_NAME = {form.name: form for form in FORMATS.values()}
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}
HALVES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def stored(name: str, outputs: int, inputs: int, seed: int) -> np.ndarray:
    """Random bytes of a format; scales are finite, plain values too."""
    chooser = np.random.default_rng(seed)
    if name in ("F32", "F16"):
        return chooser.normal(size=outputs * inputs).astype({"F32": "<f4", "F16": "<f2"}[name]).view(np.uint8)
    if name == "BF16":
        wide = chooser.normal(size=outputs * inputs).astype(np.float32).view(np.uint32)
        return (wide >> 16).astype("<u2").view(np.uint8)
    form = FORMAT_BY_NAME[name]
    blocks = chooser.integers(0, 256, (outputs * inputs // form.block, form.size), dtype=np.uint8)
    for at in HALVES[name]:
        scales = chooser.normal(size=len(blocks)).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(-1)


def values(raw: np.ndarray, name: str, outputs: int, inputs: int) -> np.ndarray:
    out = np.empty((outputs, inputs), np.float32)
    dequantize(raw, FORMAT_BY_NAME[name], out)
    return out


def packed(raw: np.ndarray, name: str, kind: str, outputs: int, inputs: int) -> np.ndarray:
    # What was in the memory before must not matter.
    out = np.full(KINDS[kind].size(outputs, inputs), 0xEE, np.uint8)
    pack(raw, name, kind, outputs, inputs, out)
    return out


@pytest.mark.parametrize("name", KIND_OF_FORMAT)
@settings(max_examples=25, deadline=None)
@given(outputs=st.integers(1, 70), blocks=st.integers(1, 5), odd=st.integers(0, 31), seed=st.integers(0, 99))
def test_packed_values_are_the_stored_ones(name: str, outputs: int, blocks: int, odd: int, seed: int) -> None:
    block = FORMAT_BY_NAME[name].block
    inputs = blocks * 32 + odd if block == 1 else blocks * block
    raw = stored(name, outputs, inputs, seed)
    found = unpack(packed(raw, name, KIND_OF_FORMAT[name], outputs, inputs), KIND_OF_FORMAT[name], outputs, inputs)
    np.testing.assert_array_equal(found.view(np.uint32), values(raw, name, outputs, inputs).view(np.uint32))


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "BF16"])
def test_large_weights_are_packed_in_pieces(name: str) -> None:
    outputs, inputs = 4100, 1024
    raw = stored(name, outputs, inputs, 1)
    kind = KIND_OF_FORMAT[name]
    found = unpack(packed(raw, name, kind, outputs, inputs), kind, outputs, inputs)
    np.testing.assert_array_equal(found, values(raw, name, outputs, inputs))


@pytest.mark.parametrize("kind", KINDS)
@given(outputs=st.integers(1, 50), inputs=st.integers(1, 600))
def test_sections_are_aligned(kind: str, outputs: int, inputs: int) -> None:
    quants, scales = KINDS[kind].sections(inputs)
    assert quants % 64 == scales % 64 == 0
    assert KINDS[kind].size(outputs, inputs) % 64 == 0


def test_the_layout_of_a_block() -> None:
    """Byte 4 * o + i of vector j is output o's value of input 4 * j + i."""
    weights = np.arange(16 * 64, dtype=np.int64).reshape(16, 64) % 251 - 125
    raw = np.zeros((16, 2, 34), np.uint8)
    raw[:, :, :2] = np.float16(1).reshape(1).view(np.uint8)
    raw[:, :, 2:] = weights.astype(np.int8).view(np.uint8).reshape(16, 2, 32)
    out = packed(raw.reshape(-1), "Q8_0", "q8_0", 16, 64)
    for output, at in ((0, 0), (3, 5), (15, 63), (9, 33)):
        block, inner = divmod(at, 32)
        where = block * 512 + inner // 4 * 64 + 4 * output + inner % 4
        assert int(out[where]) - 128 == weights[output, at]


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(("kind", "steps"), [("q8_0", 254), ("q4_1", 15)])
@settings(max_examples=25, deadline=None)
@given(outputs=st.integers(1, 40), inputs=st.integers(1, 100), seed=st.integers(0, 99))
def test_quantised_values_are_within_half_a_step(
    name: str, kind: str, steps: int, outputs: int, inputs: int, seed: int
) -> None:
    raw = stored(name, outputs, inputs, seed)
    wanted = values(raw, name, outputs, inputs)
    found = unpack(packed(raw, name, kind, outputs, inputs), kind, outputs, inputs)
    for start in range(0, inputs, 32):
        block = wanted[:, start : start + 32]
        if block.shape[1] < 32:  # filled up with zeros
            block = np.pad(block, ((0, 0), (0, 1)))
        span = 2 * np.abs(block).max(-1) if kind == "q8_0" else block.max(-1) - block.min(-1)
        error = np.abs(found[:, start : start + 32] - wanted[:, start : start + 32]).max(-1)
        # Half a step, and what rounding scale and minimum to float16 takes away.
        assert (error <= span / steps * 0.51 + np.abs(block).max(-1) / 500).all()


def test_a_weight_of_zeros_stays_zero() -> None:
    raw = np.zeros(16 * 32 * 4, np.uint8)
    for kind in ("q8_0", "q4_1", "f32"):
        assert not unpack(packed(raw, "F32", kind, 16, 32), kind, 16, 32).any()


def test_bytes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="are not 16 x 32"):
        pack(np.zeros(100, np.uint8), "Q4_0", "q4_0", 16, 32, np.zeros(KINDS["q4_0"].size(16, 32), np.uint8))
    with pytest.raises(ValueError, match="needs"):
        pack(np.zeros(16 * 18, np.uint8), "Q4_0", "q4_0", 16, 32, np.zeros(64, np.uint8))
