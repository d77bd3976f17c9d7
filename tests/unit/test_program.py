"""Program texts are read back as they were written; buffers that live at once never share memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.devices.slots import Lifetime, share_slots
from slipstream.kernels.cpu.program import Buffer, Cache, Instruction, Program, ProgramError, Vector, Weight, parse


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20), st.integers(1, 4000)), max_size=40))
def test_no_two_live_buffers_share_a_slot(drawn: list[tuple[int, int, int]]) -> None:
    lives = [Lifetime(first, first + length, size) for first, length, size in drawn]
    slots = share_slots(lives)
    for i, one in enumerate(lives):
        for j, other in enumerate(lives[:i]):
            if one.first <= other.last and other.first <= one.last:
                assert slots[i] != slots[j]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=40))
def test_there_are_no_more_slots_than_buffers_that_live_at_once(drawn: list[tuple[int, int]]) -> None:
    lives = [Lifetime(first, first + length, 1) for first, length in drawn]
    most = max(sum(life.first <= at <= life.last for life in lives) for at in range(81))
    assert len(set(share_slots(lives))) == most


def example() -> Program:
    program = Program(
        buffers=[Buffer("b0", "f32", 576), Buffer("b1", "q8", 576, "wanted", 3)],
        weights=[Weight("a.weight", "q4_1", 20, 64), Weight("b.weight", "bf16", 5, 40)],
        vectors=[Vector("norm", 7), Vector("buffer.inv_freq", 32)],
        caches=[Cache(3, 64, "bf16")],
        references=[{"op": "aten.mul.Tensor", "args": [{"in": 0, "shape": ["R", 4]}, 0.1], "kwargs": {}}],
        code=[
            Instruction("embed", {"out": 0, "weight": 0}),
            Instruction("norm", {"in": 0, "out": 1, "weight": 0, "eps": 1e-05}),
            Instruction("reference", {"op": 0, "in": [0, 1], "out": -1}),
        ],
    )
    program.place()
    return program


def test_a_text_is_read_back() -> None:
    text = example().text()
    assert parse(text).text() == text
    assert parse(text) == example()


@pytest.mark.parametrize("change", ["cut", "line", "header", "number", "size", "word"])
def test_another_text_is_refused(change: str) -> None:
    text = example().text()
    damaged = {
        "cut": text[: len(text) * 2 // 3].rstrip("\n"),
        "line": "".join(text.splitlines(keepends=True)[:-1]),
        "header": text.replace("program 1", "program 9"),
        "number": text.replace("buffer 1", "buffer 7"),
        "size": text.replace("outputs=20", "outputs=200"),
        "word": text.replace("cache 0", "cash 0"),
    }[change]
    with pytest.raises(ProgramError):
        parse(damaged)


def test_what_is_packed_does_not_overlap() -> None:
    program = example()
    spans = sorted(
        [(w.offset, w.offset + w.size) for w in program.weights]
        + [(v.offset, v.offset + 4 * v.count) for v in program.vectors]
    )
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
    assert all(start % 64 == 0 for start, _ in spans)
    assert program.data_size >= spans[-1][1]
