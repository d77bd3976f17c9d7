"""The sampling noise: fixed integers, uniform, independent over tokens, positions, choices and seeds, Gumbel in law."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from slipstream.ops.noise import gumbel_of_hash
from slipstream.ops.sample_cpu import _hash
from slipstream.sampling.noise import choice_key, gumbel, row_key, splitmix64, token_hash

RECORDED_KEY = (923814918, 2508111837)
RECORDED_HASHES = [408472188, 1603130836, 3546113733, 3390154440]
TOKENS = 4096
ROWS = 256


def hashes(keys: list[tuple[int, int]], tokens: int = TOKENS) -> np.ndarray:
    """[rows, tokens] in [0, 1)."""
    key0, key1 = (torch.tensor(half)[:, None] for half in zip(*keys, strict=True))
    return token_hash(key0, key1, torch.arange(tokens)).numpy() / 2.0**32


def keys_along(axis: str) -> list[tuple[int, int]]:
    if axis == "position":
        return [row_key(choice_key(1234, 0), position) for position in range(ROWS)]
    if axis == "choice":
        return [row_key(choice_key(1234, choice), 17) for choice in range(ROWS)]
    if axis == "seed":
        return [row_key(choice_key(seed, 0), 17) for seed in range(ROWS)]
    if axis == "diagonal":
        return [row_key(choice_key(step, ROWS - step), step) for step in range(ROWS)]
    return [row_key(choice_key(1 << bit, 0), 17) for bit in range(64)] + [row_key(choice_key(0, 0), 17)]


AXES = ["position", "choice", "seed", "diagonal", "seed bit"]


def test_the_integers_are_fixed() -> None:
    """Recorded outputs: changing them changes what every seed produces."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF  # the first output of the published generator from state 0
    assert row_key(choice_key(42, 0), 7) == RECORDED_KEY
    key0, key1 = (torch.tensor(half) for half in RECORDED_KEY)
    assert token_hash(key0, key1, torch.tensor([0, 1, 2, 49151])).tolist() == RECORDED_HASHES


def test_seeds_are_taken_modulo_64_bits() -> None:
    assert choice_key(-1, 0) == choice_key(2**64 - 1, 0)
    assert choice_key(-1, 0) != choice_key(1, 0)


def test_32_bit_arithmetic_gives_the_same_integers() -> None:
    ids = np.arange(50000)
    for key0, key1 in [*keys_along("position")[:8], (0, 0), (2**32 - 1, 2**32 - 1)]:
        want = token_hash(torch.tensor(key0), torch.tensor(key1), torch.from_numpy(ids))
        assert np.array_equal(_hash(ids, [0, key0, key1]), want.numpy())


def test_no_two_tokens_of_a_row_share_a_hash() -> None:
    key0, key1 = row_key(choice_key(3, 0), 0)
    assert len(token_hash(torch.tensor(key0), torch.tensor(key1), torch.arange(2**20)).unique()) == 2**20


@pytest.mark.parametrize("axis", AXES)
def test_uniform_along_tokens_and_along_rows(axis: str) -> None:
    values = hashes(keys_along(axis))
    assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-4
    # Each row and each token's column alone; the p-values of many true tests are uniform again.
    for lines in (values, values.T[:256]):
        p_values = [stats.kstest(line, "uniform").pvalue for line in lines]
        assert stats.kstest(p_values, "uniform").pvalue > 1e-4
    low_bits = (values * 2.0**32).astype(np.int64) & 255
    assert stats.chisquare(np.bincount(low_bits.ravel(), minlength=256)).pvalue > 1e-4


@pytest.mark.parametrize("axis", AXES)
def test_no_correlation_between_rows_or_between_tokens(axis: str) -> None:
    """Of n pairs of samples of size m, the largest |correlation| is near sqrt(2 log n / m)."""
    values = hashes(keys_along(axis))
    for lines in (values, values.T[:256]):
        pairs = len(lines) * (len(lines) - 1) // 2
        limit = math.sqrt(2 * math.log(pairs * 1e4) / lines.shape[1])
        off_diagonal = np.corrcoef(lines) - np.eye(len(lines))
        assert np.abs(off_diagonal).max() < limit


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 256])
def test_neighbouring_tokens_and_rows_are_independent(lag: int) -> None:
    values = hashes(keys_along("position"))
    for first, second in [(values[:, lag:], values[:, :-lag]), (values[lag:], values[:-lag])]:
        if first.size:
            cells = (first * 16).astype(int) * 16 + (second * 16).astype(int)
            assert stats.chisquare(np.bincount(cells.ravel(), minlength=256)).pvalue > 1e-4


def test_every_bit_of_seed_position_and_token_moves_half_of_the_bits() -> None:
    def bits(seed: int, position: int, token: int) -> int:
        key0, key1 = row_key(choice_key(seed, 0), position)
        return int(token_hash(torch.tensor(key0), torch.tensor(key1), torch.tensor(token)))

    rng = np.random.default_rng(0)
    for place, width in [(0, 64), (1, 20), (2, 18)]:
        flips = np.zeros((width, 32))
        for _ in range(40):
            start = [int(rng.integers(2**63)), int(rng.integers(2**20)), int(rng.integers(2**18))]
            base = bits(*start)
            for bit in range(width):
                moved = list(start)
                moved[place] ^= 1 << bit
                difference = base ^ bits(*moved)
                flips[bit] += [(difference >> out) & 1 for out in range(32)]
        assert abs(flips.mean() / 40 - 0.5) < 0.03
        assert flips.mean(axis=1).min() / 40 > 0.35


def test_gumbel_in_law() -> None:
    key0, key1 = (torch.tensor(half)[:, None] for half in zip(*keys_along("position"), strict=True))
    values = gumbel(key0, key1, torch.arange(TOKENS)).double().numpy().ravel()
    size = len(values)
    assert stats.kstest(values, "gumbel_r").pvalue > 1e-4
    assert abs(values.mean() - np.euler_gamma) < 5 * math.pi / math.sqrt(6 * size)
    assert values.var() == pytest.approx(math.pi**2 / 6, rel=5 * math.sqrt(4.4 / size))
    assert stats.skew(values) == pytest.approx(1.1395, rel=0.03)


def test_the_tail_is_fine_and_bounded() -> None:
    small = torch.tensor([0, 1, 2, 3, 100, 10**6])
    exact = [-math.log(-math.log1p(-(h + 0.5) / 2**32)) for h in small.tolist()]
    torch.testing.assert_close(
        gumbel_of_hash(small).double(), torch.tensor(exact, dtype=torch.float64), rtol=1e-6, atol=0
    )
    ends = gumbel_of_hash(torch.tensor([0, 2**32 - 1]))
    assert ends[0].item() == pytest.approx(33 * math.log(2), rel=1e-6)
    assert ends[1].item() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)
    ladder = gumbel_of_hash(torch.arange(0, 2**32, 65537))
    assert torch.isfinite(ladder).all()
    assert (ladder.diff() <= 0).all()
