"""Small random models of transformers, saved to a folder as published checkpoints are, and the settings to test."""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

ORIGINAL = 96
"""`original_max_position_embeddings` of the rope scalings: far less than the sequences tested."""

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL}


@dataclass(frozen=True)
class Variant:
    """A family with some settings. `changes` are fields of its config.json, `rope` those of `rope_parameters`."""

    name: str
    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)


def _variants() -> list[Variant]:
    sliding = {"use_sliding_window": True, "sliding_window": 37}
    return [
        Variant("llama", "llama"),
        Variant("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
        Variant("llama-llama3", "llama", rope=LLAMA3),
        Variant("llama-linear", "llama", rope={"rope_type": "linear", "factor": 3.0}),
        Variant("llama-yarn", "llama", rope=YARN),
        Variant("llama-yarn-mscale", "llama", rope=YARN | {"mscale": 0.8, "mscale_all_dim": 0.3}),
        Variant("mistral", "mistral", {"sliding_window": 75}),
        Variant("mistral-full", "mistral", {"sliding_window": None}),
        Variant("qwen2", "qwen2"),
        Variant("qwen2-window", "qwen2", sliding | {"max_window_layers": 1}),
        Variant("qwen2-yarn-factor", "qwen2", rope=YARN | {"attention_factor": 1.3}),
        Variant("qwen3", "qwen3"),
        Variant("qwen3-window", "qwen3", sliding | {"max_window_layers": 2, "attention_bias": True}),
        Variant("qwen3-yarn", "qwen3", rope=YARN | {"beta_fast": 8.0, "beta_slow": 2.0}),
        Variant("qwen3-yarn-smooth", "qwen3", rope=YARN | {"truncate": False}),
        Variant("qwen3_moe", "qwen3_moe", {"norm_topk_prob": True}),
        Variant("qwen3_moe-raw-shares", "qwen3_moe", {"norm_topk_prob": False}),
        Variant("qwen3_moe-sparse-step", "qwen3_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2}),
        Variant("qwen3_moe-mlp-only", "qwen3_moe", {"mlp_only_layers": [1], **sliding}),
    ]


VARIANTS = {variant.name: variant for variant in _variants()}


def config_values(variant: Variant, shape: int) -> dict[str, Any]:
    """config.json's values: widths drawn by (variant, `shape`); shapes 0, 1, 2 have 1, 2, 4 query heads per group."""
    draw = random.Random(zlib.crc32(variant.name.encode()) + shape)
    groups = (1, 2, 4)[shape % 3]
    heads = draw.choice((1, 2, 3)) * groups
    head_dim = draw.choice((8, 16, 24, 32))
    hidden = heads * draw.choice([width for width in (8, 12, 20, 28) if width != head_dim])
    values: dict[str, Any] = {
        "model_type": variant.family,
        "vocab_size": draw.randrange(90, 200),
        "hidden_size": hidden,
        "intermediate_size": draw.randrange(40, 120),
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // groups,
        "head_dim": head_dim,
        "rms_norm_eps": draw.choice((1e-5, 1e-6)),
        "max_position_embeddings": ORIGINAL * 8,
        "tie_word_embeddings": shape % 2 == 1,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice((1e3, 1e4, 1e6)), **variant.rope},
    }
    if variant.family == "qwen3_moe":
        values |= {"num_experts": draw.choice((3, 6, 8)), "num_experts_per_tok": draw.choice((1, 2, 3))}
        values |= {"moe_intermediate_size": draw.randrange(16, 40)}
    return values | variant.changes


def make_reference(values: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """The transformers model in float32. No parameter is left at a value (0, 1) that could hide its absence."""
    config = AutoConfig.for_model(**values, attn_implementation="eager", experts_implementation="eager")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                sharper = 2.0 if "q_proj" in name or "gate.weight" in name else 1.0
                parameter.copy_(sharper * noise * parameter.shape[-1] ** -0.5)
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Write a folder as transformers does: safetensors under the published names, experts one by one."""
    model.save_pretrained(folder)
    return folder


def publish_old_rope(folder: Path) -> None:
    """Rewrite config.json as checkpoints were published before `rope_parameters`: `rope_theta` and `rope_scaling`."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    path.write_text(json.dumps(values))


@torch.no_grad()
def expected(model: PreTrainedModel, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """(hidden states after the last norm [T, hidden], logits [T, vocab]) of one sequence."""
    hidden = model.model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    return hidden, model.lm_head(hidden)
