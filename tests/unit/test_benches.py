"""Figures and pictures of the bench scripts, on made-up times; processes that they start."""

from __future__ import annotations

import itertools
import math
import os
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import neighbour
import perplexity
import startup
import step_rows
from peer_engines.step_picture import _apart, _ticks, picture

EVEN = [40e9, 40e9, 40e9]


def test_perplexity_of_a_uniform_guess_is_its_number_of_choices() -> None:
    assert perplexity.perplexity([[-math.log(50.0)] * 7, [-math.log(50.0)] * 7]) == pytest.approx(50)


@given(st.lists(st.lists(st.floats(-9, -0.1), min_size=3, max_size=3), min_size=2, max_size=6), st.floats(-0.3, 0.3))
def test_ratio_of_perplexities(windows: list[list[float]], less: float) -> None:
    worse = [[value - less for value in window] for window in windows]
    found = perplexity.over(worse, windows, draws=200)
    assert found["ratio"] == pytest.approx(perplexity.perplexity(worse) / perplexity.perplexity(windows))
    assert found["low"] == pytest.approx(math.exp(less))  # every window is worse by the same
    assert found["high"] == pytest.approx(math.exp(less))
    assert found["low"] <= found["ratio"] * (1 + 1e-12)


def round_of(ours: float, theirs: float, probes: list[float]) -> dict[str, Any]:
    """Times that grow by a tenth of a row's with each further row; the library takes half of ours."""
    by_rows = {str(rows): ours * (1 + (rows - 1) / 10) for rows in step_rows.ROWS}
    raw = {rows: time / 2 for rows, time in by_rows.items()}
    return {
        "ours": {
            "ms": {str(context): by_rows for context in step_rows.CONTEXTS},
            "raw_ms": {str(context): raw for context in step_rows.CONTEXTS},
        },
        "llama_cpp": {"ms": {str(step_rows.COMPARED): {str(rows): theirs * rows for rows in step_rows.ROWS}}},
        "probes": probes,
    }


def steps() -> dict[str, Any]:
    rounds = [round_of(2.0, 5.0, EVEN), round_of(2.0, 5.0, EVEN), round_of(9.0, 5.0, [40e9, 20e9, 40e9])]
    return step_rows.figures(rounds, [4e7, 8e7, 1.6e8])


def test_times_of_steps() -> None:
    found = steps()
    assert found["limit_ms"] == {"16": pytest.approx(1.0), "256": pytest.approx(2.0), "2048": pytest.approx(4.0)}
    eight = found["ours"]["256"]["8"]
    assert eight["ms"]["median"] == pytest.approx(3.4)
    assert eight["over_one_row"]["median"] == pytest.approx(1.7)
    assert (eight["over_one_row"]["pairs"], eight["over_one_row"]["dropped"]) == (2, 1)
    assert eight["over_limit"]["median"] == pytest.approx(1.7 / 2)
    theirs = found["llama_cpp"]["8"]
    assert theirs["over_one_row"]["median"] == pytest.approx(8)
    assert theirs["over_ours"]["median"] == pytest.approx(40 / 3.4)


def test_table_and_picture_of_steps() -> None:
    result = {"formats": {"Q4_0": steps()}, "compared_at": step_rows.COMPARED, "threads": 2}
    lines = step_rows.show(result).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    drawn = picture(result, "Q4_0")
    root = ElementTree.fromstring(drawn)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    assert len(circles) == 2 * len(step_rows.ROWS)
    for circle in circles:
        assert 0 < float(circle.attrib["cx"]) < width
        assert 0 < float(circle.attrib["cy"]) < height
    assert "prefers-color-scheme: dark" in drawn
    assert {"Slipstream", "llama.cpp", "memory limit"} <= {element.text for element in root.iter()}


@given(st.floats(0.01, 5000))
def test_ticks_are_few_and_reach_the_highest_value(highest: float) -> None:
    ticks = _ticks(highest)
    assert ticks[0] == 0
    assert ticks[-1] >= highest * (1 - 1e-6)
    assert 3 <= len(ticks) <= 8


@given(st.lists(st.floats(0, 400), min_size=2, max_size=4))
def test_labels_do_not_touch(heights: list[float]) -> None:
    placed = sorted(_apart(heights))
    assert all(later - earlier >= 18 - 1e-9 for earlier, later in itertools.pairwise(placed))


def test_neighbours_figures() -> None:
    def one(alone: float, beside: float, probes: list[float]) -> dict[str, Any]:
        return {
            "alone": {"tokens_per_s": alone, "longest_gap_ms": 5.0},
            "beside": {"tokens_per_s": beside, "longest_gap_ms": alone / 10},
            "probes": probes,
        }

    found = neighbour.figures([one(400, 200, EVEN), one(300, 150, EVEN), one(500, 10, [4.0, 9.0, 4.0])])
    assert found["beside_over_alone"] == {"median": 0.5, "low": 0.5, "high": 0.5, "pairs": 2, "dropped": 1}
    assert found["beside"]["longest_gap_ms"] == {"median": 40, "max": 50}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs affinity")
def test_a_neighbour_runs_where_it_is_told_and_ends() -> None:
    first = min(os.sched_getaffinity(0))

    def children() -> list[int]:
        tasks = Path("/proc/self/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]

    before = set(children())
    with neighbour.busy(first):
        (process,) = set(children()) - before
        assert os.sched_getaffinity(process) == {first}
    assert not set(children()) - before


def test_imports_are_timed_in_a_new_process() -> None:
    """Names that cannot be imported are passed over."""
    import json

    torch, beyond = json.loads(startup.python(startup.IMPORTS, given='["json", "no.such.module"]').stdout)
    assert torch > beyond >= 0
