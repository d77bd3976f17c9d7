"""Settings of an engine, and the only place that reads environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from slipstream.core.errors import ConfigError

ENV_PREFIX = "SLIPSTREAM_"
LEAST_NATIVE_PAGE = 16
"""Tokens that a page of the native step's cache holds at least."""

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str | int, *, param: str) -> int:
    """Bytes from `2GiB`, `500MB`, `1e9` or a plain number. Raises ConfigError naming `param`."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmg]?i?)b?\s*", text.lower())
    if match is None:
        raise ConfigError(f"{param}: {text!r} is not a size; write for example 2GiB or 500MB", param=param)
    size = float(match.group(1)) * _UNITS[match.group(2)]
    if size >= 2**62:
        raise ConfigError(f"{param}: {text!r} is too much", param=param)
    return int(size)


def env_name(setting: str) -> str:
    """The environment twin of a setting: `max_step_ms` is `SLIPSTREAM_MAX_STEP_MS`."""
    return ENV_PREFIX + setting.upper().replace("-", "_")


def env_value(setting: str) -> str | None:
    """The value of a setting's environment twin, or None."""
    return os.environ.get(env_name(setting))


def native_isa() -> str | None:
    """SLIPSTREAM_NATIVE_ISA: a lower instruction set than the processor's best for the native step, for tests."""
    return env_value("native_isa") or None


def keep_tokenizers_serial() -> None:
    """Keep the tokenizers library from using threads of its own, unless the user has set it to."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def cache_dir() -> Path:
    """Where downloaded models and compiled programs live: SLIPSTREAM_CACHE_DIR, else the user's cache folder."""
    own = env_value("cache_dir")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "slipstream"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is started with. Every field is a command-line flag and an environment twin.

    Sizes are in tokens unless the name says otherwise; `cache_memory` is bytes (None: from free memory).
    """

    model: str = ""
    tokenizer: str | None = None
    chat_template: str | None = None
    numerics: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    device: str = "cpu"
    threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_step_ms: float = 100.0
    page_size: int = 32
    kv_cache_dtype: str = "auto"
    cache_memory: int | None = None
    prefix_caching: bool = True
    max_queue: int = 1024
    seed: int | None = None
    generation_config: str = "auto"

    def __post_init__(self) -> None:
        positive = ("max_num_seqs", "max_num_batched_tokens", "max_step_ms", "page_size", "max_queue")
        optional = ("threads", "max_model_len", "cache_memory")
        if isinstance(self.cache_memory, str):
            object.__setattr__(self, "cache_memory", parse_bytes(self.cache_memory, param="cache_memory"))
        for name in (*positive, *optional):
            value = getattr(self, name)
            if name in optional and value is None:
                continue
            kinds = (int, float) if name == "max_step_ms" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 2**62:
                kind = "a number" if name == "max_step_ms" else "a whole number"
                raise ConfigError(f"{name} must be {kind} greater than 0, not {value!r}", param=name)
        if not isinstance(self.prefix_caching, bool):
            raise ConfigError(
                f"prefix_caching must be true or false, not {self.prefix_caching!r}", param="prefix_caching"
            )
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigError(f"seed must be a whole number, not {self.seed!r}", param="seed")
        _one_of("numerics", self.numerics, ("auto", "reference", "native"))
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _one_of("quantization", self.quantization, ("none", "int8", "int4"))
        _one_of("kv_cache_dtype", self.kv_cache_dtype, ("auto", "bf16", "int8"))
        _one_of("device", self.device, ("cpu",))
        _one_of("generation_config", self.generation_config, ("auto", "neutral"))
        if self.page_size & (self.page_size - 1) or self.page_size > 1024:
            raise ConfigError(f"page_size must be a power of two up to 1024, not {self.page_size}", param="page_size")
        self._check_numerics()

    def _check_numerics(self) -> None:
        """Settings that only one kind of numerics has."""
        if self.numerics == "reference":
            for name, neutral in (("quantization", "none"), ("kv_cache_dtype", "auto")):
                if getattr(self, name) != neutral:
                    raise ConfigError(
                        f"{name} must be {neutral} with numerics reference, not {getattr(self, name)}", param=name
                    )
        if self.numerics == "native":
            if self.dtype != "auto":
                raise ConfigError(f"dtype {self.dtype} belongs to numerics reference, not native", param="dtype")
            if self.page_size < LEAST_NATIVE_PAGE:
                raise ConfigError(
                    f"page_size must be {LEAST_NATIVE_PAGE} or more with native numerics, not {self.page_size}",
                    param="page_size",
                )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from plain values; an unknown name is refused."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown engine setting {unknown[0]!r}", param=unknown[0])
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What an HTTP server is started with, the engine aside. Every field is a flag and an environment twin.

    `isolate` runs the engine in a process of its own. `drain_seconds` is how long requests may go on after SIGTERM,
    `stall_seconds` how long a step may take before the engine counts as stalled. `max_body_size` is bytes.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Sequence[str] = ()
    served_model_name: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    max_body_size: int = 16 * 2**20
    isolate: bool = False
    drain_seconds: float = 30.0
    stall_seconds: float = 60.0
    log_level: str = "info"
    log_format: str = "text"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    def __post_init__(self) -> None:
        _whole("port", self.port, 0, 65535)
        _whole("max_body_size", self.max_body_size, 1, 2**40)
        for name, least in (("drain_seconds", 0.0), ("stall_seconds", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 1e6:
                raise ConfigError(f"{name} must be a number from {least:g} to 1000000, not {value!r}", param=name)
        for name in ("api_key", "served_model_name", "cors_origins"):
            values = getattr(self, name)
            if isinstance(values, str) or not all(isinstance(value, str) and value for value in values):
                raise ConfigError(f"{name} must be a list of texts that are not empty", param=name)
            object.__setattr__(self, name, tuple(values))
        if not all(name.isprintable() for name in self.served_model_name):
            raise ConfigError("served_model_name must be made of printable characters", param="served_model_name")
        if not all(key.isascii() and key.isprintable() for key in self.api_key):
            raise ConfigError("api_key must be made of printable ASCII characters", param="api_key")
        _one_of("log_level", self.log_level, ("debug", "info", "warning", "error"))
        _one_of("log_format", self.log_format, ("text", "json"))
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile belong together", param="ssl_certfile")


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, not {value!r}", param=name)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}", param=name)
