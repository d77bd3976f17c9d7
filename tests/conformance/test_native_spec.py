"""The definition of the native numerics against exact fractions, float64 and the formulas that it stands for."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from doubles.native_weights import pack, random_fields
from slipstream.kernels.cpu.kinds import KIND_OF_FORMAT
from slipstream.kernels.cpu.packing import pack as package_pack
from slipstream.loading.gguf_blocks import FORMATS, dequantize
from slipstream.ops.native_spec import arithmetic, attention, moe, rows
from slipstream.ops.native_spec.cache import Pages, page_bytes
from slipstream.ops.native_spec.linear import linear
from slipstream.ops.native_spec.quantise import quantise, to_int8
from slipstream.ops.native_spec.weights import KINDS, FloatWeight, IntegerWeight, packed_size, unpack

F32 = np.float32
any_bits = st.integers(0, 2**32 - 1).map(lambda bits: np.array([bits], np.uint32).view(F32)[0])
near_one = st.integers(0x3F000000, 0x40800000).map(lambda bits: np.array([bits], np.uint32).view(F32)[0])
seeds = st.integers(0, 2**32 - 1)


def rounded(value: Fraction) -> np.float32:
    """Nearest float32 of an exact value, ties to even, by comparing the neighbours."""
    guess = F32(0) if value == 0 else F32(float(value)) if abs(value) < Fraction(2) ** 200 else F32(np.inf)
    if abs(value) >= Fraction(2) ** 128 - Fraction(2) ** 103:
        return F32(math.copysign(math.inf, value))
    best = [guess, np.nextafter(guess, F32(-np.inf)), np.nextafter(guess, F32(np.inf))]
    best = [x for x in best if np.isfinite(x)]
    even = {float(x): int(np.array(x).view(np.uint32)) & 1 for x in best}
    return min(best, key=lambda x: (abs(Fraction(float(x)) - value), even[float(x)]))


@settings(max_examples=300, deadline=None)
@given(any_bits | near_one, any_bits | near_one, any_bits | near_one)
def test_fma_rounds_once(a: np.float32, b: np.float32, c: np.float32) -> None:
    check_fma(a, b, c)


def check_fma(a: np.float32, b: np.float32, c: np.float32) -> None:
    got = arithmetic.fma(a, b, c)[()]
    if not (np.isfinite(a) and np.isfinite(b) and np.isfinite(c)):
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(got, F32(np.float64(a) * np.float64(b) + np.float64(c)))
        return
    want = rounded(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))
    assert got == want, (a, b, c)


@settings(max_examples=300, deadline=None)
@given(near_one, near_one, st.integers(-3, 3), st.integers(0, 40))
def test_fma_at_ties(a: np.float32, b: np.float32, steps: int, shift: int) -> None:
    """c close to minus a * b, or a power of two away: where a product rounded first would show."""
    c = F32(-(float(a) * float(b)))
    for _ in range(abs(steps)):
        c = np.nextafter(c, F32(math.copysign(100.0, steps)))
    check_fma(a, b, c)
    check_fma(a, b, F32(float(c) * 2.0**shift))
    check_fma(F32(float(a) * 2.0**-75), F32(float(b) * 2.0**-70), F32(float(c) * 2.0 ** (-146 + shift % 4)))


@settings(max_examples=200, deadline=None)
@given(st.floats(-1e6, 1e6, allow_subnormal=False), st.floats(-4, 4), st.floats(-1e6, 1e6))
def test_fma64_rounds_once(a: float, b: float, c: float) -> None:
    if any(0 < abs(x) < 1e-100 for x in (a, b, c)):
        return
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    assert float(arithmetic.fma64(a, b, c)) == exact.numerator / exact.denominator


@given(st.floats(-87.25, 88.0, width=32))
@example(0.0)
@example(-0.0)
@settings(deadline=None)
def test_exp_is_within_a_few_units(x: float) -> None:
    got = float(arithmetic.exp(np.array([x], F32))[0])
    assert abs(got - math.exp(x)) <= 3 * 2**-24 * math.exp(x)


def test_exp_at_its_ends() -> None:
    x = np.array([np.nan, -np.inf, -87.34, -87.33654, 0.0, 88.02969, 90.0, np.inf], F32)
    got = arithmetic.exp(x)
    assert np.isnan(got[0])
    assert list(got[1:3]) == [0, 0]
    assert got[4] == 1
    assert 0 < got[3] < 1.2e-38
    assert got[5] == got[6] == got[7] > 1.7e38


@given(seeds, st.integers(1, 200))
@settings(deadline=None)
def test_lanes_sum_is_a_sum(seed: int, n: int) -> None:
    x = np.random.default_rng(seed).normal(size=(3, n)).astype(F32)
    bound = 1e-5 * np.abs(x).sum(-1)
    assert (np.abs(arithmetic.lanes_sum(x) - x.astype(np.float64).sum(-1)) <= bound).all()
    square = (x.astype(np.float64) ** 2).sum(-1)
    assert (np.abs(arithmetic.lanes_sum(x, squares=True) - square) <= 1e-5 * square).all()


@given(any_bits)
@settings(max_examples=300, deadline=None)
def test_bf16_is_the_nearest(x: np.float32) -> None:
    got = arithmetic.from_bf16(arithmetic.to_bf16(np.array([x])))[0]
    if np.isnan(x):
        assert np.isnan(got)
        return
    other = [
        arithmetic.from_bf16(np.array([(int(np.array(x).view(np.uint32)) >> 16) + i], np.uint16))[0] for i in (0, 1)
    ]
    if np.isinf(x):
        assert got == x
    elif np.isinf(other[1]):
        assert got in other
    else:
        assert abs(float(got) - float(x)) == min(abs(float(o) - float(x)) for o in other)


def test_bf16_ties_go_to_even() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F80FFFF, 0x7F7FFFFF], np.uint32)
    assert list(arithmetic.to_bf16(bits.view(F32))) == [0x3F80, 0x3F82, 0x3F81, 0x7F80]


@given(seeds, st.integers(1, 100), st.integers(-36, 36))
@settings(deadline=None)
def test_quantised_rows_are_close(seed: int, width: int, exponent: int) -> None:
    x = (np.random.default_rng(seed).normal(size=(2, width)) * 10.0**exponent).astype(F32)
    got = quantise(x)
    back = (got.q.reshape(2, -1, 32).astype(np.float64) * got.scale[..., None].astype(np.float64)).reshape(2, -1)
    step = np.repeat(got.scale, 32, axis=1)[:, :width]
    with np.errstate(invalid="ignore"):
        assert (np.abs(back[:, :width] - x) <= 0.501 * step + 1e-30).all()
    assert not got.q[:, width:].any()
    np.testing.assert_array_equal(got.neg8h.reshape(2, -1, 2).sum(-1), got.neg8)


def test_quantised_rows_of_special_values() -> None:
    x = np.zeros((1, 128), F32)
    x[0, 0], x[0, 33], x[0, 65] = 9e-31, np.inf, np.nan
    x[0, 96:] = np.linspace(-1, 1, 32)
    got = quantise(x)
    assert got.scale[0, 0] == 0
    assert np.isnan(got.scale[0, 1:3]).all()
    assert np.isnan(got.fsum[0, 1:3]).all()
    assert not got.q[0, :96].any()
    assert got.q[0, 96] == -127
    assert got.q[0, 127] == 127


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 32), (16, 256), (37, 96), (40, 50)])
def test_packed_weights_read_back(kind: str, shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    if KINDS[kind].unit == 256:
        inputs = -(-inputs // 256) * 256
    fields = random_fields(np.random.default_rng(outputs), kind, outputs, inputs)
    packed = pack(fields)
    assert packed.size == packed_size(kind, outputs, inputs)
    weight = unpack(kind, packed, outputs, inputs)
    np.testing.assert_array_equal(weight.dequantised(), fields.values())


READABLE = {fmt.name: fmt for fmt in FORMATS.values() if fmt.name in KIND_OF_FORMAT}


@pytest.mark.parametrize("name", READABLE)
@given(seed=seeds, outputs=st.integers(1, 40), blocks=st.integers(1, 3))
@settings(max_examples=8, deadline=None)
def test_the_package_packs_as_defined(name: str, seed: int, outputs: int, blocks: int) -> None:
    """Stored bytes of any content, packed and read by the definition, give the values that the file stands for."""
    fmt, kind = READABLE[name], KIND_OF_FORMAT[name]
    inputs = blocks * max(fmt.block, 32)
    stored = np.random.default_rng(seed).integers(256, size=outputs * inputs // fmt.block * fmt.size).astype(np.uint8)
    packed = np.zeros(packed_size(kind, outputs, inputs), np.uint8)
    package_pack(stored, name, kind, outputs, inputs, packed)
    want = np.zeros((outputs, inputs), F32)
    dequantize(stored, fmt, want)
    np.testing.assert_array_equal(unpack(kind, packed, outputs, inputs).dequantised(), want)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=seeds, outputs=st.integers(1, 40), blocks=st.integers(1, 5))
@settings(max_examples=8, deadline=None)
def test_products_are_close_to_float64(kind: str, seed: int, outputs: int, blocks: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = blocks * KINDS[kind].unit
    weight = unpack(kind, pack(random_fields(rng, kind, outputs, inputs)), outputs, inputs)
    x = rng.normal(size=(3, inputs)).astype(F32)
    q = quantise(x)
    exact = x.astype(np.float64)
    if isinstance(weight, IntegerWeight):
        exact = q.q.astype(np.float64) * np.repeat(q.scale, 32, axis=1)
    want = exact @ weight.dequantised().T.astype(np.float64)
    got = linear(x if isinstance(weight, FloatWeight) else q, weight)
    size = np.abs(exact) @ np.abs(weight.dequantised().T.astype(np.float64))
    assert (np.abs(got - want) <= 3e-6 * size + 1e-6).all()


@given(seed=seeds, width=st.sampled_from([16, 40, 64, 576]))
@settings(max_examples=20, deadline=None)
def test_norm_and_rope(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = (rng.normal(size=size).astype(F32) for size in ((3, 2 * width), width))
    parts = x.reshape(3, 2, width).astype(np.float64)
    want = weight * parts / np.sqrt((parts**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(rows.norm(x, weight, 1e-5, 2).reshape(want.shape), want, rtol=1e-5, atol=1e-6)
    position = rng.integers(0, 1 << 17, 3).astype(np.int32)
    frequency = (10000.0 ** (-np.arange(width // 2) / width)).astype(F32)
    table = rows.rope_table(position, frequency, 1.5)
    angle = (position.astype(F32)[:, None] * frequency).astype(np.float64)
    both = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(F32) * F32(1.5)
    np.testing.assert_array_max_ulp(table, both, 1)
    turned = rows.rope(x, table, 2, width).reshape(3, 2, 2, width // 2)
    complex_ = (parts[..., : width // 2] + 1j * parts[..., width // 2 :]) * 1.5 * np.exp(1j * angle)[:, None]
    np.testing.assert_allclose(turned[:, :, 0] + 1j * turned[:, :, 1], complex_, atol=1e-4)


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@given(
    seed=seeds, tokens=st.sampled_from([16, 64, 128]), length=st.integers(1, 300), window=st.sampled_from([0, 1, 50])
)
@settings(max_examples=12, deadline=None)
def test_attention_is_softmax_attention(kind: str, seed: int, tokens: int, length: int, window: int) -> None:
    rng = np.random.default_rng(seed)
    heads, groups, width = 4, 2, 16
    table = rng.permutation(np.arange(1, 24, dtype=np.int32))[None, : -(-length // tokens)]
    pages = Pages(kind, groups, width, tokens, np.zeros(24 * page_bytes(kind, groups, width, tokens), np.uint8))
    slot = table[0, np.arange(length) // tokens] * tokens + np.arange(length) % tokens
    pages.write(*(rng.normal(size=(length, groups * width)).astype(F32) for _ in "kv"), slot.astype(np.int32))
    keys, values, key_scales, value_scales = (x.astype(np.float64) for x in pages.read(slot))
    keys, values = keys * key_scales[..., None], values * value_scales[..., None]
    query = rng.normal(size=(1, heads * width)).astype(F32)
    got = attention.attend(
        query, pages, table, np.zeros(1, np.int32), np.array([length - 1], np.int32), heads, 0.25, window
    )
    first = max(0, length - window) if window else 0
    split = query.reshape(groups, heads // groups, width).astype(np.float64) * 0.25
    score = np.einsum("gmd,ngd->gmn", split, keys[first:])
    e = np.exp(score - score.max(-1, keepdims=True))
    want = np.einsum("gmn,ngd->gmd", e / e.sum(-1, keepdims=True), values[first:])
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-4, atol=2e-6)


@given(seed=seeds)
@settings(max_examples=10, deadline=None)
def test_int8_keys_are_as_close_as_eight_bits(seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(5, 64)).astype(F32)
    q, scale = to_int8(x)
    assert (np.abs(q * scale[:, None] - x) <= 0.501 * scale[:, None]).all()


@given(seed=seeds, experts=st.integers(2, 20), renormalise=st.booleans())
@settings(max_examples=20, deadline=None)
def test_shares_of_experts(seed: int, experts: int, renormalise: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(-2, 3, size=(4, experts)).astype(F32)  # with ties
    top_k = int(rng.integers(1, experts + 1))
    chosen, share = moe.shares(logits, top_k, renormalise)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    for row in range(4):
        best = sorted(range(experts), key=lambda e: (-logits[row, e], e))[:top_k]
        assert list(chosen[row]) == sorted(best)
        want = p[row, sorted(best)]
        np.testing.assert_allclose(share[row], want / want.sum() if renormalise else want, rtol=1e-5)
