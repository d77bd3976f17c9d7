"""Every rule and mixes of rules: 100,000 draws against probabilities from an oracle that shares no code with them.

Rows are written by `SequenceSampler` (with drafted tokens) and drawn by the op at 100,000 positions. The seeds are
fixed, so the outcome is too. Samplers that are wrong on purpose must fail the same check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from doubles.native_samplers import isas, native_op
from slipstream.core.sampling_params import SamplingParams
from slipstream.ops.registry import OPS
from slipstream.ops.sample import Real, Whole, _filter, _penalise, sample
from slipstream.sampling.batch import SamplingBatch
from slipstream.sampling.noise import choice_key, row_key
from slipstream.sampling.state import SequenceSampler

VOCAB = 50
DRAWS = 100_000
CHUNK = 2_000
EOS = 49
FINE = 1e-3
WRONG = 1e-6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are small: a second thread would only wait for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Case:
    """Parameters of a request and the tokens before the draw."""

    params: dict[str, Any]
    prompt: list[int] = field(default_factory=lambda: [3, 3, 11])
    output: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)


def logits() -> np.ndarray:
    return (np.random.default_rng(11).normal(size=VOCAB) * 1.5).astype(np.float32)


# The oracle: plain float64, one token list at a time.


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def fewest(p: np.ndarray, order: list[int], mass: float) -> list[int]:
    chosen: list[int] = []
    total = 0.0
    for token in order:
        if total >= mass:
            break
        chosen.append(token)
        total += p[token]
    return chosen


def only(p: np.ndarray, tokens: list[int]) -> np.ndarray:
    q = np.zeros_like(p)
    q[tokens] = p[tokens]
    return q / q.sum()


def edited(x: np.ndarray, case: Case) -> np.ndarray:
    """Logits after masks, bias and penalties."""
    par = case.params
    output = case.output + case.drafted
    for token in range(VOCAB):
        if "allowed_token_ids" in par and token not in par["allowed_token_ids"]:
            x[token] = -np.inf
        if len(output) < par.get("min_tokens", 0) and token in [EOS, *par.get("stop_token_ids", [])]:
            x[token] = -np.inf
        for word in case.bad_words:
            if word[-1] == token and output[len(output) - len(word) + 1 :] == word[:-1]:
                x[token] = -np.inf
        x[token] += par.get("logit_bias", {}).get(token, 0.0)
        if token in output or token in case.prompt:
            factor = par.get("repetition_penalty", 1.0)
            x[token] = x[token] * factor if x[token] < 0 else x[token] / factor
        x[token] -= par.get("frequency_penalty", 0.0) * output.count(token)
        x[token] -= par.get("presence_penalty", 0.0) * (token in output)
    return x


def expected(case: Case) -> np.ndarray:
    """Probabilities [VOCAB] of the next token."""
    par = case.params
    x = edited(logits().astype(np.float64), case)
    if par.get("temperature", 1.0) == 0:
        return np.eye(VOCAB)[int(np.argmax(x))]
    p = softmax(x / par.get("temperature", 1.0))
    by_probability = sorted(range(VOCAB), key=lambda token: -p[token])
    if par.get("top_k", 0) > 0:
        p = only(p, by_probability[: par["top_k"]])
    if par.get("top_p", 1.0) < 1:
        p = only(p, fewest(p, by_probability, par["top_p"]))
    p = only(p, [token for token in range(VOCAB) if p[token] >= par.get("min_p", 0.0) * p.max()])
    if par.get("typical_p", 1.0) < 1:
        alive = [token for token in range(VOCAB) if p[token] > 0]
        entropy = -sum(p[token] * np.log(p[token]) for token in alive)
        near = sorted(alive, key=lambda token: abs(-np.log(p[token]) - entropy))
        p = only(p, fewest(p, near, par["typical_p"]))
    return p


# Drawing.


@cache
def keys(seed: int) -> torch.Tensor:
    choice = choice_key(seed, 0)
    return torch.tensor([row_key(choice, position) for position in range(DRAWS)])


def tiled(entries: torch.Tensor, times: int) -> torch.Tensor:
    many = entries.repeat(times, 1)
    many[:, 0] = torch.arange(times).repeat_interleave(len(entries))
    return many


def draw(
    case: Case,
    seed: int = 1,
    spoil: Callable[[torch.Tensor, torch.Tensor], None] = lambda real, whole: None,
    op: Callable[..., Any] = OPS["sample"].reference,
    draws: int = DRAWS,
) -> np.ndarray:
    """Counts [VOCAB] of drawn tokens. `spoil` may change the op's columns (reals, wholes) in place."""
    params = SamplingParams(**case.params)
    sequence = SequenceSampler(
        params, prompt_ids=case.prompt, vocab_size=VOCAB, eos_ids=[EOS], bad_word_ids=case.bad_words, seed=seed
    )
    sequence.commit(case.output)
    batch = SamplingBatch(VOCAB)
    sequence.write_row(batch, case.drafted, len(case.prompt) + len(case.output) + len(case.drafted))
    real, whole, penalised, bias_at, bias_value, banned, allowed, _, _ = batch.tensors()
    counts = np.zeros(VOCAB, np.int64)
    rows = min(CHUNK, draws)
    lists = (
        tiled(penalised, rows),
        tiled(bias_at, rows),
        bias_value.repeat(rows),
        tiled(banned, rows),
        tiled(allowed, rows),
    )
    x = torch.from_numpy(logits()).repeat(rows, 1)
    for start in range(0, draws, rows):
        reals, wholes = real.repeat(rows, 1), whole.repeat(rows, 1)
        wholes[:, Whole.KEY0 : Whole.KEY1 + 1] = keys(seed)[start : start + rows]
        spoil(reals, wholes)
        tokens = op(x, reals, wholes, *lists, None, 0)[0]
        counts += np.bincount(tokens.numpy(), minlength=VOCAB)
    return counts


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of the chi-square test; 0 if an impossible token was drawn. Rare tokens share a cell."""
    if counts[probabilities == 0].any():
        return 0.0
    want = probabilities * counts.sum()
    rare = want < 10
    cells = [(counts[token], want[token]) for token in np.flatnonzero(~rare)]
    if want[rare].sum() > 0:
        cells.append((counts[rare].sum(), want[rare].sum()))
    if len(cells) == 1:
        return 1.0
    seen, hoped = np.array(cells).T
    return float(stats.chisquare(seen, hoped * seen.sum() / hoped.sum()).pvalue)


CASES: dict[str, Case] = {
    "plain": Case({}),
    "greedy": Case({"temperature": 0.0}),
    "temperature": Case({"temperature": 0.6}),
    "hot": Case({"temperature": 2.5}),
    "top_k": Case({"top_k": 7}),
    "top_p": Case({"top_p": 0.8}),
    "min_p": Case({"min_p": 0.1}),
    "typical_p": Case({"typical_p": 0.7}),
    "repetition": Case({"repetition_penalty": 1.7}, output=[5, 5, 6], drafted=[10]),
    "frequency": Case({"frequency_penalty": 0.6}, output=[5, 5, 6], drafted=[7, 5]),
    "presence": Case({"presence_penalty": -1.2}, output=[5, 5, 6], drafted=[7, 5]),
    "bias": Case({"logit_bias": {0: 2.5, 20: -3.0, 21: 1.0}}),
    "banned by min_tokens": Case({"min_tokens": 3, "stop_token_ids": [20, 21]}, output=[4], drafted=[4]),
    "min_tokens reached": Case({"min_tokens": 2, "stop_token_ids": [20, 21]}, output=[4], drafted=[4]),
    "allowed": Case({"allowed_token_ids": [1, 4, 9, 16, 25, 36, EOS]}),
    "bad words": Case({}, output=[4], drafted=[8], bad_words=[[30], [8, 31], [4, 8, 32], [5, 8, 33]]),
    "filters": Case({"temperature": 1.3, "top_k": 25, "top_p": 0.9, "min_p": 0.08, "typical_p": 0.9}),
    "penalties": Case(
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.5, "temperature": 0.8},
        output=[5, 5, 6, 3],
        drafted=[7, 3],
    ),
    "everything": Case(
        {
            "temperature": 1.1,
            "top_k": 30,
            "top_p": 0.95,
            "min_p": 0.02,
            "typical_p": 0.95,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.3,
            "presence_penalty": 0.2,
            "logit_bias": {0: 1.5, 5: 3.0},
            "allowed_token_ids": [*range(5, 45), EOS],
            "min_tokens": 9,
        },
        output=[5, 5, 6],
        drafted=[7, 5],
        bad_words=[[7, 5, 12], [13]],
    ),
}


SAMPLERS: dict[str, Callable[..., Any]] = {"reference": OPS["sample"].reference}
if isas():
    SAMPLERS["native"] = native_op(isas()[-1])


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_rules(name: str, sampler: str) -> None:
    case = CASES[name]
    assert p_value(draw(case, op=SAMPLERS[sampler]), expected(case)) > FINE


def test_the_cpu_version_draws_the_same() -> None:
    for name in ("plain", "filters", "everything"):
        case = CASES[name]
        few = draw(case, op=sample, draws=4000)
        assert np.array_equal(few, draw(case, draws=4000))


def set_column(column: Real | Whole, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def spoil(real: torch.Tensor, whole: torch.Tensor) -> None:
        columns = real if isinstance(column, Real) else whole
        columns[:, column] = change(columns[:, column])

    return spoil


def without_position(real: torch.Tensor, whole: torch.Tensor) -> None:
    whole[:, Whole.KEY0 : Whole.KEY1 + 1] = whole[0, Whole.KEY0 : Whole.KEY1 + 1].clone()


def in_pairs(real: torch.Tensor, whole: torch.Tensor) -> None:
    """Noise keyed by position // 4."""
    whole[:, Whole.KEY0 : Whole.KEY1 + 1] = whole[::4, Whole.KEY0 : Whole.KEY1 + 1].repeat_interleave(4, 0)


BIASED: dict[str, tuple[str, Callable[..., None]]] = {
    "noise without position": ("plain", without_position),
    "noise of a coarse position": ("plain", in_pairs),
    "5 % too hot": ("temperature", set_column(Real.TEMPERATURE, lambda t: t * 1.05)),
    "5 % too cold": ("plain", set_column(Real.TEMPERATURE, lambda t: t * 0.95)),
    "top_k one more": ("top_k", set_column(Whole.TOP_K, lambda k: k + 1)),
    "top_k one less": ("top_k", set_column(Whole.TOP_K, lambda k: k - 1)),
    "top_p a little more": ("top_p", set_column(Real.TOP_P, lambda p: p + 0.03)),
    "min_p off": ("min_p", set_column(Real.MIN_P, lambda p: p * 0)),
    "typical_p off": ("typical_p", set_column(Real.TYPICAL_P, lambda p: p * 0 + 1)),
    "repetition penalty lost": ("repetition", set_column(Real.REPETITION, lambda p: p * 0 + 1)),
    "a tenth of the draws greedy": (
        "plain",
        set_column(Real.TEMPERATURE, lambda t: t * (torch.arange(len(t)) % 10 > 0)),
    ),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", BIASED)
def test_a_biased_sampler_fails(name: str, sampler: str) -> None:
    of, spoil = BIASED[name]
    assert p_value(draw(CASES[of], spoil=spoil, op=SAMPLERS[sampler]), expected(CASES[of])) < WRONG


@pytest.mark.parametrize("name", ["repetition", "frequency", "presence", "bad words", "banned by min_tokens"])
def test_a_sampler_that_overlooks_drafted_tokens_fails(name: str) -> None:
    case = CASES[name]
    # With min_tokens the draft is overlooked in the other direction: counted twice, the ban ends too early.
    overlooking = Case(case.params, case.prompt, case.output, [], case.bad_words)
    if name == "banned by min_tokens":
        overlooking = Case(case.params, case.prompt, case.output, case.drafted * 2, case.bad_words)
    assert p_value(draw(overlooking), expected(case)) < WRONG


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [2, -3, 2**63 + 12345])
def test_draws_follow_the_rules_under_other_seeds(name: str, seed: int, sampler: str) -> None:
    case = CASES[name]
    assert p_value(draw(case, seed, op=SAMPLERS[sampler]), expected(case)) > FINE / 10


def kept_here(x: torch.Tensor, **columns: float) -> torch.Tensor:
    """Which tokens the filters keep, [R, V] bool."""
    rows = len(x)
    real = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0]]).repeat(rows, 1)
    whole = torch.zeros(rows, len(Whole), dtype=torch.int64)
    whole[:, Whole.TOP_K] = int(columns.pop("top_k", 0))
    for name, value in columns.items():
        real[:, Real[name.upper()]] = value
    return _filter(x, x.amax(-1, keepdim=True), real, whole) > -torch.inf


@pytest.mark.parametrize("vocab", [50, 1000])
def test_filters_keep_what_transformers_keeps(vocab: int) -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, TypicalLogitsWarper

    warpers: dict[str, Callable[[float], Any]] = {
        "top_k": lambda value: TopKLogitsWarper(int(value)),
        "top_p": TopPLogitsWarper,
        "min_p": MinPLogitsWarper,
        "typical_p": TypicalLogitsWarper,
    }
    x = torch.randn(64, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    mixes: list[dict[str, float]] = [{"top_k": k} for k in (1, 5, 40)]
    mixes += [{name: p} for name in ("top_p", "typical_p") for p in (0.1, 0.5, 0.9, 0.99)]
    mixes += [{"min_p": p} for p in (0.01, 0.1, 0.9)]
    mixes += [{"top_k": 20, "top_p": 0.9, "min_p": 0.05}, {"top_k": 30, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.8}]
    for mix in mixes:
        scores = x
        for name, value in mix.items():
            scores = warpers[name](value)(torch.zeros(64, 1, dtype=torch.int64), scores)
        assert torch.equal(kept_here(x, **mix), scores > -torch.inf), mix


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    x = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(4))
    ids = torch.tensor([[3, 3, 11, 5, 20]])
    entries = torch.tensor([[0, 3, 0, 1], [0, 11, 0, 1], [0, 5, 1, 0], [0, 20, 2, 1]])
    real = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.4, 0.0, 0.0]])
    want = RepetitionPenaltyLogitsProcessor(1.4)(ids, x.clone())
    torch.testing.assert_close(_penalise(x, real, entries), want)
