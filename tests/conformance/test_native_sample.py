"""The native sampler against the reference: every rule and mixes of them, odd rows, instruction sets, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sample_op import (
    KINDS,
    REFERENCE,
    assert_agree,
    assert_same_bits,
    cases,
    every_rule,
    random_logits,
    reals,
    row_alone,
    wholes,
)

from doubles.native_samplers import isas, make, native_op
from slipstream.core.errors import SlipstreamError
from slipstream.ops.sample import Real, Whole, _filter
from slipstream.sampling.batch import SamplingBatch

pytestmark = pytest.mark.skipif(not isas(), reason="neither the native library nor a C++ compiler is there")

BEST = isas()[-1] if isas() else ""
ours = native_op(BEST)

# The reference's exp is another one, so a border may lie between two tokens whose shares differ in the last bits. These
# shares never come so near a border of random logits: the drawn ones are moved by far more than such a difference.


def moved(arguments: tuple) -> tuple:
    """Shares a little off the round numbers that sums of equal weights hit exactly."""
    real = arguments[0].clone()
    for column in (Real.TOP_P, Real.TYPICAL_P):
        share = real[:, column]
        real[:, column] = torch.where(share < 1, share * (1 - 3.1e-5), share)
    least = real[:, Real.MIN_P]
    real[:, Real.MIN_P] = torch.where((least > 0) & (least < 1), least * (1 - 3.1e-5), least)
    return real, *arguments[1:]


@settings(max_examples=500, deadline=None)
@given(cases())
def test_tokens_and_reports_are_the_reference_s(case: tuple[torch.Tensor, tuple]) -> None:
    logits, arguments = case[0], moved(case[1])
    assert_agree(ours(logits, *arguments), REFERENCE(logits, *arguments))


@settings(max_examples=25, deadline=None)
@given(cases(vocabs=(2049, 4099, 40000)))
def test_tokens_and_reports_are_the_reference_s_on_large_vocabularies(case: tuple[torch.Tensor, tuple]) -> None:
    logits, arguments = case[0], moved(case[1])
    assert_agree(ours(logits, *arguments), REFERENCE(logits, *arguments))


@settings(max_examples=150, deadline=None)
@given(cases(vocabs=(1, 2, 7, 33, 64, 100, 257, 1000, 5000)), st.randoms(use_true_random=False))
def test_rows_alone_padding_order_and_instruction_sets_change_no_bit(case: tuple[torch.Tensor, tuple], random) -> None:
    logits, arguments = case
    together = ours(logits, *arguments)
    for row in range(len(logits)):
        alone = ours(*row_alone(logits, arguments, row))
        assert_same_bits(alone, tuple(output[row : row + 1].clone() for output in together))
    for isa in isas():
        assert_same_bits(native_op(isa)(logits, *arguments), together)
    lists = list(arguments[2:7])
    for place in (0, 1, 3, 4):
        entries = lists[place]
        order = torch.tensor(random.sample(range(len(entries) + 2), len(entries) + 2), dtype=torch.int64)
        padding = entries.new_full((2, entries.shape[1]), 5)
        padding[:, 0] = -1
        lists[place] = torch.cat([entries, padding])[order]
        if place == 1:
            lists[2] = torch.cat([lists[2], torch.ones(2)])[order]
    assert_same_bits(ours(logits, *arguments[:2], *lists, *arguments[7:]), together)


@pytest.mark.parametrize("vocab", [49152, 50001])
def test_threads_and_instruction_sets_change_no_bit_of_large_rows(vocab: int) -> None:
    logits, arguments = every_rule(vocab)
    alone = ours(logits, *arguments)
    assert_agree(alone, REFERENCE(logits, *arguments))
    for isa in isas():
        for threads in (1, 2):
            assert_same_bits(native_op(isa, threads)(logits, *arguments), alone)


RULES: list[tuple[dict[str, float], dict[str, int]]] = [
    ({}, {}),
    ({"temperature": 0.7}, {}),
    *(({"top_p": p}, {}) for p in (0.01, 0.3, 0.7, 0.95, 0.9999, 0.9999999)),
    ({"top_p": 0.9, "temperature": 0.3}, {}),
    ({"top_p": 0.9, "temperature": 5.0}, {}),
    *(({"min_p": p}, {}) for p in (1e-30, 0.01, 0.3, 1.0)),
    *(({"typical_p": p}, {}) for p in (0.05, 0.5, 0.95)),
    *(({}, {"top_k": k}) for k in (1, 2, 40, 700, 2999, 3000)),
    ({"top_p": 0.8, "min_p": 0.02, "typical_p": 0.9, "temperature": 1.3}, {"top_k": 300}),
]


def rows_of_every_shape(vocab: int) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    rows = [random_logits(rng, kind, vocab) for kind in sorted(set(KINDS))]
    lone = np.full(vocab, -8.05, np.float32)
    lone[vocab // 3] = 0.0
    flat = (rng.normal(size=vocab) * 0.5).astype(np.float32)
    return [*rows, lone, flat, np.sort(flat * 8), (flat * 20).round().astype(np.float32)]


def kept_by_reference(x: torch.Tensor, real: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return _filter(x, x.amax(-1, keepdim=True), real, whole) > -torch.inf


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_kept_token_is_drawn_and_no_other(rule: tuple[dict[str, float], dict[str, int]]) -> None:
    """A bias of nothing and a ban of all kept tokens but one leave that one; keys are many for a few tokens."""
    vocab, rows = 60, 4000
    for row in rows_of_every_shape(vocab):
        if not np.isfinite(row[np.argmax(row)]) or np.isnan(row).any():
            continue
        batch = SamplingBatch(vocab)
        for key in range(rows):
            batch.add_row(
                reals(**{"temperature": 1.0, **rule[0]}), wholes(**rule[1]), key=(key * 2654435761 % 2**32, key)
            )
        x = torch.from_numpy(np.tile(row, (rows, 1)))
        arguments = moved(batch.tensors())
        kept = set(torch.nonzero(kept_by_reference(x[:1], arguments[0][:1], arguments[1][:1])[0])[:, 0].tolist())
        drawn = set(ours(x, *arguments)[0].tolist())
        assert drawn <= kept
        heavy = torch.softmax(
            ((x[0] - x[0].max()) / arguments[0][0, 0]).masked_fill(~_mask(kept, vocab), -torch.inf), 0
        )
        assert {token for token in kept if heavy[token] > 0.01} <= drawn


def _mask(tokens: set[int], vocab: int) -> torch.Tensor:
    mask = torch.zeros(vocab, dtype=torch.bool)
    mask[list(tokens)] = True
    return mask


@pytest.mark.parametrize("vocab", [3000, 4097])
def test_shortcuts_change_nothing(vocab: int) -> None:
    """Rows in which unlikely tokens often win, with borders near and far down, on many keys."""
    shapes = rows_of_every_shape(vocab)
    batch, rows = SamplingBatch(vocab), []
    for number in range(3 * len(RULES) * len(shapes)):
        real, whole = RULES[number % len(RULES)]
        key = (number * 2654435761 % 2**32, number)
        batch.add_row(reals(**{"temperature": 1.0, **real}), wholes(wants_logprobs=1, **whole), key=key, num_top=20)
        rows.append(shapes[number // len(RULES) % len(shapes)])
    logits, arguments = torch.from_numpy(np.stack(rows)), moved(batch.tensors())
    assert_agree(ours(logits, *arguments), REFERENCE(logits, *arguments))


def run_one(logits: list[float], real: list[float], whole: list[int], prepare: Any = None, num_top: int = 0) -> tuple:
    batch = SamplingBatch(len(logits))
    batch.add_row(real, whole, key=(1, 2), num_top=num_top)
    if prepare is not None:
        prepare(batch)
    x = torch.tensor([logits])
    out = ours(x, *batch.tensors())
    assert_agree(out, REFERENCE(x, *batch.tensors()))
    return out


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_possible_token_get_minus_one(temperature: float) -> None:
    real, whole = reals(temperature=temperature), wholes(wants_logprobs=1)
    for bad in ([1.0, float("nan"), 2.0], [1.0, -float("nan"), 2.0], [1.0, float("inf"), 2.0], [-float("inf")] * 3):
        tokens, logprob, top_ids, _, ranks = run_one(bad, real, whole, num_top=2)
        assert tokens.tolist() == [-1]
        assert torch.isnan(logprob).all()
        assert top_ids.tolist() == [[-1, -1]]
        assert ranks.tolist() == [0]
    for mask in (lambda b: b.ban(0, [0, 1, 2]), lambda b: b.set_grammar(0, np.zeros(1, np.int32))):
        assert run_one([1.0, 5.0, 2.0], real, whole, mask)[0].tolist() == [-1]
    assert run_one([1.0, float("nan"), 2.0], real, whole, lambda b: b.ban(0, [1]))[0].tolist() == [-1]


def test_ties() -> None:
    assert run_one([0.0, 3.0, 3.0, 1.0, 3.0], reals(), wholes())[0].tolist() == [1]
    logits = [2.0, 2.0, 2.0, 2.0, -9.0]
    for real, whole in [
        (reals(temperature=1.0), wholes(top_k=2)),
        (reals(temperature=1.0, top_p=0.3), wholes()),
        (reals(temperature=1.0, typical_p=0.3), wholes()),
    ]:
        batch = SamplingBatch(5)
        for key in range(200):
            batch.add_row(real, whole, key=(key * 7919, key))
        assert set(ours(torch.tensor([logits] * 200), *batch.tensors())[0].tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("vocab", [300, 6000])
def test_tokens_that_dividing_makes_equal_to_the_border_are_kept(vocab: int) -> None:
    """The border of top-p lies where the search for it guesses, and the value a float32 step below is the same."""
    depth, steps = np.float32(6), np.empty(0, np.float32)
    for temperature in np.linspace(2.0, 2.7, 1000, dtype=np.float32):
        guess = np.array([-depth * temperature], np.float32)
        steps = (guess.view(np.int32) + np.arange(-2, 3, dtype=np.int32)).view(np.float32)
        scaled = steps / temperature
        if scaled[1] > scaled[2] == scaled[3] > scaled[4]:
            break
    else:
        pytest.fail("there is no such temperature")
    x = np.resize(steps, vocab).astype(np.float32)
    x[0] = 0.0
    batch = SamplingBatch(vocab)
    weight = np.exp(-depth) * (vocab - 1)
    for key in range(1000):
        share = (1 + weight * (0.5 + 0.01 * (key % 10))) / (1 + weight)  # three of five values are not below the guess
        batch.add_row(reals(temperature=temperature, top_p=float(share)), wholes(), key=(key, key * 31))
    logits = torch.from_numpy(np.tile(x, (1000, 1)))
    tokens = ours(logits, *batch.tensors())[0]
    assert torch.equal(tokens, REFERENCE(logits, *batch.tensors())[0])
    assert set(x[tokens].tolist()) == {0.0, *steps[:4].tolist()}


@pytest.mark.parametrize("share", [0.0, 1e-30, 1e-13])
def test_a_share_of_next_to_nothing_keeps_the_first(share: float) -> None:
    for options in ({"top_p": share}, {"typical_p": share}):
        for vocab in (2, 50, 3000):
            batch = SamplingBatch(vocab)
            for key in range(50):
                batch.add_row(reals(temperature=1.0, **options), wholes(), key=(key, 3))
            x = (np.random.default_rng(vocab).normal(size=(50, vocab)) * 2).astype(np.float32)
            logits = torch.from_numpy(x)
            assert_agree(ours(logits, *batch.tensors()), REFERENCE(logits, *batch.tensors()))


def test_entries_that_name_nothing_are_refused() -> None:
    for prepare in (
        lambda b: b.ban(0, [5]),
        lambda b: b.ban(0, [-1]),
        lambda b: b.ban(1, [0]),
        lambda b: b.add_bias(0, np.array([5]), np.array([1.0], np.float32)),
        lambda b: b.add_penalised(0, np.array([[7, 1, 1]])),
        lambda b: b.score(0, 5),
    ):
        batch = SamplingBatch(5, make(BEST, 5))
        batch.add_row()
        prepare(batch)
        with pytest.raises(SlipstreamError, match="not there"):
            batch.draw(torch.zeros(1, 5))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_batch_that_is_used_again_draws_as_the_op_does(data: st.DataObject) -> None:
    """Arrays that grow, views that are kept, and results of changing width."""
    vocab = 33
    native, plain = SamplingBatch(vocab, make(BEST, vocab)), SamplingBatch(vocab)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for _ in range(data.draw(st.integers(1, 5))):
        rows = data.draw(st.sampled_from([1, 2, 5, 70, 130]))
        top = data.draw(st.sampled_from([0, 1, 3, 40]))
        mask = rng.integers(-(2**31), 2**31, size=2).astype(np.int32)
        extras = data.draw(st.sets(st.sampled_from(["ban", "bias", "penalise", "allow", "grammar"])))
        for batch in (native, plain):
            batch.clear()
            for row in range(rows):
                batch.add_row(reals(temperature=row % 2), wholes(wants_logprobs=row % 3 > 0), key=(row, 9), num_top=top)
                if "ban" in extras:
                    batch.ban(row, [row % vocab, 3])
                if "bias" in extras:
                    batch.add_bias(row, np.array([4, 5]), np.array([2.0, 3.0], np.float32))
                if "penalise" in extras:
                    batch.add_penalised(row, np.array([[6, 2, 0], [7, 0, 1]]))
                if "allow" in extras and row % 2:
                    batch.allow_only(row, [1, 2, 8, 9])
                if "grammar" in extras and row % 4 == 0:
                    batch.set_grammar(row, mask)
        logits = torch.from_numpy(rng.normal(size=(rows, vocab)).astype(np.float32))
        a, b = native.draw(logits), plain.draw(logits)
        names = ("tokens", "logprobs", "top_ids", "top_logprobs", "ranks")
        assert_agree(*(tuple(torch.from_numpy(np.asarray(getattr(d, name))) for name in names) for d in (a, b)))


def test_logits_of_another_shape_or_kind_are_refused() -> None:
    batch = SamplingBatch(8, make(BEST, 8))
    batch.add_row(wholes=wholes(), reals=reals())
    for logits in (torch.zeros(2, 8), torch.zeros(1, 7), torch.zeros(1, 8).double(), torch.zeros(8, 2).T[:1]):
        with pytest.raises(ValueError, match="logits"):
            batch.draw(logits)
    assert batch.draw(np.zeros((1, 8), np.float32)).tokens.tolist() == [0]  # type: ignore[arg-type]
    assert Whole.TOP_K == 0
