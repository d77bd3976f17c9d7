"""Which stored tensors a program needs, in which kind, under which number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.devices.graph import Graph
from slipstream.devices.record import Value
from slipstream.devices.stored import BUFFER_PREFIX, Stored
from slipstream.kernels.cpu.kinds import KIND_OF_FORMAT, KINDS, PLAIN_FORMATS
from slipstream.kernels.cpu.program import Program, Vector, Weight

QUANTIZED = {"int8": "q8_0", "int4": "q4_1"}
"""The kind that plain projections get under a `quantization`. The head is int8 in both cases."""


class Weights:
    """Numbers of weights and vectors, handed out at first use."""

    def __init__(
        self, graph: Graph, program: Program, stored: Mapping[str, Sequence[Stored]], quantization: str
    ) -> None:
        self._program, self._stored, self._quantization = program, stored, quantization
        self._roles = _roles(graph)
        self._weights: dict[str, int] = {}
        self._vectors: dict[str, int] = {}

    def is_matrix(self, value: Value) -> bool:
        """Whether a value is a parameter that can be packed as one weight."""
        parts = self._parts(value)
        return len(value.shape) == 2 and len(parts) == 1 and self._packs(parts)

    def is_stack(self, value: Value) -> bool:
        """Whether a value is a parameter [experts, outputs, inputs] that can be packed as one weight per expert."""
        parts = self._parts(value)
        return len(value.shape) == 3 and len(parts) == value.shape[0] and self._packs(parts)

    def is_vector(self, value: Value) -> bool:
        """Whether a value is a parameter or buffer of one dimension."""
        named = value.source is not None and value.source.startswith(("parameter.", BUFFER_PREFIX))
        return named and len(value.shape) == 1

    def input_kind(self, value: Value) -> str:
        """What a projection with this weight takes: "q8" or "f32"."""
        parts = self._parts(value)
        if not self._packs(parts):
            return "f32"
        return "q8" if KINDS[self._kind(parts[0], self._role(value))].integer else "f32"

    def weight(self, value: Value) -> int:
        """The number of a matrix."""
        return self._numbered(value)

    def stack(self, value: Value) -> int:
        """The number of a stack's first weight; the others follow."""
        return self._numbered(value)

    def vector(self, value: Value) -> int:
        """The number of a vector."""
        assert value.source is not None
        name = value.source
        if value.source.startswith("parameter."):
            name = self._parts(value)[0].name
        if name not in self._vectors:
            self._vectors[name] = len(self._program.vectors)
            self._program.vectors.append(Vector(name, int(value.shape[0])))
        return self._vectors[name]

    def _numbered(self, value: Value) -> int:
        assert value.source is not None
        if value.source not in self._weights:
            self._weights[value.source] = len(self._program.weights)
            for part in self._parts(value):
                outputs, inputs = part.shape
                kind = self._kind(part, self._role(value))
                self._program.weights.append(Weight(part.name, kind, outputs, inputs))
        return self._weights[value.source]

    def _parts(self, value: Value) -> Sequence[Stored]:
        if value.source is None or not value.source.startswith("parameter."):
            return ()
        return self._stored.get(value.source.removeprefix("parameter."), ())

    def _packs(self, parts: Sequence[Stored]) -> bool:
        return bool(parts) and all(len(part.shape) == 2 and part.form in KIND_OF_FORMAT for part in parts)

    def _role(self, value: Value) -> str:
        return self._roles.get(value.source or "", "")

    def _kind(self, part: Stored, role: str) -> str:
        plain = part.form in PLAIN_FORMATS
        if self._quantization == "none" or not plain or role in ("router", "table"):
            return KIND_OF_FORMAT[part.form]
        return "q8_0" if role == "head" else QUANTIZED[self._quantization]


def _roles(graph: Graph) -> dict[str, str]:
    """What a parameter is used as: head before table, and router before projection, since quantising asks for it."""
    roles: dict[str, str] = {}
    for call in graph.calls:
        if call.op == "slipstream.embedding":
            roles.setdefault(call.args[1].source or "", "table")
        elif call.op == "slipstream.moe":
            roles[call.args[1].source or ""] = "router"
        elif call.op == "slipstream.linear":
            roles[call.args[1].source or ""] = "head" if call.head else "projection"
    return roles
