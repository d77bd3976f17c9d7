"""Operators of a program that have no instruction: they run in torch, between two segments, on views of its buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from slipstream.devices.not_lowerable import NotLowerable
from slipstream.kernels.cpu.program import ROWS


def needed_inputs(references: Iterable[Mapping[str, Any]]) -> set[str]:
    """Parameters and buffers of the model that reference calls read, such as "parameter.norm.weight"."""
    found: set[str] = set()

    def visit(item: Any) -> None:
        if isinstance(item, Mapping):
            source = item.get("input", "")
            if source.startswith(("parameter.", "buffer.")):
                found.add(source)
            for each in item.values():
                visit(each)
        elif isinstance(item, list):
            for each in item:
                visit(each)

    for reference in references:
        visit([reference["args"], reference["kwargs"]])
    return found


class ReferenceCall:
    """One operator as a program describes it. `inputs` holds the parameters and buffers that it reads."""

    def __init__(self, description: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> None:
        self._description, self._inputs = description, inputs
        self.wanted = bool(description["wanted"])
        name: str = description["op"]
        found: Any = torch.ops
        try:
            for part in (f"{name}.default" if name.startswith("slipstream.") else name).split("."):
                found = getattr(found, part)
        except AttributeError as error:
            raise NotLowerable(f"the model uses the operator {name}, which torch does not know") from error
        self._operator: Callable[..., Tensor] = found

    def run(self, given: Sequence[Tensor], rows: int, row_input: Callable[[str], Tensor]) -> Tensor:
        """The result, one row of values after another [rows, width].

        `given` are the program's buffers [rows, width]; `row_input` gives the step's own rows by name ("rows.token").
        """

        def filled(item: Any) -> Any:
            if isinstance(item, list):
                return [filled(each) for each in item]
            if not isinstance(item, Mapping):
                return item
            if "in" in item:
                return _shaped(given[item["in"]], item["shape"])
            if "rows" in item:
                return rows
            if "dtype" in item:
                return getattr(torch, item["dtype"])
            source = item["input"]
            return row_input(source) if source.startswith("rows.") else self._inputs[source]

        kwargs = {key: filled(value) for key, value in self._description["kwargs"].items()}
        result = self._operator(*filled(self._description["args"]), **kwargs)
        axis = self._description["shape"].index(ROWS)
        return result.movedim(axis, 0).reshape(rows, -1)


def _shaped(flat: Tensor, shape: Sequence[int | str]) -> Tensor:
    """A buffer [rows, width] as the operator knows it; `shape` has ROWS where rows are counted."""
    rest = [size for size in shape if isinstance(size, int)]
    assert prod(rest) == flat.shape[1]
    view = flat.unflatten(1, rest) if rest else flat.squeeze(1)
    return view.movedim(0, list(shape).index(ROWS))
