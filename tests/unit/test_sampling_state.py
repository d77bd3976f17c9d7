"""A sequence's sampling rows: drafted tokens count as generated ones, and what was not asked for is not written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.sampling_params import SamplingParams
from slipstream.ops.sample import Real, Whole
from slipstream.sampling.batch import SamplingBatch
from slipstream.sampling.noise import choice_key, row_key
from slipstream.sampling.state import SequenceSampler, _BadWords, bad_word_ids

VOCAB = 40
EOS = (39, 38)


def sampler(
    prompt: list[int] | None = None, *, seed: int = 5, choice: int = 0, bad: Any = (), **params: Any
) -> SequenceSampler:
    return SequenceSampler(
        SamplingParams(**params),
        prompt_ids=[1, 2, 3] if prompt is None else prompt,
        vocab_size=VOCAB,
        eos_ids=EOS,
        bad_word_ids=bad,
        choice_index=choice,
        seed=seed,
    )


def written(sequence: SequenceSampler, drafted: list[int]) -> dict[str, Any]:
    """One row's arguments, lists as sets."""
    batch = SamplingBatch(VOCAB)
    sequence.write_row(batch, drafted, sequence.prompt_length + sequence.output_length + len(drafted))
    real, whole, penalised, bias_at, bias_value, banned, allowed, grammar, num_top = batch.tensors()
    assert grammar is None
    return {
        "real": real[0].tolist(),
        "whole": whole[0].tolist(),
        "penalised": {tuple(entry[1:]) for entry in penalised.tolist() if entry[2] or entry[3]},
        "bias": {(*at, value) for at, value in zip(bias_at.tolist(), bias_value.tolist(), strict=True)},
        "banned": {token for _, token in banned.tolist()},
        "allowed": {token for _, token in allowed.tolist()},
        "num_top": num_top,
    }


EVERYTHING: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": 9,
    "top_p": 0.5,
    "min_p": 0.25,
    "typical_p": 0.75,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "min_tokens": 6,
    "stop_token_ids": [7],
    "logit_bias": {4: 2.0, 9: -1.0},
    "allowed_token_ids": [5, 1, 5],
    "logprobs": 3,
}
BAD = ([8], [1, 2], [1, 1, 2], [2, 3, 4, 5])


@settings(max_examples=200, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    output=st.lists(st.integers(0, 5), max_size=12),
    split=st.integers(0, 12),
)
def test_drafted_tokens_count_as_generated_ones(prompt: list[int], output: list[int], split: int) -> None:
    split = min(split, len(output))
    drafting = sampler(prompt, bad=BAD, **EVERYTHING)
    drafting.commit(output[: split // 2])
    drafting.commit(output[split // 2 : split])
    stepping = sampler(prompt, bad=BAD, **EVERYTHING)
    for token in output:
        stepping.commit([token])
    drafted = output[split:]
    row = written(drafting, drafted)
    assert row == written(stepping, [])
    # Against a plain count.
    assert row["penalised"] == {(t, output.count(t), int(t in prompt)) for t in {*prompt, *output}}
    ends = {7, *EOS} if len(output) < 6 else set()
    words = {word[-1] for word in BAD if len(word) == 1 or output[-len(word) + 1 :] == word[:-1]}
    assert row["banned"] == ends | words
    # Writing a row with a draft must leave nothing behind.
    assert written(drafting, []) == written_after(prompt, output[:split])


def written_after(prompt: list[int], output: list[int]) -> dict[str, Any]:
    fresh = sampler(prompt, bad=BAD, **EVERYTHING)
    fresh.commit(output)
    return written(fresh, [])


def test_columns_hold_the_parameters() -> None:
    row = written(sampler(**EVERYTHING), [])
    columns = [(Real.TEMPERATURE, 0.7), (Real.TOP_P, 0.5), (Real.MIN_P, 0.25), (Real.TYPICAL_P, 0.75)]
    columns += [(Real.REPETITION, 1.5), (Real.FREQUENCY, 0.5), (Real.PRESENCE, -0.5)]
    for column, value in columns:
        assert row["real"][column] == pytest.approx(value)
    assert row["whole"][Whole.TOP_K] == 9
    assert row["whole"][Whole.WANTS_LOGPROBS] == 1
    assert row["whole"][Whole.ONLY_ALLOWED] == 1
    assert row["num_top"] == 3
    assert row["allowed"] == {1, 5}
    assert row["bias"] == {(0, 4, 2.0), (0, 9, -1.0)}


def test_what_was_not_asked_for_is_not_written() -> None:
    row = written(sampler(temperature=0.0), [4, 4])
    assert row["penalised"] == row["bias"] == row["banned"] == row["allowed"] == set()
    assert row["whole"] == [0, 0, 0, -1, 0, 0, 0]
    assert row["num_top"] == 0


def test_the_prompt_is_listed_only_for_the_repetition_penalty() -> None:
    row = written(sampler([1, 2], presence_penalty=1.0), [2, 9])
    assert row["penalised"] == {(2, 1, 0), (9, 1, 0)}
    assert written(sampler([1, 2, 1], repetition_penalty=2.0), [2])["penalised"] == {(1, 0, 1), (2, 1, 1)}


def test_prompt_ids_outside_the_vocabulary_are_left_out() -> None:
    assert written(sampler([1, 4000, -1], repetition_penalty=2.0), [])["penalised"] == {(1, 0, 1)}


def test_min_tokens_bans_ends_until_enough_are_out() -> None:
    sequence = sampler(min_tokens=2, stop_token_ids=[7])
    assert written(sequence, [])["banned"] == {7, *EOS}
    assert written(sequence, [0])["banned"] == {7, *EOS}
    assert written(sequence, [0, 0])["banned"] == set()
    sequence.commit([0, 0])
    assert written(sequence, [])["banned"] == set()
    assert written(sampler(min_tokens=2, stop_token_ids=[7], ignore_eos=True), [])["banned"] == {7}


def test_keys_follow_seed_choice_and_position() -> None:
    def key(position: int, **which: int) -> tuple[int, ...]:
        row = written(sampler(**which), [0] * (position - 3))
        return tuple(row["whole"][Whole.KEY0 : Whole.KEY1 + 1])

    assert key(3) == row_key(choice_key(5, 0), 3)
    assert len({key(3), key(4), key(3, choice=1), key(3, seed=6)}) == 4


def test_a_position_that_does_not_follow_the_draft_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="position"):
        sampler().write_row(SamplingBatch(VOCAB), [1], 3)


def test_extreme_values_are_held_to_float32() -> None:
    real = written(sampler(temperature=1e300, repetition_penalty=1e-300), [])["real"]
    assert np.isfinite(real).all()
    assert real[Real.REPETITION] > 0


def test_a_batch_grows_and_is_reused() -> None:
    batch = SamplingBatch(VOCAB)
    sequence = sampler(list(range(30)), bad=BAD, **EVERYTHING)
    mask = np.full(2, -1, np.int32)
    for count in (1, 150, 3):
        batch.clear()
        for row in range(count):
            drafted = [row % 5] * (row % 7)
            assert sequence.write_row(batch, drafted, 30 + len(drafted), mask if row == count // 2 else None) == row
        assert len(batch) == count
        arguments = batch.tensors()
        assert arguments[0].shape == (count, len(Real))
        assert arguments[7] is not None
        assert arguments[7].shape == (count, 2)
        assert arguments[7][count // 2].tolist() == [-1, -1]
        assert set(arguments[2][:, 0].tolist()) == set(range(count))
        assert batch.draw(torch.zeros(count, VOCAB)).tokens.shape == (count,)
    batch.clear()
    assert len(batch) == 0
    assert batch.tensors()[7] is None


def test_a_score_row_reports_the_given_token() -> None:
    batch = SamplingBatch(VOCAB)
    sequence = sampler(prompt_logprobs=2, temperature=1.0, logprobs=1)
    sequence.write_score_row(batch, 3)
    sequence.write_row(batch, [], 3)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
    draws = batch.draw(logits)
    want = torch.log_softmax(logits, -1)
    logprobs = torch.stack([want[0, 3], want[1, draws.tokens[1]]])
    torch.testing.assert_close(torch.from_numpy(draws.logprobs), logprobs)
    assert draws.ranks.tolist() == [
        1 + int((logits[0] > logits[0, 3]).sum()),
        1 + int((logits[1] > logits[1, draws.tokens[1]]).sum()),
    ]
    assert draws.top_ids.shape == (2, 2)


def test_bad_words_are_taken_with_and_without_a_space() -> None:
    codes = {"bad": [10], " bad": [11], "odd": [12, 13], " odd": [14], "so": [15], " so": [16, 15], "two": [1, 2]}
    codes[" two"] = [3, 2]
    found = bad_word_ids([" bad", "odd", "so", "two"], codes.__getitem__)
    assert found == [[10], [11], [12, 13], [15], [1, 2], [3, 2]]


FEW = st.integers(0, 2)


@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.lists(FEW, min_size=1, max_size=5), max_size=12),
    output=st.lists(FEW, max_size=10),
    split=st.integers(0, 10),
)
def test_bad_words_are_those_of_a_plain_search(words: list[list[int]], output: list[int], split: int) -> None:
    """Words that end alike, that hold one another, and that are longer than the output."""
    split = min(split, len(output))
    sequence = sampler(bad=words)
    for token in output[:split]:
        sequence.commit([token])
    found = {word[-1] for word in words if output[len(output) - len(word) + 1 :] == word[:-1] or len(word) == 1}
    assert written(sequence, output[split:])["banned"] == found


def test_the_work_for_bad_words_does_not_grow_with_their_number() -> None:
    """Nor with the output's length: only the latest tokens that begin a word are looked at."""

    class Counted:
        def __init__(self) -> None:
            self.seen = 0

        def __iter__(self) -> Any:
            while True:
                self.seen += 1
                yield 4

    words = _BadWords([[first, 5, 6, 4, last] for first in range(30) for last in range(30)])
    tokens = Counted()
    assert words.banned_after(tokens) == []
    assert tokens.seen == 2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=8), st.lists(st.integers(0, 5), max_size=8))
def test_choices_that_share_tables_do_not_disturb_each_other(first: list[int], second: list[int]) -> None:
    eldest = sampler(bad=BAD, **EVERYTHING)
    younger = SequenceSampler(
        eldest.params, prompt_ids=[1, 2, 3], vocab_size=VOCAB, choice_index=1, seed=5, sibling=eldest
    )
    eldest.commit(first)
    younger.commit(second)
    for sequence, index, output in ((eldest, 0, first), (younger, 1, second)):
        alone = sampler(choice=index, bad=BAD, **EVERYTHING)
        alone.commit(output)
        assert written(sequence, []) == written(alone, [])
    assert younger.stop_token_ids is eldest.stop_token_ids
