"""Groups of calls that the native step runs as one instruction.

A group is found from its last call (its anchor). The others must be used by the group alone, so that nothing of them
has to be kept. What does not match stays single calls, which have instructions of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slipstream.devices.graph import Graph, width_of
from slipstream.devices.record import Call, Value
from slipstream.kernels.cpu.program import ROWS


@dataclass(frozen=True)
class Linear:
    """A projection's operands."""

    x: Value
    weight: Value
    bias: Value | None


@dataclass(frozen=True)
class Residual:
    """`linear` whose result is added to `add`."""

    linear: Linear
    add: Value


@dataclass(frozen=True)
class GateUp:
    """Two projections of the same rows, gated."""

    gate: Linear
    up: Linear


@dataclass(frozen=True)
class Heads:
    """A projection to heads [R, heads, width], their norm (weight, eps) if they have one, and rope's table."""

    linear: Linear
    heads: int
    norm: tuple[Value, float] | None
    table: Value | None


@dataclass(frozen=True)
class QKV:
    """Queries, keys and values of the same rows; keys and values are written to `cache`, `query` is the result."""

    q: Heads
    k: Heads
    v: Heads
    width: int
    query: Value
    cache: Value


Group = Residual | GateUp | QKV


@dataclass
class Fusion:
    """`groups` by the id of their anchor call; `absorbed` are ids of the calls that an anchor stands for."""

    groups: dict[int, Group]
    absorbed: set[int]


def linear_of(call: Call) -> Linear:
    """A linear call's operands."""
    arguments = (*call.args, None)[:3]
    bias = call.kwargs.get("bias", arguments[2])
    return Linear(arguments[0], arguments[1], bias)


def adds_rows(call: Call) -> tuple[Value, Value] | None:
    """The operands of a plain sum of two values of one shape."""
    if call.op != "aten.add.Tensor" or call.kwargs.get("alpha", 1) != 1 or len(call.args) != 2:
        return None
    a, b = call.args
    same = isinstance(a, Value) and isinstance(b, Value) and a.shape == b.shape == call.result.shape
    return (a, b) if same and a.dtype == b.dtype and width_of(a) is not None else None


KindOf = Callable[[Value], str | None]


def fuse(graph: Graph, kind_of: KindOf) -> Fusion:
    """All groups of a step. `kind_of` tells in which form a projection by a weight takes its rows, None if there is no
    instruction for it; the projections of a group take theirs in one form."""
    fusion = Fusion({}, set())
    matchers = {
        "slipstream.write_kv": _qkv,
        "slipstream.silu_mul": _gate_up,
        "aten.add.Tensor": _residual,
    }
    for call in graph.calls:
        matcher = matchers.get(call.op)
        if matcher is None or id(call) in fusion.absorbed or call.result is graph.logits:
            continue
        found = matcher(graph, call)
        if found is None or {id(part) for part in found[1]} & fusion.absorbed:
            continue
        kinds = {kind_of(part.args[1]) for part in found[1] if part.op == "slipstream.linear"}
        if len(kinds) == 1 and None not in kinds:
            fusion.groups[id(call)] = found[0]
            fusion.absorbed |= {id(part) for part in found[1]}
    return fusion


def _own_linear(graph: Graph, value: Value, user: Call) -> Call | None:
    """The linear call that makes a value for `user` alone."""
    call = graph.made_by(value, "slipstream.linear")
    return call if call is not None and graph.only_user(value) is user else None


def _residual(graph: Graph, call: Call) -> tuple[Group, list[Call]] | None:
    operands = adds_rows(call)
    if operands is None:
        return None
    for other, value in (operands, operands[::-1]):
        made = _own_linear(graph, value, call)
        if made is not None:
            return Residual(linear_of(made), other), [made]
    return None


def _gate_up(graph: Graph, call: Call) -> tuple[Group, list[Call]] | None:
    made = [_own_linear(graph, value, call) for value in call.args[:2]]
    gate, up = made
    if gate is None or up is None or graph.root(gate.args[0]) is not graph.root(up.args[0]):
        return None
    return GateUp(linear_of(gate), linear_of(up)), [gate, up]


def _heads(graph: Graph, value: Value, user: Call, *, turned: bool) -> tuple[Heads, list[Call]] | None:
    """Follow heads from where `user` takes them back to their projection."""
    parts: list[Call] = []
    table = None
    norm = None
    if turned:
        rope = graph.made_by(value, "slipstream.rope")
        if rope is None or graph.only_user(value) is not user:
            return None
        parts.append(rope)
        value, user, table = rope.args[0], rope, rope.args[1]
        normed = graph.made_by(value, "slipstream.rms_norm")
        if normed is not None and graph.only_user(value) is user:
            parts.append(normed)
            norm = (normed.args[1], normed.args[2])
            value, user = normed.args[0], normed
    if len(value.shape) != 3 or value.shape[0] != ROWS:
        return None
    made = _own_linear(graph, value, user)
    if made is None or not isinstance(value.shape[1], int):
        return None
    return Heads(linear_of(made), value.shape[1], norm, table), [*parts, made]


def _qkv(graph: Graph, call: Call) -> tuple[Group, list[Call]] | None:
    cache, key, value, _ = call.args
    readers = [user for user in graph.users[graph.root(call.result)] if user.op == "slipstream.paged_attention"]
    if len(readers) != 1:
        return None
    found = [
        _heads(graph, readers[0].args[0], readers[0], turned=True),
        _heads(graph, key, call, turned=True),
        _heads(graph, value, call, turned=False),
    ]
    if any(each is None for each in found):
        return None
    (q, q_calls), (k, k_calls), (v, v_calls) = (each for each in found if each is not None)
    inputs = {graph.root(heads.linear.x) for heads in (q, k, v)}
    same_norms = (q.norm is None) == (k.norm is None) and (q.norm is None or k.norm is None or q.norm[1] == k.norm[1])
    tables = {graph.root(heads.table) for heads in (q, k) if heads.table is not None}
    if len(inputs) != 1 or len(tables) != 1 or not same_norms:
        return None
    if not all(graph.before(each, call) for each in (*inputs, *tables)):
        return None
    width = key.shape[2]
    assert isinstance(width, int)
    return QKV(q, k, v, width, graph.root(readers[0].args[0]), cache), [*q_calls, *k_calls, *v_calls]
