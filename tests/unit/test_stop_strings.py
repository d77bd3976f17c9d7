"""Stop strings: the same result for every way of cutting the text, and nothing held back for too long."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.errors import InvalidRequestError
from slipstream.text import stop_strings
from slipstream.text.stop_strings import StopStrings, stop_table

# Few letters make overlaps, repeated borders and nested stops common.
LETTERS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Reads the whole text: the smallest end at which a stop is complete, and the longest stop ending there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, points: list[int]) -> list[str]:
    bounds = [0, *sorted(point % (len(text) + 1) for point in points), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    watcher = StopStrings(stops, include)
    sent, matched = "", None
    for piece in pieces:
        now, matched = watcher.push(piece)
        sent += now
        if matched is not None:
            break
    return sent + watcher.finish(), matched


@settings(max_examples=1500, deadline=None)
@given(LETTERS, STOPS, st.lists(st.integers(0, 40), max_size=6), st.booleans())
def test_any_cutting_equals_the_whole_text_oracle(text, stops, points, include):
    assert run(cut(text, points), stops, include) == oracle(text, stops, include)


@settings(max_examples=500, deadline=None)
@given(LETTERS, STOPS)
def test_holds_back_exactly_the_longest_possible_beginning(text, stops):
    watcher = StopStrings(stops)
    seen, sent = "", ""
    for char in text:
        now, matched = watcher.push(char)
        seen, sent = seen + char, sent + now
        if matched is not None:
            return
        beginnings = [n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])]
        assert sent == seen[: len(seen) - max(beginnings, default=0)]


def test_first_to_complete_wins_even_if_another_began_earlier():
    assert run(["xabcd"], ["abcd", "bc"]) == ("xa", "bc")


def test_of_those_that_complete_together_the_longest_wins():
    assert run(["x", "ab", "c"], ["c", "abc", "bc"]) == ("x", "abc")
    assert run(["xabc"], ["c", "abc"], include=True) == ("xabc", "abc")


def test_nothing_is_sent_after_a_match():
    watcher = StopStrings(["END"])
    assert watcher.push("a END b") == ("a ", "END")
    assert watcher.push("more") == ("", "END")
    assert watcher.finish() == ""


def test_false_alarm_is_sent_in_full():
    watcher = StopStrings(["</s>"])
    assert watcher.push("a</") == ("a", None)
    assert watcher.push("s") == ("", None)
    assert watcher.push("pan") == ("</span", None)


def test_long_repetitive_text_is_scanned_in_linear_time():
    watcher = StopStrings(["a" * 2000 + "b"])
    start = time.perf_counter()
    for _ in range(200):
        watcher.push("a" * 500)
    assert time.perf_counter() - start < 2.0
    assert watcher.push("b")[1] is not None


@pytest.mark.parametrize("bad", [[""], ["a", ""], [None], [3]])
def test_empty_stop_is_refused(bad):
    with pytest.raises(InvalidRequestError) as caught:
        StopStrings(bad)
    assert caught.value.param == "stop"


@settings(max_examples=300, deadline=None)
@given(STOPS, st.lists(st.tuples(LETTERS, st.lists(st.integers(0, 40), max_size=4), st.booleans()), max_size=4))
def test_who_share_a_table_do_not_disturb_each_other(stops, streams):
    """Several choices, whose pieces come in turns."""
    watchers = [StopStrings(stops, include) for _, _, include in streams]
    pieces = [cut(text, points) for text, points, _ in streams]
    sent = ["" for _ in streams]
    for turn in itertools.zip_longest(*pieces):
        for index, piece in enumerate(turn):
            sent[index] += watchers[index].push(piece)[0] if piece is not None else ""
    for watcher, got, (text, _, include) in zip(watchers, sent, streams, strict=True):
        assert (got + watcher.finish(), watcher.matched) == oracle(text, stops, include)


def test_a_table_is_made_once(monkeypatch):
    """However many choices have the same stops: the table of the longest ones takes milliseconds and megabytes."""
    made = []
    original = stop_strings.StopTable.__init__

    def watched(self, stops):
        made.append(stops)
        original(self, stops)

    monkeypatch.setattr(stop_strings.StopTable, "__init__", watched)
    stop_table.cache_clear()
    stops = ["ab" * 512, "c"]
    watchers = [StopStrings(list(stops)) for _ in range(128)]
    assert made == [tuple(stops)]
    assert {watcher.push("ab" * 512)[1] for watcher in watchers} == {"ab" * 512}
