"""A GGUF file's metadata as a Hugging Face config and generation config.

Keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp's gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slipstream.core.errors import LoadError
from slipstream.loading.gguf_header import GGUFTensor

# general.architecture to model_type and class.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
# Ids after which a reply is over: end of sequence, of a turn, and of a message that calls a tool.
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def architecture(metadata: Mapping[str, Any]) -> str:
    """`general.architecture`, refused by name if it is not one that is read."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise LoadError("the file does not name its architecture (general.architecture)")
    if arch not in ARCHITECTURES:
        raise LoadError(
            f"architecture {arch!r} is not one that is read from GGUF; these are: {', '.join(ARCHITECTURES)}"
        )
    return arch


def huggingface_config(
    metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], rope_factors: list[float] | None
) -> dict[str, Any]:
    """A Hugging Face config of the model: what a config.json would say, as far as the file tells.

    `rope_factors` are the values of `rope_freqs.weight`, [head_dim / 2], by which the rotation's frequencies are
    divided; they become a `rope_scaling` of type "factors". Raises LoadError for what is missing, of a wrong type, or
    would change the model's output without being expressible here.
    """
    arch = architecture(metadata)
    read = _Reader(metadata, arch)
    model_type, class_name = ARCHITECTURES[arch]
    window = read.integer("attention.sliding_window", 0)
    if window and arch == "llama":  # Llama itself has no window; what has one in this architecture is Mistral
        model_type, class_name = "mistral", "MistralForCausalLM"
    heads, hidden = read.integer("attention.head_count"), read.integer("embedding_length")
    head_dim = read.integer("attention.key_length", hidden // heads)
    layers = read.integer("block_count")
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": read.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": read.integer("feed_forward_length", 0 if arch == "qwen3moe" else None),
        "hidden_act": "silu",
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(read, rope_factors),
        "max_position_embeddings": read.integer("context_length"),
        "vocab_size": _vocab_size(tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "sliding_window": window or None,
        "use_sliding_window": bool(window),
        **_token_ids(metadata),
    }
    if window and model_type != "mistral":
        config["max_window_layers"] = 0
    if not config["intermediate_size"]:
        config["intermediate_size"] = read.integer("expert_feed_forward_length")
    _refuse_what_would_change_tokens(read, arch, head_dim)
    if arch == "qwen3moe":
        config |= _experts(read)
    return config


def generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation_config.json would say: token ids (`eos_token_id` a list) and the file's sampling settings."""
    ids = _token_ids(metadata)
    out: dict[str, Any] = {"eos_token_id": list(end_token_ids(metadata))}
    out |= {key: ids[key] for key in ("bos_token_id", "pad_token_id") if ids[key] is not None}
    for key, name in _SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if value is not None:
            out[name] = value
    return out


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids of the tokens that end a reply: eos, eot and eom, without repetitions."""
    values = (metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS)
    return tuple(dict.fromkeys(value for value in values if type(value) is int))


def chat_template(metadata: Mapping[str, Any]) -> str | None:
    """The default chat template, or None."""
    for key in ("tokenizer.chat_template", "tokenizer.chat_template.default"):
        template = metadata.get(key)
        if isinstance(template, str):
            return template
    return None


class _Reader:
    """Typed access to the keys of one architecture; names are given without its prefix."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self.metadata = metadata
        self.arch = arch

    def value(self, name: str) -> Any:
        value = self.metadata.get(f"{self.arch}.{name}")
        if isinstance(value, list) and value:
            # Some converters write a number per layer; only equal ones fit the models that are read.
            if any(item != value[0] for item in value):
                raise LoadError(f"{self.arch}.{name} differs from layer to layer, which is not read")
            return value[0]
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.value(name)
        value = default if value is None else value
        if type(value) is not int or value < 0 or (value == 0 and default is None):
            raise LoadError(f"{self.arch}.{name} must be a positive whole number, not {_shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.value(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise LoadError(f"{self.arch}.{name} must be a number, not {_shown(value)}")
        return float(value)


def _shown(value: Any) -> str:
    return "absent" if value is None else repr(value)[:60]


def _vocab_size(tensors: Mapping[str, GGUFTensor]) -> int:
    """Rows of the embedding: `<arch>.vocab_size` and the token list may lack rows that pad it."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise LoadError("the file has no token embedding (token_embd.weight)")
    return embedding.shape[0]


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int | None]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in names.items()}


def _rope_scaling(read: _Reader, factors: list[float] | None) -> dict[str, Any] | None:
    kind = read.value("rope.scaling.type") or "none"
    factor = read.number("rope.scaling.factor", read.number("rope.scale_linear", 0.0))
    if read.value("rope.scaling.type") is None and factor not in (0.0, 1.0):
        kind = "linear"  # what the oldest files mean by a bare factor
    if factors is not None:
        if kind != "none" and factor not in (0.0, 1.0):
            raise LoadError(f"rope scaling of type {kind!r} together with rope_freqs.weight is not read")
        return {"rope_type": "factors", "factors": factors}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise LoadError(f"rope scaling of type {kind!r} is not read from GGUF; linear, yarn and rope_freqs.weight are")
    if factor <= 0:
        raise LoadError(f"{read.arch}.rope.scaling.factor must be a positive number, not {factor}")
    return _yarn(read, factor) if kind == "yarn" else {"rope_type": "linear", "factor": factor}


def _yarn(read: _Reader, factor: float) -> dict[str, Any]:
    for name, neutral in (("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if read.number(f"rope.scaling.{name}", neutral) != neutral:
            raise LoadError(f"{read.arch}.rope.scaling.{name} is not read")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = read.integer("rope.scaling.original_context_length", 0)
    if original:
        scaling["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        if read.value(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = read.number(f"rope.scaling.yarn_{name}")
    # llama.cpp multiplies its own attention factor by this one; transformers takes the product.
    own = read.number("rope.scaling.attn_factor", 1.0) * read.number("rope.scaling.yarn_attn_factor", 1.0)
    if own != 1.0:
        scaling["attention_factor"] = own * (0.1 * math.log(factor) + 1.0)
    return scaling


def _refuse_what_would_change_tokens(read: _Reader, arch: str, head_dim: int) -> None:
    rotated = read.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise LoadError(f"{arch}.rope.dimension_count is {rotated} of {head_dim}; partial rotation is not read")
    value_dim = read.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise LoadError(f"{arch}.attention.value_length is {value_dim}, the keys' is {head_dim}; they must be equal")
    if arch != "qwen3moe" and read.integer("expert_count", 0):
        raise LoadError(f"a {arch} model with experts ({arch}.expert_count) is not read from GGUF")


def _experts(read: _Reader) -> dict[str, Any]:
    return {
        "num_experts": read.integer("expert_count"),
        "num_experts_per_tok": read.integer("expert_used_count"),
        "moe_intermediate_size": read.integer("expert_feed_forward_length"),
        # llama.cpp always renormalises for this architecture unless the file says otherwise
        "norm_topk_prob": bool(read.metadata.get(f"{read.arch}.expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
