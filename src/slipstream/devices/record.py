"""A model's step as a list of operator calls, recorded once on tensors that have shapes and no values.

The model runs on meta tensors with a prime number of rows, so that every dimension that counts rows shows itself. What
would need a value (`.item()`, a branch on data) raises, since a step must be the same for all data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.devices.not_lowerable import NotLowerable
from slipstream.kernels.cpu.program import ROWS
from slipstream.ops.rows import Rows

_PRIMES = (4177, 5003, 6007, 7001)
_SILENT = ("prim", "prims", "profiler")
"""Namespaces of what computes nothing of a step."""
_PAGES, _PAGE_SIZE, _SEQUENCES, _TABLE = 23, 16, 5, 11


class LayerShape(Protocol):
    """What recording needs of a layer's cache."""

    def shape(self, pages: int, page_size: int) -> tuple[int, ...]: ...


class Unrecordable(NotLowerable):
    """Why a model's step is not a fixed list of calls."""


@dataclass(eq=False)
class Value:
    """A tensor of the step. `source` says where an input comes from: "rows.token", "cache.3", "parameter.NAME" or
    "buffer.NAME"; None for what a call gives."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    source: str | None = None


@dataclass(eq=False)
class Call:
    """One operator call. Tensors in `args` and `kwargs` are `Value`s; `head`: it belongs to `logits`."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Value
    head: bool = False
    mutates: bool = False

    def inputs(self) -> Iterator[Value]:
        """Every tensor it is given, in order."""
        yield from values_in((self.args, self.kwargs))


@dataclass
class Record:
    """The calls of a step in order, and the value that holds the logits."""

    calls: list[Call] = field(default_factory=list)
    logits: Value | None = None


def values_in(item: Any) -> Iterator[Value]:
    """The `Value`s in nested arguments."""
    if isinstance(item, Value):
        yield item
    elif isinstance(item, list | tuple):
        for each in item:
            yield from values_in(each)
    elif isinstance(item, dict):
        yield from values_in(list(item.values()))


def record(model: nn.Module, specs: Sequence[LayerShape]) -> Record:
    """The calls of one step of `model`, a `StepModel` that is an nn.Module. Parameters may be on any device and are not
    read. Raises Unrecordable."""
    parameters = dict(model.named_parameters())
    sizes = {size for tensor in parameters.values() for size in tensor.shape}
    rows = next((prime for prime in _PRIMES if all(size % prime for size in sizes)), None)
    if rows is None:
        raise Unrecordable("no prime number of rows tells itself apart from the model's widths")
    runner: Any = model
    with _meta_tensors(model) as names, torch.no_grad():
        caches = [torch.empty(spec.shape(_PAGES, _PAGE_SIZE), device="meta") for spec in specs]
        per_row = {name: torch.empty(rows, dtype=torch.int64, device="meta") for name in Rows._fields[:6]}
        table = torch.empty((_SEQUENCES, _TABLE), dtype=torch.int64, device="meta")
        context = torch.empty(_SEQUENCES, dtype=torch.int64, device="meta")
        batch = Rows(**per_row, page_table=table, context_len=context)
        sources = {f"rows.{name}": tensor for name, tensor in batch._asdict().items()}
        sources |= {f"cache.{index}": cache for index, cache in enumerate(caches)}
        recorder = _Recorder(rows, {**sources, **names})
        try:
            with recorder:
                hidden = runner.forward(batch, caches)
                recorder.head = True
                logits = runner.logits(hidden)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise Unrecordable(f"the model cannot be run without values ({_first_line(error)})") from error
    found = recorder.record
    found.logits = recorder.known(logits)
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _meta_tensors(model: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    """Put meta tensors in place of the model's parameters and buffers -> them by source; all is put back after."""
    kept: list[tuple[dict[str, Any], str, Any]] = []
    named: dict[str, Tensor] = {}
    try:
        for path, module in model.named_modules():
            prefix = f"{path}." if path else ""
            own: list[tuple[str, dict[str, Any]]] = [
                ("parameter", module._parameters),
                ("buffer", module._buffers),
            ]
            for what, holder in own:
                for name, tensor in list(holder.items()):
                    if tensor is None:
                        continue
                    kept.append((holder, name, tensor))
                    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
                    blank = torch.empty(tensor.shape, dtype=dtype, device="meta")
                    holder[name] = nn.Parameter(blank, requires_grad=False) if what == "parameter" else blank
                    named[f"{what}.{prefix}{name}"] = holder[name]
        yield named
    finally:
        for holder, name, tensor in kept:
            holder[name] = tensor


class _Recorder(TorchDispatchMode):
    def __init__(self, rows: int, sources: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows, self.head = rows, False
        self.record = Record()
        self._values: dict[int, Value] = {}
        self._alive: list[Tensor] = []  # ids stay valid while the tensors live
        for source, tensor in sources.items():
            self._add(tensor, source)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in _SILENT:
            return result
        given = tuple(self._seen(each) for each in args)
        named = {key: self._seen(each) for key, each in (kwargs or {}).items()}
        if not isinstance(result, Tensor):
            raise Unrecordable(f"{func} gives something else than one tensor")
        value = self._add(result, None)
        mutates = bool(func._schema.is_mutable)
        self.record.calls.append(Call(_name(func), given, named, value, self.head, mutates))
        return result

    def known(self, tensor: Tensor) -> Value:
        if id(tensor) not in self._values:
            raise Unrecordable("the step uses a tensor that is neither an input nor a result")
        return self._values[id(tensor)]

    def _seen(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self.known(item)
        if isinstance(item, list | tuple):
            return [self._seen(each) for each in item]
        if isinstance(item, int) and not isinstance(item, bool) and item and item % self.rows == 0:
            return ROWS if item == self.rows else f"{item // self.rows}*{ROWS}"
        return item

    def _add(self, tensor: Tensor, source: str | None) -> Value:
        shape: tuple[int | str, ...] = tuple(self._seen(size) for size in tensor.shape)
        # A tensor that was written in place is a new value from here on.
        value = self._values[id(tensor)] = Value(shape, tensor.dtype, source)
        self._alive.append(tensor)
        return value


def _name(func: Any) -> str:
    """ "slipstream.linear", or "aten.add.Tensor"."""
    name = str(func)
    return name.removesuffix(".default") if name.startswith("slipstream.") else name
