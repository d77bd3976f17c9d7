"""Qwen3 dense: norms on query and key heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.models.decoder import Decoder, LayerConfig
from slipstream.models.llama import decoder_config
from slipstream.models.qwen2 import layer_windows


def build(values: Mapping[str, Any]) -> Decoder:
    """A Qwen3 model from its config.json; parameters are empty."""
    config = decoder_config({"head_dim": 128, **values})
    layers = tuple(LayerConfig(window=window) for window in layer_windows(values))
    return Decoder(replace(config, layers=layers, head_norm=True))
