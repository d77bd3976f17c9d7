"""A row's bits in a whole native program: whatever shares its batch, however it was chunked, with any threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles import native_programs as programs
from doubles.native_decoder import SHAPES, Decoder
from doubles.native_programs import Executor, Part, Plan, assert_same, assert_same_caches, check, copied, make_batch
from slipstream.ops.native_spec.arithmetic import F32
from slipstream.ops.native_spec.program import STEPS, Batch, read
from slipstream.ops.native_spec.weights import KINDS

pytestmark = pytest.mark.skipif(not programs.libraries(), reason=programs.why_missing() or "no native library")


def plan_of(rng: np.random.Generator, decoder: Decoder, most: int, contexts: list[int]) -> Plan:
    parts = [Part(int(rng.choice(contexts)), int(rng.integers(1, 12))) for _ in range(int(rng.integers(1, most)))]
    shape = decoder.shape
    shuffled = bool(rng.random() < 0.2)
    size = int(rng.choice([16, 64]))
    return Plan(parts, size, shape.window, shuffled, vocabulary=shape.vocabulary, caches=shape.caches)


def run_in_pieces(executor: Executor, batch: Batch, pieces: list[Any], vocabulary: int) -> F32:
    """Logits of all rows, computed by one run for each piece; the caches are the batch's."""
    logits = np.zeros((len(batch.token), vocabulary), np.float32)
    for rows in pieces:
        logits[rows] = executor.run(programs.rows_of(batch, rows), vocabulary)
    return logits


def test_the_decoders_hold_every_instruction_and_kind() -> None:
    rng = np.random.default_rng(0)
    listings = [read(Decoder(rng, shape).built.text) for shape in SHAPES.values()]
    assert {name for listing in listings for name, _ in listing.steps} == set(STEPS)
    assert {weight["kind"] for listing in listings for weight in listing.weights} == set(KINDS)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_programs_are_as_defined(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    decoder = Decoder(rng, SHAPES[name])
    batch = make_batch(rng, plan_of(rng, decoder, 4, [0, 5, 20, 130]))
    check(decoder.built, batch, {}, [decoder.x], vocabulary=decoder.shape.vocabulary)


def check_rows(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    decoder = Decoder(rng, SHAPES[name])
    batch = make_batch(rng, plan_of(rng, decoder, 8, [0, 3, 16, 100, 127, 128, 300]))
    batch.wants_logits[:] = True
    vocabulary, rows = decoder.shape.vocabulary, len(batch.token)
    want: tuple[F32, Batch] | None = None
    # A row needs the rows before it; other than that, any pieces in any order.
    order = np.argsort(batch.position + rng.random(rows) * 0.5, kind="stable")
    cuts = np.sort(rng.integers(0, rows, size=int(rng.integers(0, 6))))
    ways = {
        "whole": [np.arange(rows)],
        "row by row": [np.array([row]) for row in order],
        "pieces": [piece for piece in np.split(order, cuts) if len(piece)],
        "sequence by sequence": [
            np.nonzero(batch.sequence == number)[0] for number in rng.permutation(np.unique(batch.sequence))
        ],
    }
    for library in programs.libraries():
        for threads in (1, 2):
            executor = Executor(decoder.built, library, threads)
            for way, pieces in ways.items():
                mine = copied(batch)
                logits = run_in_pieces(executor, mine, pieces, vocabulary)
                want = want or (logits, mine)
                what = f"{name}, {way}, {programs.native.ISAS[library.isa]}, {threads} threads"
                assert_same(logits, want[0], what)
                assert_same_caches(decoder.built, mine, want[1], what)
    assert want is not None
    assert np.isfinite(want[0]).all()


@settings(max_examples=12, deadline=None)
@given(name=st.sampled_from(list(SHAPES)), seed=st.integers(0, 2**32 - 1))
def test_rows_do_not_depend_on_their_batch(name: str, seed: int) -> None:
    check_rows(name, seed)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(list(SHAPES)), seed=st.integers(0, 2**32 - 1))
def test_rows_do_not_depend_on_their_batch_in_depth(name: str, seed: int) -> None:
    check_rows(name, seed)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_program_may_be_run_in_stretches(seed: int) -> None:
    """As it is where an operator that has no native version stands between them."""
    rng = np.random.default_rng(seed)
    decoder = Decoder(rng, SHAPES["fused"])
    batch = make_batch(rng, plan_of(rng, decoder, 5, [0, 20, 140]))
    vocabulary = decoder.shape.vocabulary
    executor = Executor(decoder.built, programs.libraries()[-1], 2)
    want = executor.run(copied(batch), vocabulary)
    cuts = sorted(int(cut) for cut in rng.integers(0, executor.program.length, size=3))
    for first, last in zip([0, *cuts], [*cuts, executor.program.length], strict=True):
        got = executor.run(batch, vocabulary, first, last)
    assert_same(got, want, f"cut at {cuts}")
