"""Streamed text is the whole text: no half characters, and the same for every way of cutting the ids."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles.small_vocabularies import QUIET, TEXTS, byte_metadata, spm_metadata
from slipstream.loading.gguf import GGUFFile
from slipstream.text.detokenizer import Detokenizer
from slipstream.text.tokenizer import Tokenizer

GAP = "\N{REPLACEMENT CHARACTER}"
CUTS = st.lists(st.integers(0, 60), max_size=10)
HARD_TEXTS = ["😀👨‍👩‍👧🇩🇪❤️", "中文日本語한국어", "e\u0301a\u0308\u0323", "हिन्दी ไทย", "a\n\n b\t 😀 c"]


def smallest(kind: str) -> Tokenizer:
    metadata = spm_metadata() if kind == "spm" else byte_metadata("gpt-2", "he", "😀", marked=(("<|x|>", 3), ("é!", 4)))
    return Tokenizer.from_gguf_metadata(metadata)


@pytest.fixture(scope="module")
def real(default_model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(GGUFFile(default_model_path).metadata)


@pytest.fixture(scope="module", params=["byte-level", "spm"])
def small(request) -> Tokenizer:
    return smallest(request.param)


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory) -> Tokenizer:
    """A kind whose text depends on neighbours: "##" joins a token to the one before."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    words = ["[UNK]", "he", "##llo", "##y", "world", "!", "😀", "'", "s"]
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    folder = tmp_path_factory.mktemp("wordpiece")
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def fallback_bytes(tmp_path_factory) -> Tokenizer:
    """The library decodes it in windows, and characters span tokens: byte fallback in an unusual chain of steps."""
    metadata = spm_metadata(add_space_prefix=False)
    folder = tmp_path_factory.mktemp("fallback")
    Tokenizer.from_gguf_metadata(metadata)._with_control.save(str(folder / "tokenizer.json"))
    state = json.loads((folder / "tokenizer.json").read_text())
    state["decoder"]["decoders"].append({"type": "Replace", "pattern": {"String": "hell"}, "content": "hell"})
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return Tokenizer.from_folder(folder)


def cut(ids: list[int], points: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(point % (len(ids) + 1) for point in points), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


def stream(tokenizer: Tokenizer, pieces: list[list[int]], **options) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


def check(tokenizer: Tokenizer, ids: list[int], points: list[int], skip: bool) -> None:
    pieces = stream(tokenizer, cut(ids, points), skip_special_tokens=skip)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == whole
    # One token at a time is the finest cutting there is.
    assert "".join(stream(tokenizer, [[i] for i in ids], skip_special_tokens=skip)) == whole


def in_bytes(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    kept = [i for i in ids if not (skip and i in tokenizer.control_ids)]
    return b"".join(tokenizer.token_bytes(i) for i in kept).decode("utf-8", errors="replace")


@settings(max_examples=400, **QUIET)
@given(ids=st.lists(st.integers(0, 49_300), max_size=40), points=CUTS, skip=st.booleans())
def test_random_ids_of_the_real_vocabulary(real, ids, points, skip):
    check(real, ids, points, skip)
    assert real.decode(ids, skip_special_tokens=skip) == in_bytes(real, ids, skip)
    # Added tokens in the byte alphabet's own characters aside, the library's decoding is the same.
    known = [i for i in ids if i < real.vocab_size]
    assert real.decode(known, skip_special_tokens=False) == real.backend_decode(known)


@settings(max_examples=300, **QUIET)
@given(text=TEXTS, points=CUTS)
def test_real_texts(real, text, points):
    ids = real.encode(text)
    check(real, ids, points, True)
    shown = ""
    for piece in stream(real, [[i] for i in ids]):
        shown += piece
        assert real.decode(ids).startswith(shown)


@settings(max_examples=500, **QUIET)
@given(ids=st.lists(st.integers(-1, 320), max_size=30), points=CUTS, skip=st.booleans())
def test_random_ids_of_small_vocabularies(small, ids, points, skip):
    check(small, ids, points, skip)
    text = in_bytes(small, ids, skip)
    assert small.decode(ids, skip_special_tokens=skip) == text[text.startswith(" ") and small.bytes_table.strip_left :]


@settings(max_examples=200, **QUIET)
@given(ids=st.lists(st.integers(0, 10), max_size=30), points=CUTS)
def test_random_ids_where_the_library_decodes(wordpiece, ids, points):
    check(wordpiece, ids, points, False)


def test_library_decoding_equals_the_whole(wordpiece):
    ids = wordpiece.encode("hello world! he's")
    assert wordpiece.decode(ids) == wordpiece.backend_decode(ids)
    assert wordpiece.decode(ids).startswith("hello world")


@settings(max_examples=200, **QUIET)
@given(ids=st.lists(st.integers(3, 290), max_size=20), points=CUTS)
def test_random_bytes_where_the_library_decodes(fallback_bytes, ids, points):
    assert not fallback_bytes.bytes_table.independent
    check(fallback_bytes, ids, points, False)


def test_characters_wait_for_their_bytes_where_the_library_decodes(fallback_bytes):
    ids = fallback_bytes.encode("a😀b", add_special_tokens=False)
    assert stream(fallback_bytes, [[i] for i in ids]) == ["a", "", "", "", "😀", "b", ""]
    assert stream(fallback_bytes, [ids[:3]]) == ["a", GAP * 2]


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_no_gap_is_ever_shown_for_text_that_has_none(small, text):
    ids = small.encode(text, add_special_tokens=False)
    pieces = stream(small, [[i] for i in ids])
    assert "".join(pieces) == text
    assert not any(GAP in piece for piece in pieces)


def test_unfinished_character_becomes_one_gap(small):
    ids = small.encode("a😁", add_special_tokens=False)[:-1]
    pieces = stream(small, [[i] for i in ids])
    assert "".join(pieces[:-1]) == "a"
    assert pieces[-1] == GAP


def test_text_waits_for_the_rest_of_a_character():
    tokenizer = smallest("spm")
    ids = tokenizer.encode("a😀", add_special_tokens=False)
    assert stream(tokenizer, [[i] for i in ids])[-5:] == ["", "", "", "😀", ""]


def test_leading_space_is_stripped_only_at_the_beginning():
    tokenizer = smallest("spm")
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.name_of(ids[0]).startswith("▁")
    assert "".join(stream(tokenizer, [ids])) == "hello"
    assert "".join(stream(tokenizer, [ids], prefix_ids=ids)) == " hello"
    assert "".join(stream(tokenizer, [ids], prefix_ids=[1])) == "hello"  # a skipped BOS is no text
    assert tokenizer.decode([1, *ids, *ids]) == "hello hello"


def test_character_begun_in_the_prefix_is_completed(small):
    ids = small.encode("😁", add_special_tokens=False)
    assert "".join(stream(small, [ids[-1:]], prefix_ids=ids[:-1])) == "😁"


def test_special_tokens_are_skipped_or_shown():
    tokenizer = smallest("byte-level")
    ids = tokenizer.encode("he<|x|>é!", parse_control=True)
    assert tokenizer.decode(ids) == "heé!"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "he<|x|>é!"


def test_ids_outside_the_vocabulary_are_no_text(real, wordpiece):
    assert real.decode([49152, 10**6]) == ""
    assert wordpiece.decode([999] * 100 + [1]).strip() == "he"


def test_work_per_token_does_not_grow(wordpiece, real):
    for tokenizer, ids in ((wordpiece, [1, 2, 999]), (real, [1000, 0, 30000])):
        detokenizer = Detokenizer(tokenizer)
        for _ in range(3000):
            detokenizer.push(ids)
        window = getattr(detokenizer._stream, "_window", [])
        assert len(window) < 100
