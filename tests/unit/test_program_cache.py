"""Programs and packed weights are made once; a damaged file is made anew, and two at once do no harm."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from doubles.tiny_checkpoints import tiny_model, write_folder, write_gguf
from slipstream.devices.program_cache import KEPT, Options, Prepared, prepare
from slipstream.kernels.cpu.packing import unpack
from slipstream.loading.checkpoint import open_checkpoint
from slipstream.loading.weight_source import CheckpointSource, content_key
from slipstream.models.registry import build_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", tiny_model("qwen2"), formats="Q4_1")


def made(path: Path, **options: str) -> Prepared:
    checkpoint = open_checkpoint(path)
    model = build_model(checkpoint.config)
    return prepare(model, model.cache_specs(), CheckpointSource(checkpoint, model), Options(**options))


def files(tmp_path: Path, pattern: str) -> list[Path]:
    return sorted((tmp_path / "cache" / "programs").glob(pattern))


def check(found: Prepared, path: Path) -> None:
    """What is in memory has the checkpoint's values."""
    checkpoint = open_checkpoint(path)
    data = found.weights.data
    for weight in found.program.weights:
        packed = data[weight.offset : weight.offset + weight.size]
        wanted = checkpoint.tensor(weight.name).float().numpy()
        np.testing.assert_array_equal(unpack(packed, weight.kind, weight.outputs, weight.inputs), wanted)
    for vector in found.program.vectors:
        if not vector.name.startswith("buffer."):
            values = data[vector.offset :][: 4 * vector.count].view(np.float32)
            np.testing.assert_array_equal(values, checkpoint.tensor(vector.name).float().numpy())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("form", ["Q4_0", "Q8_0", "F16"])
def test_packed_weights_are_the_checkpoints(tmp_path: Path, family: str, form: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model(family, tie_word_embeddings=form == "Q4_0"), formats=form)
    check(made(path), path)


def test_a_folder_is_packed_too(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "folder", tiny_model("qwen3_moe"), shards=2)
    check(made(path), path)


def test_the_second_start_finds_both_files(path: Path, tmp_path: Path) -> None:
    first = made(path)
    assert first.origin == "packed now"
    second = made(path)
    assert second.origin == "from the cache"
    assert second.text == first.text
    np.testing.assert_array_equal(second.weights.data, first.weights.data)
    assert not files(tmp_path, ".writing-*")


def test_a_warm_start_neither_records_nor_lowers(path: Path) -> None:
    made(path)
    script = f"""
import sys
from pathlib import Path
from slipstream.devices.program_cache import Options, prepare
from slipstream.loading.checkpoint import open_checkpoint
from slipstream.loading.weight_source import CheckpointSource
from slipstream.models.registry import build_model
import slipstream.devices.native_cpu
checkpoint = open_checkpoint(Path({str(path)!r}))
model = build_model(checkpoint.config)
found = prepare(model, model.cache_specs(), CheckpointSource(checkpoint, model), Options())
assert found.origin == "from the cache"
assert not {{"slipstream.devices.record", "slipstream.devices.lower"}} & set(sys.modules)
assert all(parameter.is_meta for parameter in model.parameters())
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("damage", ["cut", "longer", "header", "empty"])
@pytest.mark.parametrize("which", ["*.weights", "*.program"])
def test_a_damaged_file_is_made_anew(path: Path, tmp_path: Path, damage: str, which: str) -> None:
    first = made(path)
    (file,) = files(tmp_path, which)
    whole = file.read_bytes()
    broken = {"cut": whole[:-70], "longer": whole + b"more\n", "header": b"x" + whole[1:], "empty": b""}[damage]
    file.write_bytes(broken)
    assert made(path).text == first.text
    assert file.read_bytes() == whole
    check(made(path), path)


def test_a_changed_checkpoint_is_packed_anew(path: Path, tmp_path: Path) -> None:
    made(path)
    before = content_key(path)
    write_gguf(path, tiny_model("qwen2", seed=1), formats="Q4_1")
    assert content_key(path) != before
    check(made(path), path)


def test_options_have_programs_of_their_own(path: Path, tmp_path: Path) -> None:
    assert "kind=bf16" in made(path).text
    assert "cache 0 heads=2 width=16 kind=int8" in made(path, cache_kind="int8").text
    assert len(files(tmp_path, "*.program")) == 2
    assert len(files(tmp_path, "*.weights")) == 1  # the cache's kind does not change the weights


def test_a_folder_that_cannot_be_written_to_is_no_obstacle(path: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    found = made(path)
    assert "not writable" in found.origin
    check(found, path)


def test_two_starts_at_once(path: Path, tmp_path: Path) -> None:
    found: list[Prepared] = []
    threads = [threading.Thread(target=lambda: found.append(made(path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for each in found:
        check(each, path)
    assert not files(tmp_path, ".writing-*")
    assert len(files(tmp_path, "*")) == 2


def aged(file: Path, days: float) -> None:
    """Let a file have been used so many days before it was."""
    then = file.stat().st_mtime - days * 24 * 3600
    os.utime(file, (then, then))


def test_what_was_not_used_for_longest_is_removed(path: Path, tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "other.gguf", tiny_model("llama"), formats="Q4_0")
    made(other)
    theirs = set(files(tmp_path, "*"))
    for file in theirs:
        aged(file, 90)
    first = made(path)
    (used,) = set(files(tmp_path, "*.weights")) - theirs
    for seed in range(1, 6):
        for file in set(files(tmp_path, "*")) - theirs:
            aged(file, 1)
        write_gguf(path, tiny_model("qwen2", seed=seed), formats="Q4_1")
        made(path)
        made(path, cache_kind="int8")  # another program over the same weights
    mine = set(files(tmp_path, "*")) - theirs
    for suffix, kept in KEPT.items():
        assert sum(file.suffix == suffix for file in mine) <= kept
    assert theirs <= set(files(tmp_path, "*"))
    assert made(path).origin == "from the cache"
    # What is open stays readable: the first weights are in memory, their file is long gone.
    assert used not in mine
    assert first.weights.data.sum() > 0


def test_files_that_were_never_finished_are_removed(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "programs"
    folder.mkdir(parents=True)
    for name, days in ((".writing-old", 2.0), (".writing-new", 0.1)):
        (folder / name).write_bytes(b"half")
        aged(folder / name, days)
    made(path)
    assert [file.name for file in files(tmp_path, ".writing-*")] == [".writing-new"]


@pytest.mark.parametrize(("quantization", "kind"), [("int8", "q8_0"), ("int4", "q4_1")])
def test_plain_weights_are_quantised_on_request(tmp_path: Path, quantization: str, kind: str) -> None:
    path = write_folder(tmp_path / "folder", tiny_model("llama"))
    found = made(path, quantization=quantization)
    kinds = {weight.name: weight.kind for weight in found.program.weights}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == kind
    assert kinds["lm_head.weight"] == "q8_0"
    assert found.program.data_size < made(path).program.data_size / 2
