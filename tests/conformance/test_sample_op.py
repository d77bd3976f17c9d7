"""The sampling op: each device's version against the reference, rows alone against rows in company, odd rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.ops import fixed
from slipstream.ops.fixed import in_pieces
from slipstream.ops.registry import OPS
from slipstream.ops.sample import Real, Whole, sample
from slipstream.sampling.batch import GREEDY_REALS, NO_WHOLES, SamplingBatch

REFERENCE = OPS["sample"].reference


def reals(**columns: float) -> list[float]:
    row = list(GREEDY_REALS)
    for name, value in columns.items():
        row[Real[name.upper()]] = value
    return row


def wholes(**columns: int) -> list[int]:
    row = list(NO_WHOLES)
    for name, value in columns.items():
        row[Whole[name.upper()]] = value
    return row


def share_or_one() -> st.SearchStrategy[float]:
    return st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.75, 0.5, 0.25, 1e-3, 1e-30])


def random_logits(rng: np.random.Generator, kind: str, vocab: int) -> np.ndarray:
    x = rng.normal(size=vocab) * 4
    if kind == "ties":
        x = np.round(x / 4) * rng.choice([0.5, 1.0, 4.0])
    elif kind == "equal":
        x = np.zeros(vocab)
    elif kind == "extreme":
        x = rng.choice([3e38, -3e38, 1e30, 0.0, -0.0, 1e-40, 80.0, -200.0, 7.0], size=vocab)
    elif kind == "impossible":
        x[rng.random(vocab) < 0.7] = -np.inf
    elif kind == "nan":
        x[rng.integers(vocab)] = rng.choice([np.nan, np.inf])
    return x.astype(np.float32)


KINDS = ["normal", "normal", "ties", "equal", "extreme", "impossible", "nan"]


def add_random_row(batch: SamplingBatch, rng: np.random.Generator, draw: st.DrawFn) -> None:
    """One row with any mix of rules, most of them off."""
    vocab = batch.vocab_size
    penalties = draw(
        st.sampled_from([(1, 0, 0), (1, 0, 0), (1.3, 0.5, -0.7), (0.5, -2, 2), (1e-38, 0, 0), (3e38, 0, 0)])
    )
    row = batch.add_row(
        reals(
            temperature=draw(st.sampled_from([0.0, 0.0, 1.0, 0.8, 1e-3, 1e-40, 5.0, 3e38])),
            top_p=draw(share_or_one()),
            min_p=draw(st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])),
            typical_p=draw(share_or_one()),
            repetition=penalties[0],
            frequency=penalties[1],
            presence=penalties[2],
        ),
        wholes(
            top_k=draw(st.sampled_from([0, 0, 1, 2, 5, vocab // 2, vocab, 3 * vocab])),
            wants_logprobs=int(draw(st.booleans())),
            score_token=draw(st.sampled_from([-1, -1, 0, vocab - 1])),
        ),
        key=(int(rng.integers(2**32)), int(rng.integers(2**32))),
        num_top=draw(st.sampled_from([0, 0, 1, 5, 20])),
    )
    some = lambda: rng.permutation(vocab)[: rng.integers(1, vocab + 1)]  # noqa: E731
    asked = draw(st.sets(st.sampled_from(["penalised", "bias", "banned", "allowed", "grammar"])))
    if "penalised" in asked:
        ids = some()
        entries = np.stack([ids, rng.integers(0, 4, len(ids)), rng.integers(0, 2, len(ids))], axis=1)
        batch.add_penalised(row, entries)
    if "bias" in asked:
        ids = some()
        batch.add_bias(row, ids, rng.choice([-100, -1, 0.5, 100], size=len(ids)).astype(np.float32))
    if "banned" in asked:
        batch.ban(row, some())
    if "allowed" in asked:
        batch.allow_only(row, some())
    if "grammar" in asked:
        words = -(-vocab // 32)
        batch.set_grammar(row, rng.integers(-(2**31), 2**31, size=words).astype(np.int32))


@st.composite
def cases(draw: st.DrawFn, vocabs: tuple[int, ...] = (1, 2, 7, 33, 64, 100)) -> tuple[torch.Tensor, tuple]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    vocab = draw(st.sampled_from(vocabs))
    rows = draw(st.integers(1, 6))
    batch = SamplingBatch(vocab)
    logits = np.stack([random_logits(rng, draw(st.sampled_from(KINDS)), vocab) for _ in range(rows)])
    for _ in range(rows):
        add_random_row(batch, rng, draw)
    return torch.from_numpy(logits), batch.tensors()


def row_alone(logits: torch.Tensor, arguments: tuple, row: int) -> tuple:
    real, whole, penalised, bias_at, bias_value, banned, allowed, grammar, num_top = arguments

    def of_row(entries: torch.Tensor) -> torch.Tensor:
        kept = entries[entries[:, 0] == row].clone()
        kept[:, 0] = 0
        return kept

    one = slice(row, row + 1)
    values = bias_value[bias_at[:, 0] == row]
    lists = (of_row(penalised), of_row(bias_at), values, of_row(banned), of_row(allowed))
    return logits[one], real[one], whole[one], *lists, None if grammar is None else grammar[one], num_top


def assert_same_bits(a: tuple, b: tuple) -> None:
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        assert x.numpy().tobytes() == y.numpy().tobytes()


def assert_agree(a: tuple, b: tuple) -> None:
    for place, (x, y) in enumerate(zip(a, b, strict=True)):
        if place in (1, 3):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6, equal_nan=True)
        else:
            assert torch.equal(x, y)


@settings(max_examples=400, deadline=None)
@given(cases())
def test_cpu_gives_the_tokens_of_the_reference(case: tuple[torch.Tensor, tuple]) -> None:
    logits, arguments = case
    assert_agree(sample(logits, *arguments), REFERENCE(logits, *arguments))


@settings(max_examples=15, deadline=None)
@given(cases(vocabs=(2049, 4099, 40000)))
def test_cpu_gives_the_tokens_of_the_reference_on_large_vocabularies(case: tuple[torch.Tensor, tuple]) -> None:
    logits, arguments = case
    assert_agree(sample(logits, *arguments), REFERENCE(logits, *arguments))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_a_row_in_a_batch_has_the_bits_of_the_row_alone(case: tuple[torch.Tensor, tuple]) -> None:
    logits, arguments = case
    together = sample(logits, *arguments)
    for row in range(len(logits)):
        alone = sample(*row_alone(logits, arguments, row))
        assert_same_bits(alone, tuple(output[row : row + 1].clone() for output in together))


@settings(max_examples=50, deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_padding_entries_and_the_order_of_entries_change_nothing(case: tuple[torch.Tensor, tuple], random) -> None:
    logits, arguments = case
    lists = list(arguments[2:7])
    for place in (0, 1, 3, 4):
        entries = lists[place]
        order = torch.tensor(random.sample(range(len(entries) + 2), len(entries) + 2), dtype=torch.int64)
        padding = entries.new_full((2, entries.shape[1]), 5)
        padding[:, 0] = -1
        lists[place] = torch.cat([entries, padding])[order]
        if place == 1:
            lists[2] = torch.cat([lists[2], torch.ones(2)])[order]
    changed = (*arguments[:2], *lists, *arguments[7:])
    assert_same_bits(sample(logits, *changed), sample(logits, *arguments))
    assert_agree(REFERENCE(logits, *changed), REFERENCE(logits, *arguments))


def every_rule(vocab: int) -> tuple[torch.Tensor, tuple]:
    rng = np.random.default_rng(7)
    batch = SamplingBatch(vocab)
    options = [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 0.8, "top_p": 0.999999},
        {"temperature": 1.2, "min_p": 0.01},
        {"temperature": 1.0, "typical_p": 0.9},
        {},
    ]
    for number, option in enumerate(options):
        batch.add_row(reals(**option), wholes(wants_logprobs=1), key=(number * 77 + 1, 12345), num_top=5)
    batch.add_row(reals(temperature=0.8, top_p=0.95), wholes(top_k=40), key=(5, 6))
    logits = rng.normal(size=(len(batch), vocab)).astype(np.float32) * 3
    return torch.from_numpy(logits), batch.tensors()


@pytest.mark.parametrize("vocab", [49152, 50001])
def test_the_number_of_threads_changes_no_bit(vocab: int) -> None:
    logits, arguments = every_rule(vocab)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((sample(logits, *arguments), REFERENCE(logits, *arguments)))
    finally:
        torch.set_num_threads(before)
    for one, reference in results[1:]:
        assert_same_bits(one, results[0][0])
        assert_same_bits(reference, results[0][1])
    assert_agree(*results[0])


FIXED = {
    "in pieces": (lambda x: in_pieces(torch.exp, x), torch.exp),
    "exp": (fixed.exp, torch.exp),
    "log": (fixed.log, torch.log),
    "log1p": (fixed.log1p, torch.log1p),
}


@pytest.mark.parametrize("name", FIXED)
def test_elementwise_functions_depend_on_values_alone(name: str) -> None:
    fn, exact = FIXED[name]
    x = torch.rand(70001, generator=torch.Generator().manual_seed(3)) * 0.9 + 1e-4
    whole = fn(x)
    torch.testing.assert_close(whole.double(), exact(x.double()), rtol=5e-7, atol=1e-7)
    for start, size in [(0, 1), (3, 17), (32760, 40), (5, 4096), (69999, 2), (1, 65536), *((n, n) for n in range(70))]:
        assert torch.equal(fn(x[start : start + size]), whole[start : start + size])
    assert torch.equal(fn(x[:60000].view(100, 600).T), whole[:60000].view(100, 600).T)


def run_one(logits: list[float], real: list[float], whole: list[int], prepare=None, num_top: int = 0) -> tuple:
    batch = SamplingBatch(len(logits))
    batch.add_row(real, whole, key=(1, 2), num_top=num_top)
    if prepare is not None:
        prepare(batch)
    x = torch.tensor([logits])
    out = sample(x, *batch.tensors())
    assert_agree(out, REFERENCE(x, *batch.tensors()))
    return out


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_possible_token_get_minus_one(temperature: float) -> None:
    real, whole = reals(temperature=temperature), wholes(wants_logprobs=1)
    for bad in ([1.0, float("nan"), 2.0], [1.0, float("inf"), 2.0], [-float("inf")] * 3):
        tokens, logprob, top_ids, _, ranks = run_one(bad, real, whole, num_top=2)
        assert tokens.tolist() == [-1]
        assert torch.isnan(logprob).all()
        assert top_ids.tolist() == [[-1, -1]]
        assert ranks.tolist() == [0]
    for mask in (lambda b: b.ban(0, [0, 1, 2]), lambda b: b.set_grammar(0, np.zeros(1, np.int32))):
        assert run_one([1.0, 5.0, 2.0], real, whole, mask)[0].tolist() == [-1]
    hidden = run_one([1.0, float("nan"), 2.0], real, whole, lambda b: b.ban(0, [1]))
    assert hidden[0].tolist() == [-1]


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    assert run_one([0.0, 3.0, 3.0, 1.0, 3.0], reals(), wholes())[0].tolist() == [1]


def test_logprobs_are_of_the_logits_as_given() -> None:
    logits = [0.5, 3.0, 3.0, 1.0, -2.0]
    want = torch.log_softmax(torch.tensor(logits), 0)
    real = reals(temperature=0.1, top_p=0.1, repetition=2.0)
    out = run_one(logits, real, wholes(wants_logprobs=1, score_token=3), lambda b: b.ban(0, [1, 2]), num_top=4)
    tokens, logprob, top_ids, top_logprobs, ranks = out
    assert tokens.tolist() == [3]
    torch.testing.assert_close(logprob, want[3:4])
    assert top_ids.tolist() == [[1, 2, 3, 0]]
    torch.testing.assert_close(top_logprobs[0], want[[1, 2, 3, 0]])
    assert ranks.tolist() == [3]


def test_what_is_tied_with_the_border_is_kept() -> None:
    """With four equal tokens top_k 2 keeps four; with probabilities 1/4 each top_p 0.3 keeps four."""
    logits = [2.0, 2.0, 2.0, 2.0, -9.0]
    for real, whole in [
        (reals(temperature=1.0), wholes(top_k=2)),
        (reals(temperature=1.0, top_p=0.3), wholes()),
        (reals(temperature=1.0, typical_p=0.3), wholes()),
    ]:
        batch = SamplingBatch(5)
        for key in range(200):
            batch.add_row(real, whole, key=(key * 7919, key))
        tokens = sample(torch.tensor([logits] * 200), *batch.tensors())[0]
        assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_fake_gives_the_shapes_of_the_result() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    logits, arguments = every_rule(64)
    real = sample(logits, *arguments)
    with FakeTensorMode() as mode:
        faked = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in (logits, *arguments)]
        fake = sample(*faked)
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in real]


def test_the_reference_has_no_branch_on_data() -> None:
    """It traces on fake tensors, which have no data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    logits, arguments = every_rule(64)
    with FakeTensorMode() as mode:
        REFERENCE(*[mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in (logits, *arguments)])


def test_the_shortcuts_of_the_cpu_version_change_nothing() -> None:
    """Large rows in which unlikely tokens often win, and in which the border of top-p lies near and far down."""
    vocab = 3000
    few, many = np.full(vocab, -8.05, np.float32), np.zeros(vocab, np.float32)
    few[1234] = 0.0
    many += np.random.default_rng(1).normal(size=vocab).astype(np.float32) * 0.5
    clustered = np.sort(many * 8)
    options = [({}, {}), ({"top_p": 0.7}, {}), ({"top_p": 0.01}, {}), ({"top_p": 0.9, "typical_p": 0.5}, {})]
    options += [({}, {"top_k": k}) for k in (1, 3, 255, 256, 257, 2900)]
    batch = SamplingBatch(vocab)
    rows = []
    for number in range(600):
        option, whole = options[number % len(options)]
        key = (number * 2654435761 % 2**32, number)
        batch.add_row(reals(temperature=1.0, **option), wholes(wants_logprobs=1, **whole), key=key, num_top=20)
        rows.append((few, many, clustered)[number % 3])
    logits = torch.from_numpy(np.stack(rows))
    ours = sample(logits, *batch.tensors())
    assert_agree(ours, REFERENCE(logits, *batch.tensors()))
    plain = [int(token) for number, token in enumerate(ours[0]) if number % 30 == 0]
    assert any(token != 1234 for token in plain)
    assert any(token == 1234 for token in plain)
