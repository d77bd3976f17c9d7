"""Every instruction of the native executor against its definition, bit by bit, on every instruction set.

The order of all float operations is defined, so nothing is compared with a tolerance. Shapes and values are random;
`wild` values hold zeros of both signs, denormals, the largest numbers, infinities and NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles import native_programs as programs
from doubles.native_programs import Builder, Part, Plan, check, make_batch
from doubles.native_weights import sprinkle
from slipstream.ops.native_spec.arithmetic import F32
from slipstream.ops.native_spec.program import Batch
from slipstream.ops.native_spec.quantise import Quantised, quantise
from slipstream.ops.native_spec.rows import rope_table as defined_table
from slipstream.ops.native_spec.weights import KINDS

pytestmark = pytest.mark.skipif(not programs.libraries(), reason=programs.why_missing() or "no native library")

seeds = st.integers(0, 2**32 - 1)
row_counts = st.integers(1, 40)
INTEGER = [kind for kind in KINDS if kind not in ("bf16", "f32")]


@st.composite
def generators(draw: Any) -> np.random.Generator:
    return np.random.default_rng(draw(seeds))


@dataclass
class Property:
    """Something that holds for all arguments; `fast` and `deep` count the examples of the two tests below."""

    holds: Callable[..., None]
    arguments: dict[str, st.SearchStrategy[Any]]
    name: str
    fast: int
    deep: int

    def check(self, examples: int) -> None:
        settings(max_examples=examples, deadline=None)(given(**self.arguments)(self.holds))()


PROPERTIES: list[Property] = []


def holds(fast: int, deep: int, kinds: Iterable[str] = (), **arguments: Any) -> Callable[..., Any]:
    """Add a property, once for each kind of weight where there are any."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        if not kinds:
            PROPERTIES.append(Property(function, arguments, function.__name__, fast, deep))
        for kind in kinds:
            its = arguments | {"kind": st.just(kind)}
            PROPERTIES.append(Property(function, its, f"{function.__name__}-{kind}", fast, deep))
        return function

    return add


def plain_batch(rng: np.random.Generator, rows: int, vocabulary: int = 1) -> Batch:
    """Rows of one sequence, without caches."""
    return make_batch(rng, Plan([Part(int(rng.integers(0, 3000)), rows)], vocabulary=vocabulary))


def values(rng: np.random.Generator, rows: int, width: int, wild: bool) -> F32:
    x = (rng.normal(size=(rows, width)) * 10.0 ** rng.integers(-3, 3, size=(rows, 1))).astype(np.float32)
    if rng.random() < 0.15:
        x *= np.float32(3e-31)  # around the size below which a block counts as zero
    return sprinkle(rng, x, 0.01) if wild else x


def input_for(rng: np.random.Generator, kind: str, rows: int, width: int, wild: bool) -> tuple[str, F32 | Quantised]:
    """Kind of buffer and value that a weight of this kind is multiplied with."""
    x = values(rng, rows, width, wild)
    return ("f32", x) if kind in ("bf16", "f32") else ("q8", quantise(x))


def pick_inputs(rng: np.random.Generator, kind: str, most: int) -> int:
    """A number of inputs that the kind can have; float kinds and blocks of 32 need not be whole."""
    unit = KINDS[kind].unit
    if unit == 256:
        return 256 * int(rng.integers(1, max(2, most // 256 + 1)))
    return int(rng.integers(1, most)) if rng.random() < 0.5 else 32 * int(rng.integers(1, most // 32))


@holds(
    15,
    150,
    kinds=KINDS,
    rng=generators(),
    rows=row_counts,
    outputs=st.integers(1, 80),
    wild=st.booleans(),
    logits=st.booleans(),
)
def linear(kind: str, rng: np.random.Generator, rows: int, outputs: int, wild: bool, logits: bool) -> None:
    inputs = pick_inputs(rng, kind, 320)
    built = Builder(rng)
    which, x = input_for(rng, kind, rows, inputs, wild)
    weight = built.weight(kind, outputs, inputs, wild=wild)
    bias = built.vector(outputs, wild=wild) if rng.random() < 0.5 else None
    added = values(rng, rows, outputs, wild) if rng.random() < 0.5 else None
    batch = plain_batch(rng, rows)
    if logits:
        batch.wants_logits[:] = True
    source = built.buffer(inputs, which, "wanted" if logits else "all")
    out = -1 if logits else built.buffer(outputs)
    given_values = {source: x}
    if added is not None:
        other = out if not logits and rng.random() < 0.5 else built.buffer(outputs, rows="wanted" if logits else "all")
        given_values[other] = added
    add = None if added is None else other
    built.do("linear", **{"in": source}, out=out, weight=weight, bias=bias, add=add)
    check(built, batch, given_values, [] if logits else [out], vocabulary=outputs if logits else 0)


@holds(10, 100, kinds=KINDS, rng=generators(), rows=row_counts, outputs=st.integers(1, 70), wild=st.booleans())
def gateup(kind: str, rng: np.random.Generator, rows: int, outputs: int, wild: bool) -> None:
    inputs = pick_inputs(rng, kind, 200)
    built = Builder(rng)
    which, x = input_for(rng, kind, rows, inputs, wild)
    # The halves of a layer may be stored differently.
    other = kind if rng.random() < 0.7 or kind in ("bf16", "f32") else str(rng.choice(INTEGER))
    if KINDS[other].unit > KINDS[kind].unit:
        other = kind
    gate, up = built.weight(kind, outputs, inputs, wild=wild), built.weight(other, outputs, inputs, wild=wild)
    biases = {f"{name}_bias": built.vector(outputs) for name in ("gate", "up") if rng.random() < 0.4}
    source, out = built.buffer(inputs, which), built.buffer(outputs, str(rng.choice(["f32", "q8"])))
    built.do("gateup", **{"in": source}, gate=gate, up=up, **biases, out=out)
    check(built, plain_batch(rng, rows), {source: x}, [out])


@holds(
    25,
    300,
    rng=generators(),
    rows=row_counts,
    width=st.integers(1, 700),
    kind=st.sampled_from(["f32", "q8"]),
    wild=st.booleans(),
)
def norm_quant_and_elementwise(rng: np.random.Generator, rows: int, width: int, kind: str, wild: bool) -> None:
    built = Builder(rng)
    first, second = built.buffer(width), built.buffer(width)
    normed, small = built.buffer(width, kind), built.buffer(width, "q8")
    gated, total = built.buffer(width), built.buffer(width)
    weight = built.vector(width, wild=wild)
    eps = rng.choice(["1e-05", "1e-06", "0x1p-20", "0"])
    built.do("norm", **{"in": first}, out=normed, weight=weight, eps=eps)
    built.do("quant", **{"in": second}, out=small)
    built.do("silu_mul", gate=first, up=second, out=gated)
    built.do("add", a=first, b=second, out=total)
    inputs = {first: values(rng, rows, width, wild), second: values(rng, rows, width, wild)}
    if rng.random() < 0.3:
        inputs[first] *= np.float32(1e-15)
    check(built, plain_batch(rng, rows), inputs, [normed, small, gated, total])


@holds(
    25,
    200,
    rng=generators(),
    rows=row_counts,
    heads=st.integers(1, 9),
    width=st.sampled_from([16, 32, 48, 64, 80, 96, 128]),
)
def norm_by_heads_and_rope(rng: np.random.Generator, rows: int, heads: int, width: int) -> None:
    built = Builder(rng)
    source, table = built.buffer(heads * width), built.buffer(width)
    wild = bool(rng.random() < 0.3)
    inputs = {source: values(rng, rows, heads * width, wild), table: values(rng, rows, width, wild)}
    outputs = [built.buffer(heads * width)]
    out = outputs[0]
    built.do("norm", **{"in": source}, out=out, weight=built.vector(width), eps="1e-06", heads=heads)
    if width % 32 == 0:
        turned = built.buffer(heads * width)
        built.do("rope", **{"in": out}, out=turned, heads=heads, width=width, table=table)
        built.do("rope", **{"in": out}, out=out, heads=heads, width=width, table=table)  # in place
        outputs.append(turned)
    check(built, plain_batch(rng, rows), inputs, outputs)


@holds(
    20,
    200,
    rng=generators(),
    rows=row_counts,
    width=st.sampled_from([2, 8, 16, 32, 64, 80, 128]),
    base=st.sampled_from([1e4, 1e6]),
)
def rope_table(rng: np.random.Generator, rows: int, width: int, base: float) -> None:
    built = Builder(rng)
    frequency = (base ** (-np.arange(width // 2) * 2 / width)).astype(np.float32)
    table = built.buffer(width)
    scale = rng.choice(["1.0", "0x1.3p+0", "0.1"])
    built.do("rope_table", out=table, inv_freq=built.vector(width // 2, values=frequency), scale=scale)
    batch = plain_batch(rng, rows)
    batch.position[:] = rng.integers(0, 1 << int(rng.integers(1, 24)), size=rows)
    check(built, batch, {}, [table])


@holds(6, 40, kinds=KINDS, rng=generators(), rows=row_counts, vocabulary=st.integers(1, 60), wild=st.booleans())
def embed_and_select(kind: str, rng: np.random.Generator, rows: int, vocabulary: int, wild: bool) -> None:
    built = Builder(rng)
    width = pick_inputs(rng, kind, 300)
    out, wanted = built.buffer(width), built.buffer(width, rows="wanted")
    built.do("embed", out=out, weight=built.weight(kind, vocabulary, width, wild=wild))
    built.do("select", **{"in": out}, out=wanted)
    check(built, plain_batch(rng, rows, vocabulary), {}, [out, wanted])


@st.composite
def plans(draw: Any, *, cost: int, widths: tuple[int, ...]) -> Plan:
    """Batches of prompts, single rows and drafts; `cost` bounds the positions that all rows look at together."""
    rng = np.random.default_rng(draw(seeds))
    width, groups = draw(st.sampled_from(widths)), draw(st.integers(1, 3))
    window = draw(st.sampled_from([0, 0, 1, 3, 17, 128, 200]))
    parts = []
    for _ in range(draw(st.integers(1, 6))):
        rows = int(rng.choice([1, 1, 2, 3, 5, 8, 13, 16, 17, 30]))
        context = int(rng.choice([0, 1, 15, 16, 100, 126, 127, 128, 129, 255, 256, 300, 700]))
        context += int(rng.integers(0, 3)) * int(rng.random() < 0.3)
        price = rows * min(context + rows, window or context + rows)
        if cost < price or sum(part.rows for part in parts) + rows > 64:
            continue
        cost -= price
        parts.append(Part(context, rows))
    kind = draw(st.sampled_from(["bf16", "int8"]))
    return Plan(
        parts or [Part(0, 1)],
        page_size=draw(st.sampled_from([16, 32, 64, 128, 256])),
        window=window,
        shuffled=draw(st.integers(0, 4)) == 0,
        wild=draw(st.integers(0, 3)) == 0,
        caches=[(kind, groups, width)],
    )


WIDTHS = (16, 32, 48, 64, 96, 128)


def check_attend(rng: np.random.Generator, plan: Plan, per_group: int, out: str) -> None:
    kind, groups, width = plan.caches[0]
    heads = per_group * groups
    built = Builder(rng)
    query, result = built.buffer(heads * width), built.buffer(heads * width, out)
    scale = rng.choice(["0.125", "1.0", "0x1.6a09e6p-4"])
    shape = {"heads": heads, "kv_heads": groups, "width": width}
    cache = built.cache(kind, groups, width)
    built.do("attend", query=query, out=result, cache=cache, **shape, scale=scale, window=plan.window)
    batch = make_batch(rng, plan)
    x = rng.normal(size=(len(batch.token), heads * width)).astype(np.float32)
    check(built, batch, {query: sprinkle(rng, x, 0.0005) if plan.wild else x}, [result])


for name, most, widths, fast, deep in (("short", 1200, WIDTHS, 15, 100), ("long", 6000, (32, 64), 3, 40)):
    arguments = {"rng": generators(), "per_group": st.integers(1, 9), "out": st.sampled_from(["f32", "q8"])}
    arguments["plan"] = plans(cost=most, widths=widths)
    PROPERTIES.append(Property(check_attend, arguments, f"attend-{name}", fast, deep))


@holds(15, 150, rng=generators(), plan=plans(cost=100000, widths=WIDTHS))
def write_kv(rng: np.random.Generator, plan: Plan) -> None:
    kind, groups, width = plan.caches[0]
    built = Builder(rng)
    key, value, cache = built.buffer(groups * width), built.buffer(groups * width), built.cache(kind, groups, width)
    built.do("write_kv", key=key, value=value, cache=cache)
    batch = make_batch(rng, plan)
    inputs = {b: values(rng, len(batch.token), groups * width, plan.wild) for b in (key, value)}
    check(built, batch, inputs, [])


@holds(
    8, 60, kinds=KINDS, rng=generators(), plan=plans(cost=100000, widths=(32, 64, 96, 128)), per_group=st.integers(1, 4)
)
def qkv(kind: str, rng: np.random.Generator, plan: Plan, per_group: int) -> None:
    cache_kind, groups, width = plan.caches[0]
    heads, inputs = per_group * groups, pick_inputs(rng, kind, 100)
    built = Builder(rng)
    which, x = input_for(rng, kind, sum(part.rows for part in plan.parts), inputs, plan.wild)
    kinds = [kind] * 3
    if kind in ("q4_k", "q4_1") and rng.random() < 0.5:
        kinds[2] = "q6_k" if kind == "q4_k" else "q8_0"
    sizes = {"q": heads * width, "k": groups * width, "v": groups * width}
    fields: dict[str, Any] = {
        name: built.weight(one, size, inputs) for (name, size), one in zip(sizes.items(), kinds, strict=True)
    }
    if rng.random() < 0.5:
        fields |= {f"{name}_bias": built.vector(size) for name, size in sizes.items()}
    if rng.random() < 0.5:
        fields |= {"q_norm": built.vector(width), "k_norm": built.vector(width), "eps": "1e-06"}
    source, table, query = built.buffer(inputs, which), built.buffer(width), built.buffer(heads * width)
    cache = built.cache(cache_kind, groups, width)
    shape = {"heads": heads, "kv_heads": groups, "width": width}
    built.do("qkv", **{"in": source}, **fields, **shape, table=table, query=query, cache=cache)
    batch = make_batch(rng, plan)
    frequency = (1e4 ** (-np.arange(width // 2) * 2 / width)).astype(np.float32)
    check(built, batch, {source: x, table: defined_table(batch.position, frequency)}, [query])


@holds(5, 40, kinds=KINDS, rng=generators(), rows=row_counts, experts=st.integers(1, 18), renormalise=st.integers(0, 1))
def moe(kind: str, rng: np.random.Generator, rows: int, experts: int, renormalise: int) -> None:
    built = Builder(rng)
    # Widths of products on both sides are inputs of a weight.
    hidden, inner = (256, 256) if KINDS[kind].unit == 256 else (pick_inputs(rng, kind, 100) for _ in range(2))
    router = built.weight(str(rng.choice(["f32", "bf16", "q8_0", "q4_1"])), experts, hidden)
    wild = bool(rng.random() < 0.2)
    gate, *_ = [built.weight(kind, inner, hidden) for _ in range(experts)]
    up, *_ = [built.weight(kind, inner, hidden, wild=wild) for _ in range(experts)]
    down, *_ = [built.weight(kind, hidden, inner, wild=wild) for _ in range(experts)]
    source, out = built.buffer(hidden), built.buffer(hidden)
    weights = {"router": router, "gate": gate, "up": up, "down": down}
    top_k = int(rng.integers(1, experts + 1))
    built.do("moe", **{"in": source}, out=out, **weights, experts=experts, top_k=top_k, renormalise=renormalise)
    x = rng.normal(size=(rows, hidden)).astype(np.float32)
    x[rng.random(rows) < 0.1] = 0  # every expert alike: the lowest are chosen
    check(built, plain_batch(rng, rows), {source: x}, [out])


@pytest.mark.parametrize("one", PROPERTIES, ids=lambda one: one.name)
def test_as_defined(one: Property) -> None:
    one.check(one.fast)


@pytest.mark.slow
@pytest.mark.parametrize("one", PROPERTIES, ids=lambda one: one.name)
def test_as_defined_in_depth(one: Property) -> None:
    one.check(one.deep)
