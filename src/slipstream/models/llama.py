"""Llama 2, 3 and what shares its layout (SmolLM2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.core.errors import LoadError
from slipstream.models.config import MOST_LAYERS, ConfigReader
from slipstream.models.decoder import Decoder, DecoderConfig, LayerConfig


def decoder_config(values: Mapping[str, Any], *, window: int = 0, default_theta: float = 10000.0) -> DecoderConfig:
    """The settings that Llama and Mistral share; every layer has the same `window`."""
    read = ConfigReader(values)
    read.expect("hidden_act", "silu")
    heads, hidden = read.integer("num_attention_heads"), read.integer("hidden_size")
    if values.get("head_dim") is None and hidden % heads:
        raise LoadError(f"config: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head_dim = read.integer("head_dim", hidden // heads, most=2**16)
    bias = read.flag("attention_bias")
    return DecoderConfig(
        vocab=read.integer("vocab_size"),
        hidden=hidden,
        intermediate=read.integer("intermediate_size"),
        heads=heads,
        kv_heads=read.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        eps=read.number("rms_norm_eps", 1e-6),
        rope=read.rope(head_dim, default_theta),
        layers=(LayerConfig(window=window),) * read.integer("num_hidden_layers", most=MOST_LAYERS),
        tied=read.flag("tie_word_embeddings"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=read.flag("mlp_bias"),
    )


def build(values: Mapping[str, Any]) -> Decoder:
    """A Llama model from its config.json; parameters are empty."""
    return Decoder(decoder_config(values))
