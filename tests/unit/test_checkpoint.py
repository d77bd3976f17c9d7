"""Both kinds of model files give the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from doubles.tiny_checkpoints import FAMILIES, tiny_model, write_folder, write_gguf
from slipstream.core.errors import LoadError
from slipstream.loading.checkpoint import Checkpoint, open_checkpoint


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_and_folder_agree(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    one: Checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model))
    two: Checkpoint = open_checkpoint(write_folder(tmp_path / "m", model))
    assert (one.kind, two.kind) == ("gguf", "safetensors")
    assert sorted(one.names()) == sorted(two.names())
    for name in one.names():
        assert torch.equal(one.tensor(name), two.tensor(name))
        assert one.raw(name).tobytes() == two.raw(name).tobytes()
        assert (one.shape(name), one.format(name), one.nbytes(name)) == (
            two.shape(name),
            two.format(name),
            two.nbytes(name),
        )
    assert one.eos_token_ids == two.eos_token_ids == (2,)
    left, right = one.describe(), two.describe()
    assert {key for key in left if left[key] != right[key]} == {"path", "kind"} | (
        {"architecture", "model_type"} if family == "mistral" else set()  # without a window it is a Llama
    )
    assert left["parameters"] == sum(weight.numel() for weight in model.weights.values())
    assert two.metadata == {}
    assert one.metadata["general.architecture"]


def test_description_of_mixed_formats(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    path = write_gguf(tmp_path / "m.gguf", model, formats=lambda name, shape: "Q8_0" if "embd" in name else "Q4_1")
    description = open_checkpoint(path).describe()
    sizes = {"F32": 4 * 64 * 5, "Q8_0": 128 * 64 // 32 * 34}
    matrices = [w for name, w in model.weights.items() if w.ndim == 2 and "embed" not in name]
    sizes["Q4_1"] = sum(weight.numel() for weight in matrices) // 32 * 20
    assert description["bytes_per_format"] == sizes
    assert description["bytes"] == sum(sizes.values())
    assert (description["architecture"], description["context_length"]) == ("LlamaForCausalLM", 256)


def test_end_ids_template_and_sampling_of_gguf(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 2,
        "tokenizer.ggml.padding_token_id": 3,
        "tokenizer.chat_template": "{{ messages }}",
        "tokenizer.chat_template.tool_use": "other",
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.5,
        "general.sampling.mirostat": 0,
    }
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_model(), metadata=metadata))
    assert checkpoint.eos_token_ids == (2, 7)
    assert checkpoint.chat_template == "{{ messages }}"
    assert checkpoint.generation_config == {
        "eos_token_id": [2, 7],
        "bos_token_id": 1,
        "pad_token_id": 3,
        "temperature": 0.5,
        "top_k": 20,
        "repetition_penalty": 1.5,
    }
    assert checkpoint.metadata["general.sampling.mirostat"] == 0


def test_closed_gguf(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_model()))
    tensor = checkpoint.tensor("model.norm.weight")
    before = tensor.clone()
    checkpoint.close()
    assert torch.equal(tensor, before)
    with pytest.raises(LoadError, match="closed"):
        checkpoint.tensor("model.norm.weight")
    with pytest.raises(LoadError, match="no tensor 'nope'"):
        checkpoint.shape("nope")


class TestOpening:
    def test_a_folder_with_one_gguf(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", tiny_model())
        assert open_checkpoint(tmp_path).path == path
        (tmp_path / "config.json").write_text("{}")  # some repositories keep one beside their GGUF files
        assert open_checkpoint(str(tmp_path)).kind == "gguf"

    def test_a_folder_with_a_split_gguf(self, tmp_path: Path) -> None:
        first = write_gguf(tmp_path / "m.gguf", tiny_model(), per_part=5)
        assert open_checkpoint(tmp_path).path == first
        assert open_checkpoint(tmp_path / "m-00003-of-00005.gguf").path == first

    def test_safetensors_win_over_a_gguf_beside_them(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "m.gguf", tiny_model())
        assert open_checkpoint(write_folder(tmp_path, tiny_model())).kind == "safetensors"

    def test_several_ggufs(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            write_gguf(tmp_path / f"{name}.gguf", tiny_model())
        with pytest.raises(LoadError, match=r"several GGUF models \(a\.gguf, b\.gguf\)"):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize(
        ("file", "problem"),
        [
            ("model.safetensors", "give the folder"),
            ("pytorch_model.bin", "pickle files"),
            ("consolidated.00.pth", "pickle files"),
            ("model.onnx", "not a GGUF file"),
        ],
    )
    def test_other_files(self, tmp_path: Path, file: str, problem: str) -> None:
        (tmp_path / file).write_bytes(b"content")
        with pytest.raises(LoadError, match=problem):
            open_checkpoint(tmp_path / file)

    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(LoadError, match="no such file"):
            open_checkpoint(tmp_path / "nothing")
        with pytest.raises(LoadError, match="no weights"):
            open_checkpoint(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(LoadError, match=r"no config\.json beside"):
            open_checkpoint(tmp_path)

    def test_a_folder_of_pickles(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(LoadError, match="as safetensors"):
            open_checkpoint(tmp_path)
