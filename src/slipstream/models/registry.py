"""Which model file builds which published architecture."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from slipstream.core.damage import reading
from slipstream.core.errors import LoadError
from slipstream.models.decoder import Decoder

ARCHITECTURES = {
    "LlamaForCausalLM": "slipstream.models.llama",
    "MistralForCausalLM": "slipstream.models.mistral",
    "Qwen2ForCausalLM": "slipstream.models.qwen2",
    "Qwen3ForCausalLM": "slipstream.models.qwen3",
    "Qwen3MoeForCausalLM": "slipstream.models.qwen3_moe",
}


def build_model(values: Mapping[str, Any]) -> Decoder:
    """The model that a config.json asks for, with empty parameters. Raises LoadError naming an unknown architecture."""
    names = values.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise LoadError(f"config: architectures must be a list of names, not {names!r}")
    for name in names:
        if name in ARCHITECTURES:
            with reading(f"config of {name}"):
                model: Decoder = importlib.import_module(ARCHITECTURES[name]).build(values)
                return model
    asked = ", ".join(names) or f"model_type {values.get('model_type')!r}"
    raise LoadError(f"architecture {asked} is not implemented; implemented are {', '.join(ARCHITECTURES)}")
