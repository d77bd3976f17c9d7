"""A recorded step seen as a graph: views looked through, users counted, and which rows each call is needed for."""

from __future__ import annotations

from collections import defaultdict
from math import prod

import torch

from slipstream.devices.record import Call, Record, Unrecordable, Value
from slipstream.kernels.cpu.program import ROWS

ROW_WISE = {"slipstream.rms_norm", "slipstream.linear", "slipstream.silu_mul", "aten.add.Tensor"}
"""Calls whose row of the result needs only that row of what they are given, and whose instructions run on any rows."""


def width_of(value: Value) -> int | None:
    """Values per row, where some dimension counts rows and the others are plain; else None."""
    if value.shape.count(ROWS) != 1:
        return None
    rest = [size for size in value.shape if isinstance(size, int)]
    return prod(rest) if len(rest) == len(value.shape) - 1 else None


class Graph:
    """`calls` are those that compute something, in order. Values are compared by their `root`."""

    def __init__(self, record: Record) -> None:
        assert record.logits is not None
        self._base: dict[Value, Value] = {}
        self.calls: list[Call] = []
        for call in record.calls:
            if _is_view(call):
                self._base[call.result] = self.root(call.args[0])
            else:
                self.calls.append(call)
        self.logits = self.root(record.logits)
        self.producer = {call.result: call for call in self.calls}
        self.order = {id(call): index for index, call in enumerate(self.calls)}
        self.users: dict[Value, list[Call]] = defaultdict(list)
        for call in self.calls:
            for value in dict.fromkeys(map(self.root, call.inputs())):
                self.users[value].append(call)
        if self.logits not in self.producer or self.users[self.logits]:
            raise Unrecordable("the logits are not the step's last value")
        self._wanted = self._find_wanted()

    def root(self, value: Value) -> Value:
        """The value whose memory a view shows; itself for others."""
        return self._base.get(value, value)

    def wanted(self, call: Call) -> bool:
        """Whether a call is needed only for rows that want logits."""
        return id(call) in self._wanted

    def only_user(self, value: Value) -> Call | None:
        """The one call that uses a value, and uses it once."""
        users = self.users[self.root(value)]
        if len(users) != 1 or self.root(value) is self.logits:
            return None
        count = sum(self.root(given) is self.root(value) for given in users[0].inputs())
        return users[0] if count == 1 else None

    def made_by(self, value: Value, op: str) -> Call | None:
        """The call of `op` that a value comes from."""
        call = self.producer.get(self.root(value))
        return call if call is not None and call.op == op else None

    def before(self, value: Value, call: Call) -> bool:
        """Whether a value is there when `call` runs."""
        producer = self.producer.get(self.root(value))
        return producer is None or self.order[id(producer)] < self.order[id(call)]

    def _find_wanted(self) -> set[int]:
        found: set[int] = set()
        for call in reversed(self.calls):
            users = self.users[call.result]
            moves = call.op in ROW_WISE and users and all(id(user) in found for user in users)
            if call.head or moves:
                found.add(id(call))
        return found


def _is_view(call: Call) -> bool:
    """Whether a call only shows its first argument in another shape, each row for itself, or in the dtype it has."""
    if call.op not in ("aten.view.default", "aten._to_copy.default") or not isinstance(call.args[0], Value):
        return False
    given, result = call.args[0], call.result
    if given.dtype != result.dtype or result.dtype != torch.float32:
        return False
    if call.op == "aten._to_copy.default":
        return given.shape == result.shape
    rows_first = given.shape[:1] == (ROWS,) == result.shape[:1]
    return rows_first and width_of(given) is not None and width_of(given) == width_of(result)
