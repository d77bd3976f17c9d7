"""GGUF models under Hugging Face names: every tensor and setting comes back as it was before conversion."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from doubles.tiny_checkpoints import FAMILIES, tiny_model, write_gguf
from slipstream.core.errors import LoadError
from slipstream.loading.gguf_checkpoint import GGUFCheckpoint

# What a config says by leaving it out.
DEFAULTS = {"attention_bias": False, "mlp_bias": False, "pad_token_id": None, "rope_scaling": None}
DEFAULTS |= {"sliding_window": None, "use_sliding_window": False}


def load(
    path: Path, family: str = "llama", *, metadata: dict[str, Any] | None = None, **options: Any
) -> GGUFCheckpoint:
    changes = options.pop("changes", {})
    return GGUFCheckpoint(write_gguf(path / "m.gguf", tiny_model(family, **changes), metadata=metadata, **options))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_family_round_trips(tmp_path: Path, family: str, tied: bool) -> None:
    changes: dict[str, Any] = {"tie_word_embeddings": tied}
    if family == "mistral":
        changes["sliding_window"] = 96
    model = tiny_model(family, **changes)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", model))
    assert sorted(checkpoint.names()) == sorted(model.weights)
    for name, weight in model.weights.items():
        assert checkpoint.shape(name) == tuple(weight.shape)
        assert checkpoint.nbytes(name) == weight.nbytes
        assert torch.equal(checkpoint.tensor(name), weight), name
        assert checkpoint.raw(name).tobytes() == weight.numpy().tobytes(), name
    single = struct.unpack("<f", struct.pack("<f", model.config["rms_norm_eps"]))[0]
    expected = DEFAULTS | model.config | {"rms_norm_eps": single}
    if family == "mistral":
        expected["use_sliding_window"] = True
    assert checkpoint.config == expected


def test_llama_biases_are_reordered_like_their_rows(tmp_path: Path) -> None:
    model = tiny_model("llama", attention_bias=True)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", model))
    assert checkpoint.config["attention_bias"] is True
    assert all(torch.equal(checkpoint.tensor(name), weight) for name, weight in model.weights.items())


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_quantised_rows_move_whole(tmp_path: Path, family: str, kind: str) -> None:
    """Reordering or slicing stored rows gives what quantising the published tensor would have given."""
    import gguf

    model = tiny_model(family)
    checkpoint = GGUFCheckpoint(write_gguf(tmp_path / "m.gguf", model, formats=kind))
    for name, weight in model.weights.items():
        if weight.ndim == 1:
            continue
        quantised = gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
        values = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType[kind])
        assert checkpoint.format(name) == kind
        assert checkpoint.nbytes(name) == quantised.nbytes
        assert checkpoint.raw(name).tobytes() == quantised.tobytes(), name
        np.testing.assert_array_equal(checkpoint.tensor(name).float().numpy(), values, err_msg=name)


@pytest.mark.slow
def test_default_model_equals_transformers(default_model_path: Path) -> None:
    """Against transformers' own reader (below `from_pretrained`, which asks for one more package)."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    ours = GGUFCheckpoint(default_model_path)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_dict(ours.config))
    theirs = load_gguf_checkpoint(str(default_model_path), return_tensors=True, model_to_load=model)
    assert set(theirs["tensors"]) == set(ours.names())
    for name, values in theirs["tensors"].items():
        assert torch.equal(ours.tensor(name), values), name
    same = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"]
    same += ["rms_norm_eps", "max_position_embeddings", "vocab_size", "rope_theta", "model_type", "architectures"]
    same += ["bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"]
    config = theirs["config"]
    assert {key: ours.config[key] for key in same if key in config} == {
        key: config[key] for key in same if key in config
    }
    assert len(set(same) & set(config)) >= 12


class TestRope:
    def test_linear(self, tmp_path: Path) -> None:
        keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
        assert load(tmp_path, metadata=keys).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}

    def test_linear_of_old_files(self, tmp_path: Path) -> None:
        config = load(tmp_path, metadata={"llama.rope.scale_linear": 2.0}).config
        assert config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}

    def test_yarn(self, tmp_path: Path) -> None:
        keys = {
            "type": "yarn",
            "factor": 4.0,
            "original_context_length": 64,
            "yarn_beta_fast": 16.0,
            "attn_factor": 0.5,
        }
        keys = {f"qwen3.rope.scaling.{key}": value for key, value in keys.items()}
        scaling = load(tmp_path, "qwen3", metadata=keys).config["rope_scaling"]
        attention = scaling.pop("attention_factor")
        assert attention == pytest.approx(0.5 * (0.1 * np.log(4) + 1))
        assert scaling == {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 16.0,
        }

    def test_factors_of_llama_3(self, tmp_path: Path) -> None:
        factors = np.array([1, 1, 2, 4, 8, 8, 8, 8], np.float32)
        checkpoint = load(tmp_path, extra_tensors={"rope_freqs.weight": factors})
        assert checkpoint.config["rope_scaling"] == {"rope_type": "factors", "factors": factors.tolist()}
        assert not any("rope" in name for name in checkpoint.names())

    def test_none_is_spelled_out_in_some_files(self, tmp_path: Path) -> None:
        assert load(tmp_path, metadata={"llama.rope.scaling.type": "none"}).config["rope_scaling"] is None

    @pytest.mark.parametrize(
        ("keys", "problem"),
        [
            ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not read"),
            ({"llama.rope.scaling.type": "yarn"}, "factor must be a positive number"),
            (
                {
                    "llama.rope.scaling.type": "yarn",
                    "llama.rope.scaling.factor": 2.0,
                    "llama.rope.scaling.yarn_ext_factor": 0.5,
                },
                "yarn_ext_factor is not read",
            ),
            ({"llama.rope.dimension_count": 8}, "partial rotation"),
        ],
    )
    def test_refusals(self, tmp_path: Path, keys: dict[str, Any], problem: str) -> None:
        with pytest.raises(LoadError, match=problem):
            load(tmp_path, metadata=keys)


class TestConfig:
    def test_head_dim_falls_back_to_the_hidden_size(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", tiny_model())
        content = path.read_bytes().replace(b"llama.attention.key_length", b"llama.attention.xxx_length")
        path.write_bytes(content.replace(b"llama.attention.value_length", b"llama.attention.xxxxx_length"))
        assert GGUFCheckpoint(path).config["head_dim"] == 16

    def test_per_layer_lists_of_equal_numbers(self, tmp_path: Path) -> None:
        config = load(tmp_path, metadata={"llama.feed_forward_length": [96, 96]}).config
        assert config["intermediate_size"] == 96
        with pytest.raises(LoadError, match="differs from layer to layer"):
            load(tmp_path, metadata={"llama.feed_forward_length": [96, 64]})

    def test_expert_weights_norm(self, tmp_path: Path) -> None:
        config = load(tmp_path, "qwen3_moe", metadata={"qwen3moe.expert_weights_norm": False}).config
        assert config["norm_topk_prob"] is False

    @pytest.mark.parametrize(
        ("keys", "problem"),
        [
            ({"general.architecture": "gemma3"}, r"'gemma3' is not .*llama, qwen2, qwen3, qwen3moe"),
            ({"llama.expert_count": 8}, "with experts"),
            ({"llama.block_count": "two"}, "block_count must be a positive whole number, not 'two'"),
            ({"llama.attention.head_count": 0}, "head_count must be a positive"),
            ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "must be a number, not nan"),
            ({"llama.attention.value_length": 8}, "must be equal"),
        ],
    )
    def test_refusals_name_the_file(self, tmp_path: Path, keys: dict[str, Any], problem: str) -> None:
        with pytest.raises(LoadError, match=problem) as caught:
            load(tmp_path, metadata=keys)
        assert str(tmp_path / "m.gguf") in str(caught.value)

    def test_a_missing_key(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", tiny_model())
        path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.xxxxx_count"))
        with pytest.raises(LoadError, match="block_count must be a positive whole number, not absent"):
            GGUFCheckpoint(path)

    @pytest.mark.parametrize("name", ["blk.0.attn_qkv.weight", "mystery.weight", "blk.0.ffn_up_exps.weight"])
    def test_a_tensor_without_a_place(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(LoadError, match=f"tensor '{name}' is not one that"):
            load(tmp_path, extra_tensors={name: np.zeros((4, 32), np.float32)})
