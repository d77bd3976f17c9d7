"""Wrapped streaming, judged by what a terminal shows."""

from __future__ import annotations

import random
import re
import textwrap

import pytest

from slipstream.cli.wrap import StreamWrapper


class Screen:
    """A terminal that knows what the wrapper uses: text, line ends, cursor back, erase to the end of the line."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines = [""]
        self.column = 0
        self.pending = False  # the last column is written; where the cursor stands now differs between terminals

    def write(self, text: str) -> None:
        for code, character in re.findall(r"(\x1b\[\d*[DK])|([\s\S])", text):
            if code.endswith("D"):
                assert not self.pending
                self.column -= int(code[2:-1])
            elif code.endswith("K"):
                self.lines[-1] = self.lines[-1][: self.column]
            elif character == "\n":
                self._new_line()
            else:
                self._put(character)

    def _new_line(self) -> None:
        self.lines.append("")
        self.column, self.pending = 0, False

    def _put(self, character: str) -> None:
        if self.pending:
            self._new_line()
        self.lines[-1] = self.lines[-1][: self.column] + character
        self.pending = self.column == self.width - 1
        self.column += not self.pending


def shown(text: str, width: int, chooser: random.Random) -> list[str]:
    wrapper, screen = StreamWrapper(width), Screen(width)
    while text:
        cut = chooser.randint(1, 4)
        screen.write(wrapper.push(text[:cut]))
        text = text[cut:]
    return [line.rstrip() for line in screen.lines]


@pytest.mark.parametrize("width", [8, 9, 10, 20])
def test_a_stream_looks_like_wrapped_text(width):
    chooser = random.Random(width)
    for _ in range(200):
        words = ["abcdefghijklmnop"[: chooser.randint(1, width - 1)] for _ in range(chooser.randint(1, 12))]
        text = " ".join(words)
        assert shown(text, width, chooser) == textwrap.wrap(text, width - 1), text


def test_lines_of_the_text_are_kept():
    assert shown("ab\n\n  cd ef\n", 20, random.Random(0)) == ["ab", "", "  cd ef", ""]


def test_a_word_wider_than_the_terminal_goes_on():
    assert shown("a " + "x" * 12 + " b", 5, random.Random(0)) == ["a", "xxxxx", "xxxxx", "xx b"]


def test_wide_characters_count_twice():
    assert StreamWrapper(5).push("ab 日") == "ab \n日"
