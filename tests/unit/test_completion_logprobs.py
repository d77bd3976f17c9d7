"""The place of each token in a completion's text, whatever bytes the tokens are cut at."""

from __future__ import annotations

import codecs
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from doubles.small_vocabularies import spm_metadata
from slipstream.server.logprobs import CompletionLogprobs, TokenNames
from slipstream.text.detokenizer import Detokenizer
from slipstream.text.tokenizer import Tokenizer

BYTES = st.sampled_from(
    [b"E", b" ", "é".encode(), "中".encode(), "😀".encode(), b"\xda", b"\xf0\x9f", b"\x80", b"\xff"]
)


class Listed(TokenNames):
    """Tokens are the indices of `pieces`."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__(None)
        self._pieces = pieces

    def bytes(self, token: int) -> bytes:
        return self._pieces[token]


@st.composite
def cut_bytes(draw: st.DrawFn) -> list[bytes]:
    whole = b"".join(draw(st.lists(BYTES, max_size=10)))
    points = [0, *sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12))), len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(points)]


def character_of_bytes(data: bytes) -> list[int]:
    """For each byte, the number of the character that it is part of; each ill-formed part is one."""
    broken: list[tuple[int, int]] = []

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        broken.append((error.start, error.end))
        return "\ufffd", error.end

    codecs.register_error("note_broken", note)
    text = data.decode(errors="note_broken")
    ends = dict(broken)
    found: list[int] = []
    for number, char in enumerate(text):
        start = len(found)
        found += [number] * (ends[start] - start if start in ends else len(char.encode()))
    assert len(found) == len(data)
    return found


@settings(max_examples=500, deadline=None)
@example([b"\xda", b"E"])
@given(cut_bytes())
def test_an_offset_is_where_the_first_byte_shows(pieces: list[bytes]) -> None:
    running = CompletionLogprobs(Listed(pieces), 0)
    places = running.add(range(len(pieces)), [None] * len(pieces))["text_offset"]
    data = b"".join(pieces)
    text, character = data.decode(errors="replace"), character_of_bytes(data)
    at = 0
    for piece, place in zip(pieces, places, strict=True):
        if piece:
            assert place == character[at]
        try:
            name = piece.decode()
        except UnicodeDecodeError:
            name = ""
        assert text[place : place + len(name)] == name
        at += len(piece)


@settings(max_examples=200, deadline=None)
@given(cut_bytes(), cut_bytes())
def test_the_output_begins_anew_after_the_prompt(prompt: list[bytes], output: list[bytes]) -> None:
    names = Listed([*prompt, *output])
    running = CompletionLogprobs(names, 0)
    running.add(range(len(prompt)), [None] * len(prompt))
    running.end_of_prompt()
    places = running.add(range(len(prompt), len(prompt) + len(output)), [None] * len(output))["text_offset"]
    alone = CompletionLogprobs(Listed(output), 0).add(range(len(output)), [None] * len(output))["text_offset"]
    length = len(b"".join(prompt).decode(errors="replace"))
    assert places == [length + place for place in alone]


@pytest.mark.parametrize("text", ["hello the end", " two", "a", "   x"])
def test_the_space_that_a_tokenizer_puts_in_front_is_not_counted(text: str) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(spm_metadata())
    ids = tokenizer.encode(text, add_special_tokens=False)
    places = CompletionLogprobs(TokenNames(tokenizer), 0).add(ids, [None] * len(ids))["text_offset"]
    whole = Detokenizer(tokenizer)
    shown = whole.push(ids) + whole.finish()
    assert tokenizer.bytes_table.strip_left == 1
    for token, place in list(zip(ids, places, strict=True))[1:]:
        name = tokenizer.token_bytes(token).decode()
        assert shown[place : place + len(name)] == name
