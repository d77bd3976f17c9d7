"""Hugging Face folders: tensors in place, what lies beside them, and damaged ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from doubles.tiny_checkpoints import tiny_model, write_folder
from slipstream.core.errors import LoadError
from slipstream.loading.safetensors_folder import SafetensorsFolder


def refusal(folder: Path) -> str:
    with pytest.raises(LoadError) as caught:
        SafetensorsFolder(folder)
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    return message


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors(tmp_path: Path, shards: int, dtype: torch.dtype) -> None:
    model = tiny_model("qwen2")
    folder = SafetensorsFolder(write_folder(tmp_path, model, shards=shards, dtype=dtype))
    assert sorted(folder.names()) == sorted(model.weights)
    assert folder.config == model.config
    for name, weight in model.weights.items():
        expected = weight.to(dtype)
        tensor = folder.tensor(name)
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected)
        assert folder.shape(name) == tuple(weight.shape)
        assert folder.format(name) == {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
        assert folder.nbytes(name) == expected.nbytes
        assert folder.raw(name).tobytes() == expected.view(torch.uint8).numpy().tobytes()


def test_other_formats(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny_model())
    tensors = {
        "f8": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "bool": torch.ones(3, dtype=torch.bool),
        "i64": torch.ones((), dtype=torch.int64),
        "empty": torch.ones(0, 5),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    assert {name: (folder.format(name), folder.nbytes(name)) for name in folder.names()} == {
        "f8": ("F8_E4M3", 16),
        "bool": ("BOOL", 3),
        "i64": ("I64", 8),
        "empty": ("F32", 0),
    }
    assert folder.raw("i64").tobytes() == struct.pack("<q", 1)


def test_memory_does_not_grow(tmp_path: Path) -> None:
    write_folder(tmp_path, tiny_model())
    size = 64 << 20
    save_file({f"w{i}": torch.zeros(size // 8) for i in range(4)}, tmp_path / "model.safetensors")  # 128 MiB in all
    before = anonymous_bytes()
    folder = SafetensorsFolder(tmp_path)
    tensors = [folder.tensor(name) for name in folder.names()]
    assert sum(float(tensor.sum()) for tensor in tensors) == 0
    assert anonymous_bytes() - before < 8 << 20
    assert folder.tensor("w0").data_ptr() == tensors[0].data_ptr()
    folder.close()
    assert float(tensors[3][-1]) == 0  # the map outlives the folder
    with pytest.raises(LoadError, match="closed"):
        folder.tensor("w0")


def test_unknown_name(tmp_path: Path) -> None:
    folder = SafetensorsFolder(write_folder(tmp_path, tiny_model()))
    for call in (folder.tensor, folder.shape, folder.format, folder.nbytes, folder.raw):
        with pytest.raises(LoadError, match="no tensor 'nope'"):
            call("nope")


class TestBeside:
    def test_nothing(self, tmp_path: Path) -> None:
        folder = SafetensorsFolder(write_folder(tmp_path, tiny_model()))
        assert folder.generation_config == {}
        assert folder.chat_template is None
        assert not folder.has_tokenizer
        assert folder.eos_token_ids == (2,)

    def test_end_ids_from_both_configs(self, tmp_path: Path) -> None:
        model = tiny_model(eos_token_id=[5, 6])
        write_folder(tmp_path, model, generation_config={"eos_token_id": [6, 9], "top_k": 20}, tokenizer={})
        folder = SafetensorsFolder(tmp_path)
        assert folder.eos_token_ids == (5, 6, 9)
        assert folder.generation_config["top_k"] == 20
        assert folder.has_tokenizer

    def test_no_end_ids(self, tmp_path: Path) -> None:
        assert SafetensorsFolder(write_folder(tmp_path, tiny_model(eos_token_id=None))).eos_token_ids == ()

    @pytest.mark.parametrize("value", ["</s>", [2, None], True])
    def test_odd_end_ids(self, tmp_path: Path, value: Any) -> None:
        assert "eos_token_id" in refusal(write_folder(tmp_path, tiny_model(eos_token_id=value)))

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("plain", "plain"),
            ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
            ([{"name": "tool_use", "template": "t"}], None),
            (None, None),
        ],
    )
    def test_chat_template(self, tmp_path: Path, value: Any, expected: str | None) -> None:
        write_folder(tmp_path, tiny_model(), tokenizer_config={"chat_template": value})
        assert SafetensorsFolder(tmp_path).chat_template == expected
        (tmp_path / "chat_template.jinja").write_text("file wins ü", encoding="utf-8")
        assert SafetensorsFolder(tmp_path).chat_template == "file wins ü"

    def test_odd_chat_templates(self, tmp_path: Path) -> None:
        write_folder(tmp_path, tiny_model(), tokenizer_config={"chat_template": 3})
        assert "chat_template must be" in refusal(tmp_path)
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
        assert "chat_template.jinja: cannot be read" in refusal(tmp_path)


class TestDamage:
    @pytest.mark.parametrize("file", ["config", "generation_config", "tokenizer_config", "model.safetensors.index"])
    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"{", "not valid JSON"),
            (b"\xff\xfe\x00", "not valid JSON"),
            (b"[" * 100_000, "not valid JSON"),
            (b"[1]", "JSON object, not a list"),
        ],
    )
    def test_json(self, tmp_path: Path, file: str, content: bytes, problem: str) -> None:
        path = write_folder(tmp_path, tiny_model(), shards=2) / f"{file}.json"
        path.write_bytes(content)
        assert problem in (message := refusal(tmp_path))
        assert str(path) in message

    def test_missing_config(self, tmp_path: Path) -> None:
        (write_folder(tmp_path, tiny_model()) / "config.json").unlink()
        assert "config.json: the file is missing" in refusal(tmp_path)

    def test_truncations(self, tmp_path: Path) -> None:
        file = write_folder(tmp_path, tiny_model()) / "model.safetensors"
        content = file.read_bytes()
        header = 8 + struct.unpack("<Q", content[:8])[0]
        for size in (0, 4, 8, 9, header // 2, header, header + 100, len(content) - 1):
            file.write_bytes(content[:size])
            assert "model.safetensors: not a readable safetensors file" in refusal(tmp_path), size

    def test_changed_headers(self, tmp_path: Path) -> None:
        file = write_folder(tmp_path, tiny_model()) / "model.safetensors"
        content = file.read_bytes()
        for position in range(400):
            for value in (0, 0x7D, 0xFF):
                file.write_bytes(content[:position] + bytes([value]) + content[position + 1 :])
                try:
                    folder = SafetensorsFolder(tmp_path)
                    for name in folder.names():
                        folder.tensor(name)
                except LoadError:
                    continue

    def test_missing_shard(self, tmp_path: Path) -> None:
        (write_folder(tmp_path, tiny_model(), shards=2) / "model-00002-of-00002.safetensors").unlink()
        assert "model-00002-of-00002.safetensors: this file is missing" in refusal(tmp_path)

    def test_truncated_shard(self, tmp_path: Path) -> None:
        file = write_folder(tmp_path, tiny_model(), shards=2) / "model-00002-of-00002.safetensors"
        file.write_bytes(file.read_bytes()[:-5])
        assert "model-00002-of-00002.safetensors: not a readable" in refusal(tmp_path)

    @pytest.mark.parametrize(
        ("where", "problem"),
        [
            ({"extra": "model-00001-of-00002.safetensors"}, "'extra' is not in this file"),
            ({"extra": "../model-00001-of-00002.safetensors"}, "not a .safetensors file beside it"),
            ({"extra": "pytorch_model.bin"}, "not a .safetensors file beside it"),
            ({"extra": 3}, "not a .safetensors file beside it"),
        ],
    )
    def test_index(self, tmp_path: Path, where: dict[str, Any], problem: str) -> None:
        path = write_folder(tmp_path, tiny_model(), shards=2) / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"] |= where
        path.write_text(json.dumps(index))
        assert problem in refusal(tmp_path)

    def test_index_without_a_map(self, tmp_path: Path) -> None:
        path = write_folder(tmp_path, tiny_model(), shards=2) / "model.safetensors.index.json"
        path.write_text("{}")
        assert "weight_map" in refusal(tmp_path)

    def test_pickles(self, tmp_path: Path) -> None:
        (write_folder(tmp_path, tiny_model()) / "model.safetensors").unlink()
        assert "there are no weights" in refusal(tmp_path)
        (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
        assert "refused; get or convert the model as safetensors" in refusal(tmp_path)
