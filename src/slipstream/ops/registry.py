"""One table of operators: who defines them, and which chip runs which implementation.

An op is a `torch.library` operator `slipstream::name`. Its reference is plain PyTorch and is registered for every
device (a chip without its own version runs or lowers the reference); a chip's own version is registered for that chip's
dispatch key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_LIBRARY = torch.library.Library("slipstream", "DEF")
_REFERENCE_KEY = "CompositeExplicitAutograd"


@dataclass
class Op:
    """One operator. `implementations` maps a dispatch key ("CPU", "CUDA", ...) to the function that runs there."""

    name: str
    schema: str
    reference: Callable[..., Any]
    implementations: dict[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def call(self) -> Callable[..., Any]:
        """The dispatching callable, `torch.ops.slipstream.<name>.default`."""
        overload: Callable[..., Any] = getattr(torch.ops.slipstream, self.name).default
        return overload

    def who_runs(self, dispatch_key: str) -> str:
        """The name of what runs on a device: its own implementation, or "reference"."""
        own = self.implementations.get(dispatch_key)
        return "reference" if own is None else f"{own.__module__}.{own.__qualname__}"


OPS: dict[str, Op] = {}


def define(schema: str, *, fake: Callable[..., Any]) -> Callable[[Function], Function]:
    """Define `slipstream::<schema>` with the decorated function as its reference on every device.

    `fake` computes output shapes and dtypes only. The decorator returns the dispatching callable.
    """

    def register(reference: Function) -> Function:
        name = schema.split("(", 1)[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, reference, _REFERENCE_KEY)
        torch.library.register_fake(f"slipstream::{name}", fake, lib=_LIBRARY)
        OPS[name] = Op(name, schema, reference)
        return cast(Function, OPS[name].call)

    return register


def implement(name: str, dispatch_key: str) -> Callable[[Function], Function]:
    """Register the decorated function as what a device runs for op `name`."""

    def register(function: Function) -> Function:
        _LIBRARY.impl(name, function, dispatch_key)
        OPS[name].implementations[dispatch_key] = function
        return function

    return register
