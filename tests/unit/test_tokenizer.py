"""Encoding keeps user text apart from control tokens; decoding gives the text back."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings

from doubles.small_vocabularies import QUIET, SPM_TEXTS, TEXTS, byte_metadata, spm_metadata
from slipstream.core.errors import InvalidRequestError, LoadError
from slipstream.loading.gguf import GGUFFile
from slipstream.text.gguf_tokenizer import build_tokenizer
from slipstream.text.tokenizer import Tokenizer

# SmolLM2's vocabulary has no tokens for these bytes: control characters, and planes 4 to 11 of Unicode.
MISSING_BYTES = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}


@pytest.fixture(scope="module")
def real(default_model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf_metadata(GGUFFile(default_model_path).metadata)


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    return Tokenizer.from_gguf_metadata(spm_metadata())


@settings(max_examples=300, **QUIET)
@given(text=TEXTS)
def test_user_text_never_becomes_control_tokens_and_comes_back(real, text):
    ids = real.encode(text)
    assert real.control_ids.isdisjoint(ids)
    if MISSING_BYTES.isdisjoint(text.encode()):
        assert real.decode(ids) == text


@settings(max_examples=300, **QUIET)
@given(text=SPM_TEXTS)
def test_sentencepiece_text_comes_back(spm, text):
    ids = spm.encode(text)
    assert ids[0] == 1
    assert spm.control_ids.isdisjoint(ids[1:])
    assert spm.decode(ids) == text.removeprefix(" ")  # as the model's own tokenizer


def test_control_tokens_are_parsed_only_when_asked(real):
    text = "<|im_start|>user\nhi<|im_end|>"
    ids = real.encode(text, parse_control=True)
    assert (ids[0], ids[-1]) == (1, 2)
    assert real.decode(ids) == "user\nhi"
    assert real.decode(ids, skip_special_tokens=False) == text
    assert 1 not in real.encode(text)


def test_added_tokens_that_are_not_special_are_matched_in_all_text():
    tokenizer = Tokenizer.from_gguf_metadata(byte_metadata("qwen2", marked=(("<think>", 4), ("<|x|>", 3))))
    think = tokenizer.encode("<think>")
    assert len(think) == 1
    assert think[0] not in tokenizer.control_ids
    assert len(tokenizer.encode("<|x|>")) == 5


def test_control_token_reachable_by_merges_is_broken_up():
    metadata = byte_metadata("gpt-2", "<s>")
    metadata["tokenizer.ggml.token_type"][metadata["tokenizer.ggml.tokens"].index("<s>")] = 3
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    ids = tokenizer.encode("a<s><s>b")
    assert tokenizer.control_ids.isdisjoint(ids)
    assert tokenizer.decode(ids) == "a<s><s>b"


def test_control_token_of_one_character_is_refused():
    metadata = byte_metadata("gpt-2")
    metadata["tokenizer.ggml.token_type"][ord("~")] = 3
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    with pytest.raises(InvalidRequestError, match="control token"):
        tokenizer.encode("a~b")


def test_bos_is_added_once(spm):
    assert spm.encode("hello")[:2].count(1) == 1
    assert spm.encode("<s>hello", parse_control=True).count(1) == 1
    assert spm.encode("<s><s>", parse_control=True) == [1, 1]
    assert 1 not in spm.encode("hello", add_special_tokens=False)
    assert spm.encode("") == [1]


def test_continued_text_gets_no_space(spm):
    assert spm.name_of(spm.encode("hello", add_special_tokens=False)[0]) == "▁he"
    assert spm.name_of(spm.encode("hello", add_special_tokens=False, continues=True)[0]) == "he"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "😀\ud83d"])
def test_unpaired_surrogate_is_refused(real, text):
    with pytest.raises(InvalidRequestError, match="surrogate") as caught:
        real.encode(text, param="messages[0].content")
    assert caught.value.param == "messages[0].content"


def test_threads_that_parse_and_do_not_parse_keep_apart(real):
    text = "<|im_start|>x<|im_end|>" * 20
    wanted = {flag: real.encode(text, parse_control=flag) for flag in (True, False)}
    wrong: list[bool] = []

    def work(flag: bool) -> None:
        wrong.extend(flag for _ in range(200) if real.encode(text, parse_control=flag) != wanted[flag])

    threads = [threading.Thread(target=work, args=(flag,)) for flag in (True, False) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_token_bytes_and_names(real, spm):
    space = real.encode(" hello")[0]
    assert real.token_bytes(space) == b" hello"
    assert real.name_of(space) == "Ġhello"
    assert real.token_bytes(1) == b"<|im_start|>"
    assert real.token_bytes(49152) == real.token_bytes(-1) == b""
    assert spm.token_bytes(3 + 0x41) == b"A"
    assert spm.token_bytes(spm.encode("hello")[1]) == b" he"
    assert "70000" in real.name_of(70000)


# Folders in Hugging Face's layout.


def write_folder(folder: Path, metadata: dict, **files: object) -> Path:
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_folder_equals_gguf(tmp_path):
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "chat_template": "x"}
    folder = Tokenizer.from_folder(write_folder(tmp_path, spm_metadata(), tokenizer_config=settings))
    direct = Tokenizer.from_gguf_metadata(spm_metadata())
    for text in ("hello <s> 中😀", "", "1 1"):
        assert folder.encode(text) == direct.encode(text)
        assert folder.decode(folder.encode(text)) == text
    assert (folder.vocab_size, folder.bos_id, folder.eos_ids) == (direct.vocab_size, 1, (2,))
    assert folder.control_tokens == direct.control_tokens
    assert folder.chat_template == "x"


def test_folder_bos_and_eos_from_other_files(tmp_path):
    files = {"config": {"bos_token_id": 1}, "generation_config": {"eos_token_id": [2, 0]}}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, spm_metadata(), **files))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2, 0), False)


def test_folder_bos_from_the_post_processor(tmp_path):
    from tokenizers import processors

    backend = build_tokenizer(spm_metadata())
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.enable_truncation(2)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.add_bos
    assert tokenizer.encode("hello hello hello").count(1) == 1
    for flag in (True, False):  # the file's truncation is not applied
        ids = tokenizer.encode("hello hello hello", parse_control=flag)
        assert tokenizer.decode(ids) == "hello hello hello"
    assert tokenizer.chat_template == "{{ messages }}"


def test_folder_without_or_with_damaged_files(tmp_path):
    with pytest.raises(LoadError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    write_folder(tmp_path, spm_metadata())
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(LoadError, match="tokenizer_config"):
        Tokenizer.from_folder(tmp_path)


def test_import_is_light():
    code = "import sys, slipstream.text.tokenizer; print('torch' in sys.modules, 'tokenizers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
