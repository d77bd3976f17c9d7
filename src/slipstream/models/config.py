"""Reading config.json: typed access with errors that name the file's field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.core.errors import LoadError
from slipstream.layers.rope import RopeConfig

MOST_LAYERS = 4096
"""No model has more; a damaged file may say so."""


class ConfigReader:
    """A config.json (or what a GGUF file says, under the same names)."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def integer(self, name: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise LoadError(f"config: {name} must be a positive whole number, not {value!r}")
        if value > most:
            raise LoadError(f"config: {name} is {value}, more than the {most} that any model has")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LoadError(f"config: {name} must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise LoadError(f"config: {name} must be true or false, not {value!r}")
        return value

    def window(self, default: int = 4096) -> int:
        """`sliding_window`: 0 where it is null (full attention); an absent field is what transformers takes it for."""
        value = self.values.get("sliding_window", default)
        return 0 if value is None else self.integer("sliding_window", default)

    def layer_numbers(self, name: str) -> set[int]:
        """A list of layer numbers; an absent field is empty."""
        value = self.values.get(name)
        if value is None:
            return set()
        if not isinstance(value, list) or not all(type(each) is int for each in value):
            raise LoadError(f"config: {name} must be a list of layer numbers, not {value!r}")
        return set(value)

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse a value that this family does not implement; an absent field is fine."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            raise LoadError(f"config: {name} is {value!r}; implemented is {', '.join(map(repr, allowed))}")

    def rope(self, head_dim: int, default_theta: float) -> RopeConfig:
        """Rope settings from `rope_parameters` (new layout) or `rope_theta` and `rope_scaling` (old layout)."""
        self.expect("partial_rotary_factor", 1, 1.0)
        scaling = self._mapping("rope_scaling") | self._mapping("rope_parameters")
        if nested := [name for name, value in scaling.items() if isinstance(value, dict)]:
            raise LoadError(f"config: rope settings of their own for {', '.join(nested)} are not implemented")
        inner = ConfigReader(scaling)
        inner.expect("partial_rotary_factor", 1, 1.0)
        theta = inner.number("rope_theta", self.number("rope_theta", default_theta))
        max_position = self.integer("max_position_embeddings")
        if scaling.get("rope_type", scaling.get("type")) in ("yarn", "llama3"):
            original = self.values.get("original_max_position_embeddings")
            if original is not None:  # where both are given, transformers takes the outer one
                scaling["original_max_position_embeddings"] = original
            scaling.setdefault("original_max_position_embeddings", max_position)
        scaling.pop("rope_theta", None)
        return RopeConfig(theta, head_dim, max_position, scaling)

    def _mapping(self, name: str) -> dict[str, Any]:
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise LoadError(f"config: {name} must be an object, not {value!r}")
        return dict(value or {})
