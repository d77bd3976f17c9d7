"""Reading config.json: typed access with errors that name the file's field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.core.errors import LoadError
from slipstream.layers.rope import RopeConfig


class ConfigReader:
    """A config.json (or what a GGUF file says, under the same names)."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise LoadError(f"config: {name} must be a positive whole number, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LoadError(f"config: {name} must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.values.get(name, default))

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse a value that this family does not implement; an absent field is fine."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise LoadError(f"config: {name} is {value!r}; implemented is {', '.join(map(repr, allowed))}")

    def rope(self, head_dim: int, default_theta: float) -> RopeConfig:
        """Rope settings from `rope_parameters` (new layout) or `rope_theta` and `rope_scaling` (old layout)."""
        self.expect("partial_rotary_factor", 1, 1.0)
        scaling = dict(self.values.get("rope_scaling") or {})
        scaling.update(self.values.get("rope_parameters") or {})
        theta = scaling.pop("rope_theta", None) or self.number("rope_theta", default_theta)
        max_position = self.integer("max_position_embeddings")
        if scaling.get("rope_type", scaling.get("type")) in ("yarn", "llama3"):
            scaling.setdefault("original_max_position_embeddings", max_position)
        return RopeConfig(float(theta), head_dim, max_position, scaling)
