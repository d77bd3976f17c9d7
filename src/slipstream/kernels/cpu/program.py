"""The program of a native step as text: what is in it, how it is written and read.

    slipstream-program 1
    buffer 0 x kind=f32 width=576 slot=0 rows=all
    weight 0 model.embed_tokens.weight kind=q8_0 outputs=49152 inputs=576 offset=0 bytes=30081024
    vector 0 model.norm.weight count=576 offset=30081024
    cache 0 heads=3 width=64 kind=bf16
    # reference 0 {...}
    do embed out=0 weight=0
    # end

Ids count from 0 in each kind of line. Buffers of equal `slot` share memory. A `do reference` line is never run by the
library: the caller runs the operator that the comment of that number describes, in JSON, between two segments.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.errors import SlipstreamError
from slipstream.kernels.cpu.kinds import ALIGNMENT, KINDS

HEADER = "slipstream-program 1"
END = "# end"
"""The last line: a text that was cut off lacks it."""
ROWS = "R"
"""Stands for the number of rows in the shapes of reference calls."""
LOGITS = -1
"""The `out` of what writes the logits."""

Field = int | float

BUFFER_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "embed": ((), ("out",)),
    "rope_table": ((), ("out",)),
    "norm": (("in",), ("out",)),
    "quant": (("in",), ("out",)),
    "linear": (("in", "add"), ("out",)),
    "qkv": (("in", "table"), ("query",)),
    "rope": (("in", "table"), ("out",)),
    "write_kv": (("key", "value"), ()),
    "attend": (("query",), ("out",)),
    "gateup": (("in",), ("out",)),
    "silu_mul": (("gate", "up"), ("out",)),
    "add": (("a", "b"), ("out",)),
    "select": (("in",), ("out",)),
    "moe": (("in",), ("out",)),
    "reference": (("in",), ("out",)),
}
"""Every instruction, with the fields that name buffers it reads and buffers it writes."""

WEIGHT_FIELDS: dict[str, tuple[str, ...]] = {
    "embed": ("weight",),
    "linear": ("weight",),
    "qkv": ("q", "k", "v"),
    "gateup": ("gate", "up"),
    "moe": ("router", "gate", "up", "down"),
}
"""The fields that name weights; of `moe` all but the router name the first expert's."""

IN_PLACE = {"add": "a", "linear": "add", "rope": "in"}
"""Instructions whose result may take the place of an operand: each value is read before it is written."""


class ProgramError(SlipstreamError):
    """A program text that cannot be read."""


@dataclass
class Buffer:
    """A value per row: `width` float32 (kind f32) or int8 in blocks (kind q8); rows "all" or only "wanted" ones."""

    name: str
    kind: str
    width: int
    rows: str = "all"
    slot: int = 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row; see slipstream.h for the two layouts."""
        if self.kind == "f32":
            return -(-self.width // 16) * 64
        blocks = -(-self.width // 32)
        return -(-blocks * (32 + 4 * 5) // ALIGNMENT) * ALIGNMENT


@dataclass
class Weight:
    """A packed matrix. `offset` is filled in by `place`."""

    name: str
    kind: str
    outputs: int
    inputs: int
    offset: int = 0

    @property
    def size(self) -> int:
        return KINDS[self.kind].size(self.outputs, self.inputs)


@dataclass
class Vector:
    """A float32 vector. `offset` is filled in by `place`."""

    name: str
    count: int
    offset: int = 0


@dataclass
class Cache:
    """A layer's paged cache."""

    heads: int
    width: int
    kind: str


@dataclass
class Instruction:
    """One `do` line. Names of fields are those of the text; lists are written with commas."""

    name: str
    fields: dict[str, Field | list[int]] = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join(["do", self.name, *(f"{key}={_written(value)}" for key, value in self.fields.items())])

    def number(self, key: str) -> int:
        """An integer field."""
        value = self.fields[key]
        assert isinstance(value, int)
        return value

    def reads(self) -> list[int]:
        """The buffers that it reads."""
        return self._ids(BUFFER_FIELDS[self.name][0])

    def writes(self) -> list[int]:
        """The buffers that it writes."""
        return [number for number in self._ids(BUFFER_FIELDS[self.name][1]) if number != LOGITS]

    def _ids(self, keys: tuple[str, ...]) -> list[int]:
        found: list[int] = []
        for key in keys:
            value = self.fields.get(key, [])
            found += value if isinstance(value, list) else [int(value)]
        return found

    def rename(self, number: Callable[[int], int]) -> None:
        """Give the buffers that it reads and writes other numbers."""
        for key in itertools.chain(*BUFFER_FIELDS[self.name]):
            value = self.fields.get(key)
            if isinstance(value, list):
                self.fields[key] = [number(each) for each in value]
            elif value is not None and value != LOGITS:
                self.fields[key] = number(int(value))


@dataclass
class Program:
    """A whole program. `references` describe the operators of its `do reference` lines."""

    buffers: list[Buffer] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)
    references: list[dict[str, Any]] = field(default_factory=list)
    code: list[Instruction] = field(default_factory=list)

    def place(self) -> int:
        """Give weights and vectors their offsets, in order -> bytes in all."""
        at = 0
        for weight in self.weights:
            weight.offset = at
            at += weight.size
        for vector in self.vectors:
            vector.offset = at
            at += -(-4 * vector.count // ALIGNMENT) * ALIGNMENT
        return at

    @property
    def data_size(self) -> int:
        """Bytes of weights and vectors once they are placed."""
        ends = [weight.offset + weight.size for weight in self.weights]
        ends += [vector.offset + -(-4 * vector.count // ALIGNMENT) * ALIGNMENT for vector in self.vectors]
        return max(ends, default=0)

    def layout(self) -> str:
        """The lines that say what lies where in the packed weights."""
        return "".join(f"{line}\n" for line in (*self._weight_lines(), *self._vector_lines()))

    def text(self) -> str:
        """The program's text."""
        lines = [HEADER]
        for i, b in enumerate(self.buffers):
            lines.append(f"buffer {i} {b.name} kind={b.kind} width={b.width} slot={b.slot} rows={b.rows}")
        lines += [*self._weight_lines(), *self._vector_lines()]
        for i, c in enumerate(self.caches):
            lines.append(f"cache {i} heads={c.heads} width={c.width} kind={c.kind}")
        for i, reference in enumerate(self.references):
            lines.append(f"# reference {i} {json.dumps(reference, sort_keys=True)}")
        lines += [*map(str, self.code), END]
        return "\n".join(lines) + "\n"

    def _weight_lines(self) -> list[str]:
        return [
            f"weight {i} {w.name} kind={w.kind} outputs={w.outputs} inputs={w.inputs} offset={w.offset} bytes={w.size}"
            for i, w in enumerate(self.weights)
        ]

    def _vector_lines(self) -> list[str]:
        return [f"vector {i} {v.name} count={v.count} offset={v.offset}" for i, v in enumerate(self.vectors)]


def parse(text: str) -> Program:
    """The program that `Program.text` wrote. Raises ProgramError for anything else."""
    lines = text.splitlines()
    if len(lines) < 2 or (lines[0], lines[-1]) != (HEADER, END):
        raise ProgramError(f"not a program: the first line must be {HEADER!r}, the last one {END!r}")
    program = Program()
    for line in lines[1:-1]:
        try:
            _read(program, line)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ProgramError(f"not a line of a program: {line!r} ({error})") from None
    return program


def _read(program: Program, line: str) -> None:
    if line.startswith("# reference "):
        _, _, number, content = line.split(" ", 3)
        _expect(number, program.references)
        program.references.append(json.loads(content))
        return
    what, *words = line.split(" ")
    if what == "do":
        program.code.append(Instruction(words[0], {key: _number(value) for key, value in _pairs(words[1:])}))
        return
    if what == "cache":
        _expect(words[0], program.caches)
        values = dict(_pairs(words[1:]))
        program.caches.append(Cache(int(values["heads"]), int(values["width"]), values["kind"]))
        return
    number, name, *rest = words
    values = dict(_pairs(rest))
    if what == "buffer":
        _expect(number, program.buffers)
        program.buffers.append(Buffer(name, values["kind"], int(values["width"]), values["rows"], int(values["slot"])))
    elif what == "weight":
        _expect(number, program.weights)
        sizes = (int(values[key]) for key in ("outputs", "inputs", "offset"))
        program.weights.append(Weight(name, values["kind"], *sizes))
        if program.weights[-1].size != int(values["bytes"]):
            raise ValueError("bytes do not fit the shape")
    elif what == "vector":
        _expect(number, program.vectors)
        program.vectors.append(Vector(name, int(values["count"]), int(values["offset"])))
    else:
        raise ValueError("unknown kind of line")


def _expect(number: str, so_far: list[Any]) -> None:
    if int(number) != len(so_far):
        raise ValueError(f"{len(so_far)} was expected")


def _pairs(words: list[str]) -> list[tuple[str, str]]:
    return [(key, value) for key, _, value in (word.partition("=") for word in words)]


def _number(text: str) -> Field | list[int]:
    if "," in text:
        return [int(part) for part in text.split(",")]
    try:
        return int(text)
    except ValueError:
        return float(text)


def _written(value: Field | list[int]) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else repr(value)
