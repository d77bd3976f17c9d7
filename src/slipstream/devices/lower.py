"""A recorded step -> a program of the native step.

Every operator has an instruction of its own; groups that `fuse` finds become one. An operator without an instruction,
or with operands that its instruction does not take, becomes a `reference` line: the caller runs the operator itself on
views of the program's buffers. `NotLowerable` says why a model cannot be run even so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.devices.fuse import QKV, Fusion, GateUp, Linear, Residual, adds_rows, fuse, linear_of
from slipstream.devices.graph import Graph, width_of
from slipstream.devices.not_lowerable import NotLowerable
from slipstream.devices.program_weights import Weights
from slipstream.devices.record import Call, Record, Value
from slipstream.devices.slots import Lifetime, share_slots
from slipstream.devices.stored import Stored
from slipstream.kernels.cpu.program import IN_PLACE, LOGITS, ROWS, Buffer, Cache, Instruction, Program

F32, Q8 = "f32", "q8"
_QUANTISES = ("slipstream.rms_norm", "slipstream.paged_attention", "slipstream.silu_mul")
"""Operators whose instructions can give quantised rows."""


def lower(
    record: Record, stored: Mapping[str, Sequence[Stored]], *, cache_kind: str = "bf16", quantization: str = "none"
) -> Program:
    """The program of a recorded step; weights and vectors have their offsets.

    `stored` tells for each parameter what the checkpoint holds of it: one tensor, or one per expert. Raises
    NotLowerable.
    """
    graph = Graph(record)
    program = Program()
    weights = Weights(graph, program, stored, quantization)
    fusion = fuse(graph, lambda value: weights.input_kind(value) if weights.is_matrix(value) else None)
    _Lowering(graph, fusion, weights, program).run(cache_kind)
    _take_places(program)
    _share(program)
    program.place()
    return program


@dataclass(frozen=True)
class _Place:
    """A form of a value in a buffer."""

    wanted: bool
    kind: str


class _Lowering:
    def __init__(self, graph: Graph, fusion: Fusion, weights: Weights, program: Program) -> None:
        self.graph, self.fusion, self.weights, self.program = graph, fusion, weights, program
        self._places: dict[tuple[Value, _Place], int] = {}
        self._made: dict[Value, bool] = {}  # whether only wanted rows of it exist
        self._emitters: dict[str, Callable[[Call], bool]] = {
            "slipstream.embedding": self._embedding,
            "slipstream.rope_table": self._rope_table,
            "slipstream.rms_norm": self._norm,
            "slipstream.linear": self._linear_call,
            "slipstream.rope": self._rope,
            "slipstream.write_kv": self._write_kv,
            "slipstream.paged_attention": self._attend,
            "slipstream.silu_mul": self._silu_mul,
            "slipstream.moe": self._moe,
            "aten.add.Tensor": self._add,
        }

    def run(self, cache_kind: str) -> None:
        self._caches(cache_kind)
        for call in self.graph.calls:
            if id(call) in self.fusion.absorbed:
                continue
            group = self.fusion.groups.get(id(call))
            match group:
                case QKV():
                    self._check_rows(call, (3, "slot"))
                    self._qkv(group)
                case GateUp():
                    self._gate_up(call, group)
                case Residual():
                    self._linear(call, group.linear, group.add)
                case None:
                    emit = self._emitters.get(call.op)
                    if emit is None or not emit(call):
                        self._reference(call)

    # Values and buffers

    def _caches(self, kind: str) -> None:
        caches: dict[int, Value] = {}
        for call in self.graph.calls:
            for value in call.inputs():
                if value.source is not None and value.source.startswith("cache."):
                    caches[int(value.source.removeprefix("cache."))] = value
        if sorted(caches) != list(range(len(caches))):
            raise NotLowerable("the model does not use every cache that it asks for")
        for index in range(len(caches)):
            _, heads, _, _, width = caches[index].shape
            assert isinstance(heads, int)
            assert isinstance(width, int)
            self.program.caches.append(Cache(heads, width, kind))

    def _cache_id(self, value: Value) -> int:
        while value.source is None:
            call = self.graph.made_by(value, "slipstream.write_kv")
            if call is None:
                raise NotLowerable("a cache is made by something else than write_kv")
            value = call.args[0]
        return int(value.source.removeprefix("cache."))

    def _emit(self, name: str, **fields: int | float | list[int] | None) -> None:
        # `in` is a keyword of Python.
        named = {key.rstrip("_"): value for key, value in fields.items() if value is not None}
        self.program.code.append(Instruction(name, named))

    def _buffer(self, value: Value, place: _Place) -> int:
        width = width_of(value)
        if width is None or value.dtype != torch.float32:
            raise NotLowerable(f"a value of shape {list(value.shape)} in {value.dtype} has no place in the native step")
        number = len(self.program.buffers)
        rows = "wanted" if place.wanted else "all"
        self.program.buffers.append(Buffer(f"v{number}", place.kind, width, rows))
        self._places[value, place] = number
        return number

    def _new(self, call: Call, kind: str = F32) -> int:
        """The buffer of a call's result; LOGITS for the step's."""
        return self._new_value(call.result, self.graph.wanted(call), kind)

    def _new_value(self, value: Value, wanted: bool, kind: str) -> int:
        value = self.graph.root(value)
        if value is self.graph.logits:
            return LOGITS
        self._made[value] = wanted
        return self._buffer(value, _Place(wanted, kind))

    def _get(self, value: Value, user: Call, kind: str = F32) -> int:
        """The buffer of a value as `user` needs it; rows are chosen and quantised where it is not there yet."""
        value = self.graph.root(value)
        place = _Place(self.graph.wanted(user), kind)
        if (value, place) in self._places:
            return self._places[value, place]
        if value not in self._made:
            raise NotLowerable(f"{user.op} uses {value.source or 'a value'} in a way that the native step cannot")
        if self._made[value] and not place.wanted:
            raise NotLowerable("a value of wanted rows is used for all rows")
        if place.wanted and not self._made[value]:
            selected = _Place(True, F32)
            if (value, selected) not in self._places:
                source = self._places[value, _Place(False, F32)]
                self._emit("select", in_=source, out=self._buffer(value, selected))
            if kind == F32:
                return self._places[value, selected]
        source = self._places[value, _Place(place.wanted, F32)]
        self._emit("quant", in_=source, out=self._buffer(value, place))
        return self._places[value, place]

    def _kind_for(self, value: Value, wanted: bool) -> str:
        """Q8 if every user of a value takes it quantised, for the same rows."""
        value = self.graph.root(value)
        users = self.graph.users[value]

        def takes_q8(user: Call) -> bool:
            return (
                user.op == "slipstream.linear"
                and len(user.args[0].shape) == 2
                and self.graph.wanted(user) == wanted
                and self.weights.input_kind(linear_of(user).weight) == Q8
                and self.graph.root(user.args[0]) is value
            )

        return Q8 if users and all(map(takes_q8, users)) else F32

    def _own_kind(self, call: Call) -> str:
        return self._kind_for(call.result, self.graph.wanted(call)) if call.op in _QUANTISES else F32

    def _vector(self, value: Value | None) -> int | None:
        return None if value is None else self.weights.vector(value)

    def _check_rows(self, call: Call, *wanted: tuple[int, str]) -> None:
        """Operands that must be the step's own rows."""
        for index, name in wanted:
            value = call.args[index]
            if not isinstance(value, Value) or value.source != f"rows.{name}":
                raise NotLowerable(f"{call.op} must be given rows.{name}")

    # Instructions

    def _embedding(self, call: Call) -> bool:
        token, weight = call.args[:2]
        if token.source != "rows.token" or not self.weights.is_matrix(weight):
            return False
        number = self.weights.weight(weight)
        self._emit("embed", out=self._new(call), weight=number)
        return True

    def _rope_table(self, call: Call) -> bool:
        position, inv_freq, scale = call.args
        if position.source != "rows.position" or not self.weights.is_vector(inv_freq):
            return False
        number = self.weights.vector(inv_freq)
        self._emit("rope_table", out=self._new(call), inv_freq=number, scale=float(scale))
        return True

    def _norm(self, call: Call) -> bool:
        x, weight, eps = call.args
        width = width_of(x)
        if width is None or x.shape[0] != ROWS or not self.weights.is_vector(weight):
            return False
        heads = width // weight.shape[0]
        kind = self._own_kind(call) if heads == 1 else F32
        source = self._get(x, call)
        self._emit(
            "norm",
            in_=source,
            out=self._new(call, kind),
            weight=self.weights.vector(weight),
            eps=float(eps),
            heads=heads if heads > 1 else None,
        )
        return True

    def _linear_call(self, call: Call) -> bool:
        linear = linear_of(call)
        if not self.weights.is_matrix(linear.weight) or len(linear.x.shape) != 2:
            return False
        return self._linear(call, linear, None)

    def _linear(self, call: Call, linear: Linear, add: Value | None) -> bool:
        if not self.weights.is_matrix(linear.weight):
            raise NotLowerable("a projection's weight is not a parameter of its own")
        source = self._get(linear.x, call, self.weights.input_kind(linear.weight))
        other = None if add is None else self._get(add, call)
        weight, bias = self.weights.weight(linear.weight), self._vector(linear.bias)
        self._emit("linear", in_=source, out=self._new(call), weight=weight, bias=bias, add=other)
        return True

    def _qkv(self, group: QKV) -> None:
        q, k, v = (heads.linear for heads in (group.q, group.k, group.v))
        call = self.graph.producer[group.query]
        assert group.q.table is not None
        norms = [(None, None) if heads.norm is None else heads.norm for heads in (group.q, group.k)]
        source = self._get(q.x, call, self.weights.input_kind(q.weight))
        table = self._get(group.q.table, call)
        self._emit(
            "qkv",
            in_=source,
            q=self.weights.weight(q.weight),
            k=self.weights.weight(k.weight),
            v=self.weights.weight(v.weight),
            q_bias=self._vector(q.bias),
            k_bias=self._vector(k.bias),
            v_bias=self._vector(v.bias),
            q_norm=self._vector(norms[0][0]),
            k_norm=self._vector(norms[1][0]),
            eps=norms[0][1],
            heads=group.q.heads,
            kv_heads=group.k.heads,
            width=group.width,
            table=table,
            query=self._new_value(group.query, False, F32),
            cache=self._cache_id(group.cache),
        )

    def _rope(self, call: Call) -> bool:
        x, table = call.args
        if len(x.shape) != 3 or x.shape[0] != ROWS or self.graph.made_by(table, "slipstream.rope_table") is None:
            return False
        source, angles = self._get(x, call), self._get(table, call)
        heads, width = x.shape[1:]
        self._emit("rope", in_=source, out=self._new(call), heads=heads, width=width, table=angles)
        return True

    def _write_kv(self, call: Call) -> bool:
        self._check_rows(call, (3, "slot"))
        cache, key, value, _ = call.args
        number = self._cache_id(cache)
        self._emit("write_kv", key=self._get(key, call), value=self._get(value, call), cache=number)
        return True

    def _attend(self, call: Call) -> bool:
        self._check_rows(call, (2, "page_table"), (3, "sequence"), (4, "position"))
        query, cache, _, _, _, scale, window = call.args
        number = self._cache_id(cache)
        own = self.program.caches[number]
        source = self._get(query, call)
        self._emit(
            "attend",
            query=source,
            out=self._new(call, self._own_kind(call)),
            cache=number,
            heads=query.shape[1],
            kv_heads=own.heads,
            width=own.width,
            scale=float(scale),
            window=int(window),
        )
        return True

    def _gate_up(self, call: Call, group: GateUp) -> None:
        source = self._get(group.gate.x, call, self.weights.input_kind(group.gate.weight))
        gate, up = self.weights.weight(group.gate.weight), self.weights.weight(group.up.weight)
        self._emit(
            "gateup",
            in_=source,
            gate=gate,
            up=up,
            gate_bias=self._vector(group.gate.bias),
            up_bias=self._vector(group.up.bias),
            out=self._new(call, self._own_kind(call)),
        )

    def _silu_mul(self, call: Call) -> bool:
        gate, up = call.args
        if width_of(gate) is None or gate.shape != up.shape or gate.shape[0] != ROWS:
            return False
        sources = self._get(gate, call), self._get(up, call)
        self._emit("silu_mul", gate=sources[0], up=sources[1], out=self._new(call, self._own_kind(call)))
        return True

    def _moe(self, call: Call) -> bool:
        x, router, gate, up, down, top_k, renormalise = call.args
        if not self.weights.is_matrix(router) or not all(map(self.weights.is_stack, (gate, up, down))):
            return False
        source = self._get(x, call)
        self._emit(
            "moe",
            in_=source,
            out=self._new(call),
            router=self.weights.weight(router),
            gate=self.weights.stack(gate),
            up=self.weights.stack(up),
            down=self.weights.stack(down),
            experts=gate.shape[0],
            top_k=int(top_k),
            renormalise=int(bool(renormalise)),
        )
        return True

    def _add(self, call: Call) -> bool:
        operands = adds_rows(call)
        if operands is None or call.result is self.graph.logits:
            return False
        a, b = (self._get(value, call) for value in operands)
        self._emit("add", a=a, b=b, out=self._new(call))
        return True

    # Operators that the caller runs

    def _reference(self, call: Call) -> None:
        if call.mutates:
            raise NotLowerable(f"{call.op} writes in place")
        inputs: list[int] = []

        def described(item: Any) -> Any:
            if isinstance(item, Value):
                return self._operand(item, call, inputs)
            if isinstance(item, list | tuple):
                return [described(each) for each in item]
            if isinstance(item, torch.dtype):
                return {"dtype": str(item).removeprefix("torch.")}
            if item == ROWS:
                return {"rows": True}
            if item is None or isinstance(item, bool | int | float):
                return item
            raise NotLowerable(f"{call.op} has an operand {item!r} that cannot be kept in a program")

        reference = {
            "op": call.op,
            "args": described(call.args),
            "kwargs": {key: described(value) for key, value in call.kwargs.items()},
            "shape": list(call.result.shape),
            "wanted": self.graph.wanted(call),
        }
        out = self._new(call)
        self._emit("reference", op=len(self.program.references), in_=inputs or None, out=out)
        self.program.references.append(reference)

    def _operand(self, value: Value, call: Call, inputs: list[int]) -> dict[str, Any]:
        source = value.source
        if source is not None and source.startswith("cache."):
            raise NotLowerable(f"{call.op} reads a cache, whose layout is the native step's own")
        if source is not None:
            if self.graph.wanted(call) and source.startswith("rows."):
                raise NotLowerable(f"{call.op} reads {source} after rows were chosen")
            return {"input": source}
        inputs.append(self._get(value, call))
        return {"in": len(inputs) - 1, "shape": list(value.shape)}


def _take_places(program: Program) -> None:
    """Let results take the place of an operand that is not needed any more, where the instruction allows it."""
    last: dict[int, int] = {}
    for index, instruction in enumerate(program.code):
        for number in instruction.reads():
            last[number] = index
    place: dict[int, int] = {}

    def of(number: int) -> int:
        return place.get(number, number)

    for index, instruction in enumerate(program.code):
        instruction.rename(of)
        key = IN_PLACE.get(instruction.name)
        if key is None or key not in instruction.fields or not instruction.writes():
            continue
        operand, result = instruction.number(key), instruction.number("out")
        old, new = program.buffers[operand], program.buffers[result]
        if last.get(operand) != index or (old.kind, old.width, old.rows) != (new.kind, new.width, new.rows):
            continue
        if instruction.reads().count(operand) > 1:
            continue
        place[result] = operand
        last[operand] = last.get(result, index)
        instruction.fields["out"] = operand


def _share(program: Program) -> None:
    """Give buffers slots, make one of those that look alike in one slot, and number them by their first use."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, instruction in enumerate(program.code):
        for number in (*instruction.reads(), *instruction.writes()):
            first.setdefault(number, index)
            last[number] = index
    lifetimes = [Lifetime(first[number], last[number], program.buffers[number].row_bytes) for number in first]
    kept: dict[tuple[int, str, int, str], int] = {}
    renamed: dict[int, int] = {}
    for number, slot in zip(first, share_slots(lifetimes), strict=True):
        buffer = program.buffers[number]
        renamed[number] = kept.setdefault((slot, buffer.kind, buffer.width, buffer.rows), len(kept))
    program.buffers = [
        Buffer(f"b{number}", kind, width, rows, slot) for (slot, kind, width, rows), number in kept.items()
    ]
    for instruction in program.code:
        instruction.rename(renamed.__getitem__)
