"""The tokenizer rebuilt from a GGUF file equals transformers' reading of the same file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from doubles.small_vocabularies import PIECES, QUIET, SPM_TEXTS, TEXTS, byte_metadata, spm_metadata
from slipstream.core.errors import LoadError
from slipstream.loading.gguf import GGUFFile
from slipstream.text.gguf_tokenizer import build_tokenizer
from slipstream.text.pre_tokenizers import PRE_TOKENIZERS
from slipstream.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def ours(default_model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(GGUFFile(default_model_path).metadata)


@pytest.fixture(scope="module")
def theirs(default_model_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)


def compare(ours: Tokenizer, theirs: Any, text: str) -> None:
    ids = ours.encode(text, parse_control=True)
    assert ids == theirs.encode(text), text
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
    assert ours.encode(text) == theirs.encode(text, split_special_tokens=True)


@settings(max_examples=500, **QUIET)
@given(text=TEXTS)
def test_equals_transformers(ours, theirs, text):
    compare(ours, theirs, text)


@pytest.mark.slow
@settings(max_examples=10_000, **QUIET)
@given(text=TEXTS)
def test_equals_transformers_on_ten_thousand_texts(ours, theirs, text):
    compare(ours, theirs, text)


def test_built_in_a_fraction_of_a_second(default_model_path):
    metadata = GGUFFile(default_model_path).metadata
    times = []
    for _ in range(3):
        start = time.perf_counter()
        Tokenizer.from_gguf_metadata(metadata)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3


def test_control_tokens_of_the_real_file(ours):
    assert ours.control_tokens["<|im_start|>"] == 1
    assert len(ours.control_ids) == 17
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids, ours.add_bos) == (49152, 1, (2,), False)


# Small vocabularies, compared with transformers' conversion of the same metadata.


def transformers_backend(metadata: dict[str, Any]) -> Any:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    known = {name: metadata[f"tokenizer.{key}"] for key, name in names.items() if f"tokenizer.{key}" in metadata}
    return convert_gguf_tokenizer(metadata["general.architecture"], known)[0]


@pytest.mark.parametrize("pre", ["qwen2", "qwen35", "llama-bpe", "tekken", "gpt-4o", "gpt-2", "smollm"])
def test_splits_equal_transformers(pre):
    marked = (("<|x|>", 3), ("<think>", 4), ("<|endoftext|>", 3))
    words = (" hello", "HelloWorld", "123", "don't", "\n\n", "    ", " 中", "é", "...", "//", " 12", "हि", ".\n/")
    metadata = byte_metadata(pre, *words, marked=marked)
    ours, theirs = build_tokenizer(metadata), transformers_backend(metadata)

    @settings(max_examples=150, **QUIET)
    @given(st.lists(st.one_of(PIECES, st.sampled_from([*words, "<think>", "<|x|>"])), max_size=8).map("".join))
    def check(text):
        assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False).ids

    check()


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
def test_sentencepiece_equals_transformers(architecture):
    metadata = spm_metadata(architecture)
    ours, theirs = build_tokenizer(metadata), transformers_backend(metadata)

    @settings(max_examples=400, **QUIET)
    @given(SPM_TEXTS)
    def check(text):
        assert ours.encode(text).ids == theirs.encode(text, add_special_tokens=False).ids
        ids = ours.encode(text).ids
        assert ours.decode(ids) == theirs.decode(ids)

    check()


SMALL_WORDS = st.text(alphabet="abc", min_size=2, max_size=5)


@settings(max_examples=150, **QUIET)
@given(words=st.dictionaries(SMALL_WORDS, st.integers(-3, 0), max_size=25), text=st.text(alphabet="abc ", max_size=20))
@example(words={"ba": -1, "abba": 0, "bbb": 0, "baba": -1, "aba": -1, "bb": -1}, text=" ababa")
def test_merges_from_tied_scores_equal_transformers(words, text):
    metadata = spm_metadata()
    keep = len(metadata["tokenizer.ggml.tokens"]) - len(["abc", "ab", "bc", "a", "b", "c"])
    for key, new in (("tokens", ["a", "b", "c", *words]), ("scores", [-9.0] * 3 + [float(v) for v in words.values()])):
        metadata[f"tokenizer.ggml.{key}"] = metadata[f"tokenizer.ggml.{key}"][:keep] + new
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"][:keep] + [1] * (3 + len(words))
    theirs = transformers_backend(metadata)
    assert build_tokenizer(metadata).encode(text).ids == theirs.encode(text, add_special_tokens=False).ids


def test_sentencepiece_without_space_prefix():
    ids = build_tokenizer(spm_metadata(add_space_prefix=False)).encode("hello").ids
    assert ids != build_tokenizer(spm_metadata()).encode("hello").ids
    assert Tokenizer.from_gguf_metadata(spm_metadata(add_space_prefix=False)).decode(ids) == "hello"


@pytest.mark.parametrize("text", ["<s>", "a</s>b", "<unk>", "<0x41>", "<s><s>"])
def test_sentencepiece_merges_never_make_control_or_byte_tokens(text):
    tokenizer = Tokenizer.from_gguf_metadata(spm_metadata())
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.control_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == text
    backend = build_tokenizer(spm_metadata())
    backend.encode_special_tokens = True
    assert tokenizer.control_ids.isdisjoint(backend.encode(text).ids)


def test_digits_are_cut_off_as_the_model_does_only_when_asked():
    metadata = byte_metadata("smollm", "\n\n", "12")
    text = "\n\n12"
    followed = [build_tokenizer(metadata, as_transformers=flag).encode(text).tokens for flag in (True, False)]
    assert followed == [["Ċ", "Ċ", "12"], ["ĊĊ", "1", "2"]]
    assert build_tokenizer(metadata | {"tokenizer.ggml.pre": "starcoder"}).encode(text).tokens == ["ĊĊ", "1", "2"]


def test_deepseek_splits_digits_by_three_and_keeps_its_control_tokens():
    metadata = byte_metadata("deepseek-v3", "1234", marked=(("<｜User｜>", 3),))
    backend = build_tokenizer(metadata)
    assert backend.encode("1234").tokens == ["123", "4"]
    assert backend.encode("<｜User｜>").ids == [len(metadata["tokenizer.ggml.tokens"]) - 1]


def test_marked_tokens():
    metadata = byte_metadata("qwen2", marked=(("<|x|>", 3), ("<think>", 4), ("<|unused|>", 5)))
    added = build_tokenizer(metadata).get_added_tokens_decoder()
    assert {token.content: token.special for token in added.values()} == {"<|x|>": True, "<think>": False}


def test_unknown_pre_tokenizer_is_refused_by_name():
    for name in ("default", "some-new-one"):
        with pytest.raises(LoadError, match=name) as caught:
            build_tokenizer(byte_metadata(name))
        assert all(known in caught.value.message for known in PRE_TOKENIZERS)


def test_missing_pre_tokenizer_is_refused():
    with pytest.raises(LoadError, match=r"tokenizer\.ggml\.pre"):
        build_tokenizer(byte_metadata(None))


@pytest.mark.parametrize("model", ["t5", "bert", "rwkv", None])
def test_unknown_model_is_refused_by_name(model):
    with pytest.raises(LoadError, match=str(model)):
        build_tokenizer(byte_metadata() | {"tokenizer.ggml.model": model})


@pytest.mark.parametrize(
    ("key", "value"),
    [("tokens", None), ("merges", None), ("merges", ["a b c"]), ("merges", ["nothere a"]), ("token_type", [1, 1])],
)
def test_damaged_metadata_is_refused(key, value):
    with pytest.raises(LoadError):
        build_tokenizer(byte_metadata() | {f"tokenizer.ggml.{key}": value})


def test_bos_default_follows_the_kind():
    assert Tokenizer.from_gguf_metadata(spm_metadata()).add_bos
    assert not Tokenizer.from_gguf_metadata(spm_metadata(add_bos_token=False)).add_bos
    assert not Tokenizer.from_gguf_metadata(byte_metadata("llama-bpe")).add_bos


def test_special_token_out_of_range_is_refused():
    with pytest.raises(LoadError, match="99999"):
        Tokenizer.from_gguf_metadata(spm_metadata(eos_token_id=99999))
