"""Checkpoints that do not fit are refused by name; what may be left over is; stored weights are used in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from doubles.tiny_checkpoints import FAMILIES, TinyModel, tiny_config, tiny_model, write_folder
from slipstream.core.errors import LoadError
from slipstream.loading.checkpoint import open_checkpoint
from slipstream.loading.weights import load_weights
from slipstream.models.decoder import Decoder
from slipstream.models.registry import build_model


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint.config)
    load_weights(model, checkpoint, dtype)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_missing_tensor_is_named(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, num_hidden_layers=1)
    load(write_folder(tmp_path / "whole", model))
    for name in model.weights:
        rest = {other: weight for other, weight in model.weights.items() if other != name}
        with pytest.raises(LoadError, match=f"lacks tensors.*{name}"):
            load(write_folder(tmp_path / name, TinyModel(model.config, rest)))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.self_attn.q_proj.weight_scale",
        "lm_head.bias",
        "score.weight",
    ],
)
def test_left_over_tensor_is_named(name: str, tmp_path: Path) -> None:
    model = tiny_model()
    model.weights[name] = torch.ones(3)
    with pytest.raises(LoadError, match=f"no place for: {name}"):
        load(write_folder(tmp_path, model))


def test_fourth_expert_of_three_is_left_over(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    config = model.config | {"num_experts": 3}
    with pytest.raises(LoadError, match=r"no place for: model\.layers\.0\.mlp\.experts\.3\.down_proj"):
        load(write_folder(tmp_path, TinyModel(config, model.weights)))


@pytest.mark.parametrize("family", FAMILIES)
def test_misshapen_tensor_is_named(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, num_hidden_layers=1)
    for index, (name, weight) in enumerate(model.weights.items()):
        wrong = weight.T.contiguous() if weight.ndim > 1 and weight.shape[0] != weight.shape[1] else weight[:-1]
        with pytest.raises(LoadError, match=f"{name} has shape"):
            load(write_folder(tmp_path / str(index), TinyModel(model.config, model.weights | {name: wrong})))


def test_many_misfits_are_counted(tmp_path: Path) -> None:
    model = tiny_model(num_hidden_layers=2)
    few = {name: weight for name, weight in model.weights.items() if "layers.1" not in name}
    with pytest.raises(LoadError, match="and 3 more"):
        load(write_folder(tmp_path, TinyModel(model.config, few)))


def test_stored_frequencies_may_be_left_over(tmp_path: Path) -> None:
    model = tiny_model()
    model.weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    model.weights["model.rotary_emb.inv_freq"] = torch.ones(8)
    assert (load(write_folder(tmp_path, model)).inv_freq[1:] < 1).all()


def test_tied_head_may_be_left_over_and_is_not_used(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    embeddings = model.weights["model.embed_tokens.weight"]
    model.weights["lm_head.weight"] = torch.zeros_like(embeddings)
    loaded = load(write_folder(tmp_path, model))
    hidden = torch.randn(16, 64)
    assert torch.equal(loaded.logits(hidden), hidden @ embeddings.T)


def test_an_untied_head_may_not_be_missing(tmp_path: Path) -> None:
    model = tiny_model(tie_word_embeddings=True)
    with pytest.raises(LoadError, match=r"lacks tensors.*lm_head\.weight"):
        load(write_folder(tmp_path, TinyModel(model.config | {"tie_word_embeddings": False}, model.weights)))


@pytest.mark.parametrize(
    ("architectures", "match"),
    [
        (["GPT2LMHeadModel"], "GPT2LMHeadModel is not implemented; implemented are LlamaForCausalLM"),
        (["LlamaForSequenceClassification"], "LlamaForSequenceClassification"),
        ([], "model_type 'llama'"),
        (None, "model_type 'llama'"),
        ("LlamaForCausalLM", "must be a list"),
        ([7], "must be a list"),
    ],
)
def test_unknown_architecture(architectures: Any, match: str) -> None:
    with pytest.raises(LoadError, match=match):
        build_model(tiny_config() | {"architectures": architectures})


BAD_VALUES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_size": 0}, "hidden_size"),
    ("llama", {"hidden_size": -64}, "hidden_size"),
    ("llama", {"hidden_size": "64"}, "hidden_size"),
    ("llama", {"hidden_size": 64.0}, "hidden_size"),
    ("llama", {"hidden_size": None}, "hidden_size"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers"),
    ("llama", {"num_key_value_heads": 3}, "4 heads cannot share 3"),
    ("llama", {"head_dim": None, "hidden_size": 66}, "hidden_size 66 is not a multiple"),
    ("llama", {"head_dim": 15}, "even head width"),
    ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"attention_bias": "yes"}, "attention_bias"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
    ("llama", {"max_position_embeddings": None}, "max_position_embeddings"),
    ("llama", {"rope_theta": "10000"}, "rope_theta"),
    ("llama", {"rope_theta": 0}, "rope_theta"),
    ("llama", {"rope_theta": -1.0}, "rope_theta"),
    ("llama", {"rope_parameters": {"rope_theta": "big"}}, "rope_theta"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters must be an object"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "of their own for full_attention"),
    ("mistral", {"sliding_window": 0}, "sliding_window"),
    ("mistral", {"sliding_window": "all"}, "sliding_window"),
    ("qwen2", {"use_sliding_window": 1}, "use_sliding_window"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
    ("qwen2", {"layer_types": "full_attention"}, "layer_types"),
    ("qwen2", {"layer_types": [[], []]}, "layer_types"),
    ("qwen3", {"max_window_layers": "1"}, "max_window_layers"),
    ("qwen3_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than num_experts 4"),
    ("qwen3_moe", {"num_experts": None}, "num_local_experts"),
    ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
]


@pytest.mark.parametrize(("family", "changes", "match"), BAD_VALUES)
def test_bad_config_value_is_named(family: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(LoadError, match=match):
        build_model(tiny_config(family) | changes)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BAD_ROPE: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not known"),
    ({"type": "longrope"}, "'longrope' is not known"),
    ({"rope_type": "mrope", "mrope_section": [1, 2]}, "'mrope' is not known"),
    ({"rope_type": "linear"}, "lacks factor"),
    ({"rope_type": "linear", "factor": "2"}, "factor must be a number"),
    ({"rope_type": "linear", "factor": 0}, "factor must be a number above 0"),
    ({"rope_type": "linear", "factor": float("nan")}, "factor must be a number above 0"),
    ({**LLAMA3, "low_freq_factor": None}, "lacks low_freq_factor"),
    ({**LLAMA3, "high_freq_factor": 1.0}, "low_freq_factor must be less"),
    ({"rope_type": "yarn", "factor": 4.0, "beta_fast": "32"}, "beta_fast"),
    ({"rope_type": "yarn", "factor": 4.0, "mscale": "1", "mscale_all_dim": 1.0}, "mscale"),
]


@pytest.mark.parametrize(("scaling", "match"), BAD_ROPE)
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_bad_rope_scaling_is_named(field: str, scaling: dict[str, Any], match: str) -> None:
    with pytest.raises(LoadError, match=match):
        build_model(tiny_config() | {field: scaling})


@pytest.mark.parametrize(("family", "windows"), [("mistral", [4096, 4096]), ("qwen2", [0, 4096])])
def test_absent_window_is_what_transformers_takes_it_for(family: str, windows: list[int]) -> None:
    model = build_model(tiny_config(family, use_sliding_window=True, max_window_layers=1))
    assert [spec.window for spec in model.cache_specs()] == windows
    model = build_model(tiny_config(family, use_sliding_window=True, max_window_layers=1, sliding_window=None))
    assert [spec.window for spec in model.cache_specs()] == [0, 0]


def test_yarn_reaches_beyond_the_positions_in_the_config() -> None:
    """As published: `max_position_embeddings` stays what it was before YaRN."""
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert build_model(tiny_config(rope_scaling=yarn)).max_position == 4 * 256
    original = yarn | {"original_max_position_embeddings": 64}
    assert build_model(tiny_config(rope_scaling=original)).max_position == 256


def mapped_file(address: int) -> str:
    """The file whose map holds this address; empty for private memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line.split(maxsplit=5)[5] if len(line.split()) > 5 else ""
    return ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_weights_of_the_wanted_dtype_stay_in_the_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, tiny_model("qwen2"), dtype=torch.bfloat16)
    file = str(folder / "model.safetensors")
    for name, parameter in load(folder, torch.bfloat16).named_parameters():
        assert mapped_file(parameter.data_ptr()) == file, name
    for name, parameter in load(folder, torch.float32).named_parameters():
        assert mapped_file(parameter.data_ptr()) != file, name


def private_kilobytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_loading_in_place_takes_no_private_memory(tmp_path: Path) -> None:
    model = tiny_model(hidden_size=512, vocab_size=16384, intermediate_size=2048)
    folder = write_folder(tmp_path, model, dtype=torch.bfloat16)
    size = (folder / "model.safetensors").stat().st_size // 1024
    assert size > 30_000
    before = private_kilobytes()
    loaded = load(folder, torch.bfloat16)
    total = sum(float(parameter.float().sum()) for parameter in loaded.parameters())  # every page has been read
    assert total == total
    assert private_kilobytes() - before < size // 4


@pytest.mark.parametrize("family", FAMILIES)
def test_loaded_values_are_the_stored_ones(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    loaded = load(write_folder(tmp_path, model, shards=3))
    parameters = dict(loaded.named_parameters())
    table = loaded.checkpoint_table()
    assert set(table) == set(model.weights)
    for name, slot in table.items():
        stored = parameters[slot.parameter] if slot.index is None else parameters[slot.parameter][slot.index]
        assert torch.equal(stored, model.weights[name]), name
