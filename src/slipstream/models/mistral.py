"""Mistral 7B and what shares its layout: Llama with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.models.config import ConfigReader
from slipstream.models.decoder import Decoder
from slipstream.models.llama import decoder_config


def build(values: Mapping[str, Any]) -> Decoder:
    """A Mistral model from its config.json; parameters are empty. `sliding_window: null` means full attention."""
    return Decoder(decoder_config(values, window=ConfigReader(values).window()))
