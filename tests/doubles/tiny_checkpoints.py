"""Small random models, written as GGUF files (by the gguf package) and as Hugging Face folders.

The weights carry Hugging Face names. GGUF names come from the gguf package's own table, and the rows of llama's query
and key weights are reordered as llama.cpp's converter does, so that reading is checked against somebody else's code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_GGUF_ARCH = {"mistral": "llama", "qwen3_moe": "qwen3moe"}


@dataclass(frozen=True)
class TinyModel:
    """A Hugging Face config and its weights, float32, under Hugging Face names (experts one by one)."""

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]


def tiny_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A config of `family` whose sizes are multiples of 32, so that every 32-value block format can store it."""
    config: dict[str, Any] = {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 128,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": family == "qwen2",
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if family == "qwen3_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return config | changes


def tiny_model(family: str = "llama", *, seed: int = 0, **changes: Any) -> TinyModel:
    """Random weights for `tiny_config(family, **changes)`; norms are near one."""
    config = tiny_config(family, **changes)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in _shapes(config):
        values = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * values if "norm" in name else values * shape[-1] ** -0.5
    return TinyModel(config, weights)


def _shapes(config: dict[str, Any]) -> Iterable[tuple[str, tuple[int, ...]]]:
    hidden, vocab, head = config["hidden_size"], config["vocab_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        attention = prefix + "self_attn."
        for proj, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{attention}{proj}.weight", (rows, hidden)
            if config["attention_bias"]:
                yield f"{attention}{proj}.bias", (rows,)
        yield attention + "o_proj.weight", (hidden, queries)
        if config["model_type"].startswith("qwen3"):
            yield attention + "q_norm.weight", (head,)
            yield attention + "k_norm.weight", (head,)
        yield from _feed_forward(prefix + "mlp.", config)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _feed_forward(prefix: str, config: dict[str, Any]) -> Iterable[tuple[str, tuple[int, ...]]]:
    hidden, inner, places = config["hidden_size"], config["intermediate_size"], [prefix]
    if "num_experts" in config:
        inner = config["moe_intermediate_size"]
        places = [f"{prefix}experts.{expert}." for expert in range(config["num_experts"])]
        yield prefix + "gate.weight", (config["num_experts"], hidden)
    for place in places:
        yield place + "gate_proj.weight", (inner, hidden)
        yield place + "up_proj.weight", (inner, hidden)
        yield place + "down_proj.weight", (hidden, inner)


def write_folder(
    folder: Path, model: TinyModel, *, dtype: torch.dtype = torch.float32, shards: int = 1, **files: Any
) -> Path:
    """Write `model` as a Hugging Face folder. `files` maps a stem such as generation_config to a JSON value."""
    folder.mkdir(parents=True, exist_ok=True)
    for stem, value in {"config": model.config, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(value))
    weights = {name: values.to(dtype).contiguous() for name, values in model.weights.items()}
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(weights)}
    for file in sorted(set(where.values())):
        save_file({n: w for n, w in weights.items() if where[n] == file}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(w.nbytes for w in weights.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_gguf(
    path: Path,
    model: TinyModel,
    *,
    formats: str | Callable[[str, tuple[int, ...]], str] = "F32",
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
    vocabulary: list[str] | None = None,
    per_part: int = 0,
) -> Path:
    """Write `model` as a GGUF file, as llama.cpp's converter would.

    `formats` names the format of the matrices (vectors stay F32), or chooses one from GGUF name and shape. `metadata`
    adds or replaces keys. With `per_part` the model is split into parts of that many tensors, and the first part's
    path is returned.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    arch = _GGUF_ARCH.get(model.config["model_type"], model.config["model_type"])
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=per_part)
    keys = _metadata(arch, model.config) | _vocabulary(model.config, vocabulary) | (metadata or {})
    for key, value in keys.items():
        _add(writer, key, value)
    for name, values in _gguf_tensors(arch, model).items():
        chosen = formats(name, values.shape) if callable(formats) else formats
        kind = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else chosen]
        plain = kind in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
        stored = _k_blocks(values, kind.name) if kind.name in _K_SCALES else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, stored, raw_dtype=None if plain else kind)
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-*-of-*.gguf"))


# Where the float16 scales of a block of 256 stand, and what makes values of about one: (position, size).
_K_SCALES = {"Q4_K": ((0, 2.4e-3), (2, 2.2e-3)), "Q5_K": ((0, 1.2e-3), (2, 1.1e-3)), "Q6_K": ((208, 7e-4),)}


def _k_blocks(values: np.ndarray, name: str) -> np.ndarray:
    """Random blocks of a K-quant, whose values are about as large as `values`; gguf cannot quantise to these."""
    kind = gguf.GGMLQuantizationType[name]
    count, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(values.size)
    blocks = draw.integers(0, 256, (*values.shape[:-1], values.shape[-1] // count, size), dtype=np.uint8)
    for at, scale in _K_SCALES[name]:
        scales = (draw.uniform(0.5, 1.5, blocks.shape[:-1]) * scale * float(values.std())).astype("<f2")
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def _metadata(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }
    if "num_experts" in config:
        keys |= {"expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"]}
        keys |= {"expert_feed_forward_length": config["moe_intermediate_size"]}
    if config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    return {f"{arch}.{key}": value for key, value in keys.items()}


def _vocabulary(config: dict[str, Any], vocabulary: list[str] | None) -> dict[str, Any]:
    tokens = vocabulary or [f"t{i}" for i in range(config["vocab_size"])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def _gguf_tensors(arch: str, model: TinyModel) -> dict[str, np.ndarray]:
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(kinds[arch], model.config["num_hidden_layers"])
    out: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, weight in model.weights.items():
        values = weight.numpy()
        if arch == "llama" and (match := re.search(r"\.([qk])_proj\.", name)):
            which = "num_attention_heads" if match[1] == "q" else "num_key_value_heads"
            values = _interleave(values, model.config[which])
        merged = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        target = table.get_name(merged, try_suffixes=(".weight", ".bias"))
        if merged == name:
            out[target] = np.ascontiguousarray(values)
        else:
            stacks.setdefault(target, []).append(values)
    return out | {name: np.stack(values) for name, values in stacks.items()}


def _interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's `permute`: the two halves of each head's rows become neighbours."""
    rows = values.shape[0] // heads // 2
    return values.reshape(heads, 2, rows, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
