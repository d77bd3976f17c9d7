"""Every block format gives the bits of the gguf package's own numpy code."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.errors import LoadError
from slipstream.loading import gguf_blocks
from slipstream.loading.gguf_blocks import FORMATS, Format, dequantize, readable_names

READABLE = [fmt for fmt in FORMATS.values() if fmt.readable]
# Byte positions of the float16 scales in a block, where odd values are planted.
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
ODD_HALVES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE01)


def same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


def oracle(raw: np.ndarray, fmt: Format) -> np.ndarray:
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(raw.reshape(-1, fmt.size), gguf.GGMLQuantizationType[fmt.name])
    return np.asarray(values, np.float32).reshape(-1)


def ours(raw: np.ndarray, fmt: Format) -> np.ndarray:
    out = np.full(len(raw) // fmt.size * fmt.block, 7.0, np.float32)
    dequantize(raw, fmt, out)
    return out


@pytest.mark.parametrize("fmt", READABLE, ids=lambda fmt: fmt.name)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 70), odd=st.lists(st.sampled_from(ODD_HALVES)))
def test_random_bytes_give_the_oracles_bits(fmt: Format, seed: int, blocks: int, odd: list[int]) -> None:
    raw = np.random.default_rng(seed).integers(0, 256, blocks * fmt.size, np.uint8)
    rows = raw.reshape(blocks, fmt.size)
    if fmt.block > 1:
        for row, value in zip(rows, odd, strict=False):
            for at in SCALES.get(fmt.name, (0,)):
                row[at : at + 2] = value & 255, value >> 8
    same_bits(ours(raw, fmt), oracle(raw, fmt))


@pytest.mark.parametrize("fmt", [f for f in READABLE if f.block == 1 and f.size == 2], ids=lambda fmt: fmt.name)
def test_all_16_bit_floats(fmt: Format) -> None:
    raw = np.arange(65536, dtype="<u2").view(np.uint8)
    same_bits(ours(raw, fmt), oracle(raw, fmt))


@pytest.mark.parametrize("fmt", READABLE, ids=lambda fmt: fmt.name)
def test_pieces_join_without_a_seam(fmt: Format) -> None:
    blocks = 2 * gguf_blocks._PIECE // fmt.block + 3
    raw = np.random.default_rng(1).integers(0, 256, blocks * fmt.size, np.uint8)
    same_bits(ours(raw, fmt), oracle(raw, fmt))


def test_a_read_only_unaligned_source_is_fine() -> None:
    fmt = FORMATS[8]
    raw = np.random.default_rng(2).integers(0, 256, 4 * fmt.size + 1, np.uint8)[1:]
    raw.flags.writeable = False
    same_bits(ours(raw, fmt), oracle(raw, fmt))


def test_the_table_agrees_with_the_package() -> None:
    for number, fmt in FORMATS.items():
        if fmt.name == "Q8_1":  # ggml shrank it to two halves and 32 bytes; the package kept the old size
            continue
        kind = gguf.GGMLQuantizationType(number)
        assert (fmt.name, fmt.block, fmt.size) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
    assert {int(kind) for kind in gguf.GGMLQuantizationType} == set(FORMATS)


def test_an_unreadable_format_is_refused_with_the_list() -> None:
    with pytest.raises(LoadError, match=r"IQ2_XS .*F32, F16.*Q6_K"):
        dequantize(np.zeros(74, np.uint8), FORMATS[17], np.zeros(256, np.float32))
    assert readable_names().count(",") == 10


def test_a_wrong_output_size_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fill"):
        dequantize(np.zeros(34, np.uint8), FORMATS[8], np.zeros(64, np.float32))
