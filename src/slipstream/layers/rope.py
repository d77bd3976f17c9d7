"""Frequencies of the rotary embedding, with the scalings that published checkpoints use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slipstream.core.errors import LoadError

KNOWN_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "factors")

_POSITIVE = (
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
)
"""Settings that must be numbers above 0 where they are given; null counts as not given."""


@dataclass(frozen=True)
class RopeConfig:
    """`theta`, the number of rotated dimensions, and the scaling as config.json gives it: `rope_type`, its numbers."""

    theta: float
    dimensions: int
    max_position: int
    scaling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return str(self.scaling.get("rope_type") or self.scaling.get("type") or "default")

    def __post_init__(self) -> None:
        if self.kind not in KNOWN_ROPE_TYPES:
            raise LoadError(f"rope scaling {self.kind!r} is not known; known are {', '.join(KNOWN_ROPE_TYPES)}")
        needed = {
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": ("original_max_position_embeddings",),
            "factors": ("factors",),
        }.get(self.kind, ())
        missing = [name for name in needed if self.scaling.get(name) is None]
        if missing:
            raise LoadError(f"rope scaling {self.kind!r} lacks {', '.join(missing)}")
        if not self.theta > 1:
            raise LoadError(f"rope_theta must be greater than 1, not {self.theta}")
        if self.dimensions % 2:
            raise LoadError(f"rotary embedding needs an even head width, not {self.dimensions}")
        for name in (*_POSITIVE, "mscale", "mscale_all_dim"):
            value = self.scaling.get(name)
            if value is None or (value == 0 and name not in _POSITIVE):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise LoadError(f"rope scaling: {name} must be a number above 0, not {value!r}")
        if self.kind == "llama3" and self.scaling["low_freq_factor"] >= self.scaling["high_freq_factor"]:
            raise LoadError("rope scaling: low_freq_factor must be less than high_freq_factor")

    @property
    def longest(self) -> int:
        """Positions that the scaling reaches: YaRN is often switched on without a larger `max_position_embeddings`."""
        if self.kind != "yarn" or self.scaling.get("factor") is None:
            return self.max_position
        return max(self.max_position, int(self.scaling["factor"] * self.scaling["original_max_position_embeddings"]))


def rope_frequencies(config: RopeConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [dimensions / 2] in float32, and the factor on cosines and sines."""
    scaling = config.scaling
    base = 1.0 / (config.theta ** (torch.arange(0, config.dimensions, 2, dtype=torch.float32) / config.dimensions))
    match config.kind:
        case "linear":
            return base / float(scaling["factor"]), 1.0
        case "llama3":
            return _llama3(base, scaling), 1.0
        case "yarn":
            return _yarn(base, config)
        case "factors":
            factors = torch.tensor(scaling["factors"], dtype=torch.float32)
            if factors.shape != base.shape:
                raise LoadError(f"rope factors have {factors.numel()} values where {base.numel()} are needed")
            return base / factors, 1.0
        case _:
            return base, 1.0


def _llama3(base: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    factor, old_length = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / base
    blend = (old_length / wavelength - low) / (high - low)
    blended = (1 - blend) * base / factor + blend * base
    scaled = torch.where(wavelength > old_length / low, base / factor, blended)
    return torch.where(wavelength < old_length / high, base, scaled)


def _yarn(base: Tensor, config: RopeConfig) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): a ramp over dimensions between kept and interpolated frequencies."""
    scaling = config.scaling
    old_length = float(scaling["original_max_position_embeddings"])
    factor = float(scaling.get("factor") or config.max_position / old_length)

    def dimension_of(rotations: float) -> float:
        return config.dimensions * math.log(old_length / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low = dimension_of(float(scaling.get("beta_fast") or 32))
    high = dimension_of(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dimensions - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(config.dimensions // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    return base / factor * (1 - keep) + base * keep, _yarn_attention(scaling, factor)


def _yarn_attention(scaling: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    top, bottom = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if top and bottom:
        return mscale(float(top)) / mscale(float(bottom))
    return mscale(1.0)
