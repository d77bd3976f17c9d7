"""Qwen3-MoE: Qwen3 attention, and a softmax-routed mixture of experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.core.errors import LoadError
from slipstream.models.config import ConfigReader
from slipstream.models.decoder import Decoder, ExpertConfig, LayerConfig
from slipstream.models.llama import decoder_config


def build(values: Mapping[str, Any]) -> Decoder:
    """A Qwen3-MoE model from its config.json; parameters are empty."""
    read = ConfigReader(values)
    experts = ExpertConfig(
        experts=read.integer("num_local_experts", values.get("num_experts"), most=2**16),
        top_k=read.integer("num_experts_per_tok"),
        intermediate=read.integer("moe_intermediate_size"),
        renormalise=read.flag("norm_topk_prob"),
    )
    if experts.top_k > experts.experts:
        raise LoadError(f"config: num_experts_per_tok {experts.top_k} is more than num_experts {experts.experts}")
    config = decoder_config(values)
    window = read.window() if read.flag("use_sliding_window") else 0
    dense = read.layer_numbers("mlp_only_layers")
    step = read.integer("decoder_sparse_step", 1)
    layers = tuple(
        LayerConfig(window=window, experts=None if index in dense or (index + 1) % step else experts)
        for index in range(len(config.layers))
    )
    return Decoder(replace(config, layers=layers, head_norm=True))
