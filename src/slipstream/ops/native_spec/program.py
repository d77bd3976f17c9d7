"""Programs of the native executor, run by their definition: a reader of the text and an interpreter over numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from slipstream.ops.native_spec.arithmetic import F32, I32, gated
from slipstream.ops.native_spec.attention import attend
from slipstream.ops.native_spec.cache import Pages
from slipstream.ops.native_spec.linear import linear
from slipstream.ops.native_spec.moe import moe
from slipstream.ops.native_spec.quantise import Quantised, quantise
from slipstream.ops.native_spec.rows import norm, rope, rope_table
from slipstream.ops.native_spec.weights import Bytes, Weight, unpack

Fields = dict[str, str]


@dataclass
class Listing:
    """A program's text, taken apart: per kind of line its fields in order of number, and the instructions."""

    buffers: list[Fields] = field(default_factory=list)
    weights: list[Fields] = field(default_factory=list)
    vectors: list[Fields] = field(default_factory=list)
    caches: list[Fields] = field(default_factory=list)
    steps: list[tuple[str, Fields]] = field(default_factory=list)


def read(text: str) -> Listing:
    """Take a program's text apart. It is not checked: programs come from our own recorder or from tests."""
    listing = Listing()
    kinds = {"buffer": listing.buffers, "weight": listing.weights, "vector": listing.vectors, "cache": listing.caches}
    for line in text.splitlines():
        words = line.split("#")[0].split()
        fields = dict(word.split("=", 1) for word in words if "=" in word)
        if words and words[0] == "do":
            listing.steps.append((words[1], fields))
        elif words and words[0] in kinds:
            kinds[words[0]].append(fields)
    return listing


@dataclass
class Batch:
    """One step's rows, as int32 [R]; page_table int32 [S, pages]; wants_logits bool [R]; caches as flat bytes."""

    token: I32
    position: I32
    sequence: I32
    slot: I32
    wants_logits: npt.NDArray[np.bool_]
    page_table: I32
    page_size: int
    caches: list[Bytes]


def number(text: str) -> float:
    """A number of the text: decimal or hexadecimal."""
    return float.fromhex(text) if "0x" in text.lower() else float(text)


class Interpreter:
    """Runs a program. `values` holds each buffer's rows after the last run, float32 [R, width] or `Quantised`.

    Buffers that share memory in the executor are apart here: a program must not read one after another took its place.
    """

    def __init__(self, text: str, weights: Bytes) -> None:
        self.listing = read(text)
        self._weights: list[Weight] = []
        for fields in self.listing.weights:
            raw = weights[int(fields["offset"]) :][: int(fields["bytes"])]
            self._weights.append(unpack(fields["kind"], raw, int(fields["outputs"]), int(fields["inputs"])))
        self._vectors = [
            weights[int(v["offset"]) :][: 4 * int(v["count"])].view(np.float32) for v in self.listing.vectors
        ]
        self.values: dict[int, F32 | Quantised] = {}
        self.logits: F32 | None = None

    def run(self, batch: Batch, first: int = 0, last: int | None = None) -> None:
        """Run instructions [first, last) on a batch; caches are written in place."""
        self._batch = batch
        self._pages = [
            Pages(c["kind"], int(c["heads"]), int(c["width"]), batch.page_size, data)
            for c, data in zip(self.listing.caches, batch.caches, strict=True)
        ]
        for name, fields in self.listing.steps[first:last]:
            STEPS[name](self, _Step(fields))

    def take(self, buffer: int) -> F32:
        """The float32 rows of a buffer."""
        value = self.values[buffer]
        assert not isinstance(value, Quantised)
        return value

    def give(self, buffer: int, value: F32) -> None:
        """Store rows in a buffer, quantised if that is its kind; -1 stands for the logits."""
        if buffer < 0:
            self.logits = value
        else:
            self.values[buffer] = quantise(value) if self.listing.buffers[buffer]["kind"] == "q8" else value

    def weight(self, number: int) -> Weight:
        return self._weights[number]

    def vector(self, number: int | None) -> F32 | None:
        return None if number is None else self._vectors[number]

    def linear(self, step: _Step, weight: str, bias: str, add: F32 | None = None) -> F32:
        x = self.values[step.whole("in")]
        return linear(x, self.weight(step.whole(weight)), self.vector(step.maybe(bias)), add)

    @property
    def batch(self) -> Batch:
        return self._batch

    @property
    def pages(self) -> list[Pages]:
        return self._pages


class _Step:
    """The fields of one instruction."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields

    def whole(self, name: str, otherwise: int | None = None) -> int:
        return otherwise if otherwise is not None and name not in self._fields else int(self._fields[name])

    def maybe(self, name: str) -> int | None:
        return int(self._fields[name]) if name in self._fields else None

    def real(self, name: str) -> float:
        return number(self._fields[name])


Run = Callable[[Interpreter, _Step], None]
STEPS: dict[str, Run] = {}


def _step(run: Run) -> Run:
    STEPS[run.__name__.strip("_")] = run
    return run


@_step
def _embed(it: Interpreter, s: _Step) -> None:
    it.give(s.whole("out"), it.weight(s.whole("weight")).dequantised()[it.batch.token])


@_step
def _rope_table(it: Interpreter, s: _Step) -> None:
    frequencies = it.vector(s.whole("inv_freq"))
    assert frequencies is not None
    it.give(s.whole("out"), rope_table(it.batch.position, frequencies, s.real("scale")))


@_step
def _norm(it: Interpreter, s: _Step) -> None:
    weight = it.vector(s.whole("weight"))
    assert weight is not None
    it.give(s.whole("out"), norm(it.take(s.whole("in")), weight, s.real("eps"), s.whole("heads", 1)))


@_step
def _quant(it: Interpreter, s: _Step) -> None:
    it.give(s.whole("out"), it.take(s.whole("in")))


@_step
def _linear(it: Interpreter, s: _Step) -> None:
    added = s.maybe("add")
    it.give(s.whole("out"), it.linear(s, "weight", "bias", None if added is None else it.take(added)))


@_step
def _qkv(it: Interpreter, s: _Step) -> None:
    """Three products; queries and keys normalised by head where there is a weight for it, then rotated."""
    width, heads, kv_heads = s.whole("width"), s.whole("heads"), s.whole("kv_heads")
    table = it.take(s.whole("table"))
    turned = []
    for name, count in (("q", heads), ("k", kv_heads)):
        x = it.linear(s, name, f"{name}_bias")
        weight = it.vector(s.maybe(f"{name}_norm"))
        if weight is not None:
            x = norm(x, weight, s.real("eps"), count)
        turned.append(rope(x, table, count, width))
    value = it.linear(s, "v", "v_bias")
    it.pages[s.whole("cache")].write(turned[1], value, it.batch.slot)
    it.give(s.whole("query"), turned[0])


@_step
def _rope(it: Interpreter, s: _Step) -> None:
    x, table = it.take(s.whole("in")), it.take(s.whole("table"))
    it.give(s.whole("out"), rope(x, table, s.whole("heads"), s.whole("width")))


@_step
def _write_kv(it: Interpreter, s: _Step) -> None:
    key, value = it.take(s.whole("key")), it.take(s.whole("value"))
    it.pages[s.whole("cache")].write(key, value, it.batch.slot)


@_step
def _attend(it: Interpreter, s: _Step) -> None:
    rows = it.batch
    query, pages = it.take(s.whole("query")), it.pages[s.whole("cache")]
    heads, scale, window = s.whole("heads"), s.real("scale"), s.whole("window", 0)
    it.give(s.whole("out"), attend(query, pages, rows.page_table, rows.sequence, rows.position, heads, scale, window))


@_step
def _gateup(it: Interpreter, s: _Step) -> None:
    it.give(s.whole("out"), gated(it.linear(s, "gate", "gate_bias"), it.linear(s, "up", "up_bias")))


@_step
def _silu_mul(it: Interpreter, s: _Step) -> None:
    it.give(s.whole("out"), gated(it.take(s.whole("gate")), it.take(s.whole("up"))))


@_step
def _add(it: Interpreter, s: _Step) -> None:
    with np.errstate(all="ignore"):
        it.give(s.whole("out"), it.take(s.whole("a")) + it.take(s.whole("b")))


@_step
def _select(it: Interpreter, s: _Step) -> None:
    it.give(s.whole("out"), it.take(s.whole("in"))[it.batch.wants_logits])


@_step
def _moe(it: Interpreter, s: _Step) -> None:
    experts = range(s.whole("experts"))
    gate, up, down = ([it.weight(s.whole(name) + e) for e in experts] for name in ("gate", "up", "down"))
    renormalise = bool(s.whole("renormalise"))
    x, router = it.take(s.whole("in")), it.weight(s.whole("router"))
    it.give(s.whole("out"), moe(x, router, gate, up, down, s.whole("top_k"), renormalise))
