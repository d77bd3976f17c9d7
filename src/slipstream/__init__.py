"""Slipstream: large language models at the lowest latency a chip allows."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from slipstream.core.config import EngineConfig
    from slipstream.core.errors import SlipstreamError
    from slipstream.core.outputs import CompletionOutput, RequestOutput
    from slipstream.core.sampling_params import SamplingParams
    from slipstream.engine.async_engine import AsyncEngine
    from slipstream.engine.llm import LLM

_LAZY = {
    "LLM": "slipstream.engine.llm",
    "AsyncEngine": "slipstream.engine.async_engine",
    "SamplingParams": "slipstream.core.sampling_params",
    "EngineConfig": "slipstream.core.config",
    "RequestOutput": "slipstream.core.outputs",
    "CompletionOutput": "slipstream.core.outputs",
    "SlipstreamError": "slipstream.core.errors",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "RequestOutput",
    "SamplingParams",
    "SlipstreamError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # Importing torch takes a second, so the public names load on first use.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
