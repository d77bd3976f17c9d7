"""Qwen2 and Qwen2.5: biases on queries, keys and values; later layers may have a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.core.errors import LoadError
from slipstream.models.config import MOST_LAYERS, ConfigReader
from slipstream.models.decoder import Decoder, LayerConfig
from slipstream.models.llama import decoder_config


def layer_windows(values: Mapping[str, Any]) -> list[int]:
    """The window of each layer: from `layer_types`, else from `use_sliding_window` and `max_window_layers`."""
    read = ConfigReader(values)
    count = read.integer("num_hidden_layers", most=MOST_LAYERS)
    window = read.window() if read.flag("use_sliding_window") else 0
    kinds = values.get("layer_types")
    if kinds is None:
        first = read.number("max_window_layers", 28)
        return [window if index >= first else 0 for index in range(count)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in known for kind in kinds):
        raise LoadError(f"config: layer_types must name full_attention or sliding_attention for each of {count} layers")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def build(values: Mapping[str, Any]) -> Decoder:
    """A Qwen2 model from its config.json; parameters are empty."""
    config = decoder_config(values)
    layers = tuple(LayerConfig(window=window) for window in layer_windows(values))
    return Decoder(replace(config, layers=layers, qkv_bias=True, output_bias=False))
