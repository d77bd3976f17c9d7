"""Sample inputs of every op: what its conformance test runs. An op without cases fails the test.

Every case has the 16 rows of a tile unless its name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS = 16


@dataclass
class Case:
    """Arguments of one call. `tolerance` is the largest difference from the reference, relative to its largest value.

    `rows` names the arguments with one entry per row, and the dimension in which; empty where rows are not alone.
    `out_rows` is that dimension of the result.
    """

    name: str
    arguments: tuple[Any, ...]
    tolerance: float
    rows: dict[int, int]
    out_rows: int = 0


Make = Callable[[torch.Generator], Iterator[Case]]
CASES: dict[str, Make] = {}


def cases_of(op: str, seed: int = 0) -> list[Case]:
    """The cases of an op, with values drawn by `seed`; shapes are the same for every seed."""
    return list(CASES[op](torch.Generator().manual_seed(seed))) if op in CASES else []


def _of(op: str) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        CASES[op] = make
        return make

    return register


def _random(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=g) * scale).to(dtype)


def _index(g: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=g)


def _precision(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2e-2


BOTH = (torch.float32, torch.bfloat16)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@_of("linear")
def _linear(g: torch.Generator) -> Iterator[Case]:
    for inputs, outputs, bias in (
        (576, 1536, False),
        (1536, 576, True),
        (576, 4099, False),
        (40, 7, True),
        (8, 1, False),
    ):
        for dtype in BOTH:
            weight = _random(g, outputs, inputs, dtype=dtype, scale=inputs**-0.5)
            offset = _random(g, outputs, dtype=dtype) if bias else None
            arguments = (_random(g, ROWS, inputs, dtype=dtype), weight, offset)
            yield Case(f"{inputs}-{outputs}-{_short(dtype)}", arguments, _precision(dtype), {0: 0})
    yield Case("one-row", (_random(g, 1, 64), _random(g, 96, 64), None), 1e-5, {})
    yield Case("bias-left-out", (_random(g, ROWS, 64), _random(g, 96, 64)), 1e-5, {0: 0})
    # Not row-wise: MKL sums rows in several orders where inputs are no multiple of 8 and outputs fewer than 10.
    yield Case("odd-inputs", (_random(g, ROWS, 33), _random(g, 7, 33), None), 1e-5, {})


@_of("embedding")
def _embedding(g: torch.Generator) -> Iterator[Case]:
    for vocab, hidden in ((1000, 576), (1, 8), (49, 1)):
        for dtype in BOTH:
            arguments = (_index(g, vocab, ROWS), _random(g, vocab, hidden, dtype=dtype))
            yield Case(f"{vocab}-{hidden}-{_short(dtype)}", arguments, 0.0, {0: 0})
    yield Case("last-token", (torch.full((ROWS,), 99), _random(g, 100, 12)), 0.0, {0: 0})


@_of("rms_norm")
def _rms_norm(g: torch.Generator) -> Iterator[Case]:
    for shape in ((ROWS, 576), (ROWS, 9, 64), (ROWS, 1), (ROWS, 3, 7)):
        for dtype in BOTH:
            arguments = (_random(g, *shape, dtype=dtype, scale=3), 1 + _random(g, shape[-1], dtype=dtype), 1e-5)
            yield Case(f"{'x'.join(map(str, shape))}-{_short(dtype)}", arguments, _precision(dtype), {0: 0})
    yield Case("zeros", (torch.zeros(ROWS, 64), _random(g, 64), 1e-6), 1e-5, {0: 0})
    yield Case(
        "tiny-and-huge",
        (_random(g, ROWS, 64) * 10.0 ** _random(g, ROWS, 1, scale=6), _random(g, 64), 1e-6),
        1e-5,
        {0: 0},
    )


@_of("rope_table")
def _rope_table(g: torch.Generator) -> Iterator[Case]:
    for half, theta, scale in ((32, 1e4, 1.0), (64, 1e6, 1.2079), (1, 5e5, 1.0), (12, 1e3, 1.0)):
        inv_freq = theta ** -(torch.arange(half) / half)
        yield Case(f"{half}", (_index(g, 8192, ROWS), inv_freq, scale), 1e-5, {0: 0}, out_rows=1)
    far = torch.arange(131072 - ROWS, 131072)
    yield Case("far", (far, 1e6 ** -(torch.arange(64) / 64), 1.0), 1e-5, {0: 0}, out_rows=1)
    yield Case("start", (torch.zeros(ROWS, dtype=torch.int64), torch.ones(4), 1.0), 1e-5, {0: 0}, out_rows=1)


@_of("rope")
def _rope(g: torch.Generator) -> Iterator[Case]:
    for heads, width in ((9, 64), (1, 2), (3, 128), (2, 24)):
        for dtype in BOTH:
            angle = _random(g, ROWS, width // 2, scale=50)
            table = torch.stack((angle.cos(), angle.sin()))
            arguments = (_random(g, ROWS, heads, width, dtype=dtype), table)
            yield Case(f"{heads}x{width}-{_short(dtype)}", arguments, _precision(dtype), {0: 0, 1: 1})


@_of("silu_mul")
def _silu_mul(g: torch.Generator) -> Iterator[Case]:
    for width in (1536, 1, 77, 4100):
        for dtype in BOTH:
            arguments = (_random(g, ROWS, width, dtype=dtype, scale=4), _random(g, ROWS, width, dtype=dtype))
            yield Case(f"{width}-{_short(dtype)}", arguments, _precision(dtype), {0: 0, 1: 0})
    yield Case("far-from-zero", (_random(g, ROWS, 40, scale=200), _random(g, ROWS, 40)), 1e-5, {0: 0, 1: 0})


@_of("moe")
def _moe(g: torch.Generator) -> Iterator[Case]:
    for experts, top_k, hidden, inner, renormalise in (
        (8, 2, 64, 48, True),
        (8, 8, 32, 16, False),
        (1, 1, 16, 8, True),
        (64, 1, 40, 24, False),
    ):
        for dtype in BOTH:
            weights = (
                _random(g, experts, hidden, dtype=dtype, scale=2 * hidden**-0.5),
                _random(g, experts, inner, hidden, dtype=dtype, scale=hidden**-0.5),
                _random(g, experts, inner, hidden, dtype=dtype, scale=hidden**-0.5),
                _random(g, experts, hidden, inner, dtype=dtype, scale=inner**-0.5),
            )
            arguments = (_random(g, ROWS, hidden, dtype=dtype), *weights, top_k, renormalise)
            yield Case(f"{top_k}-of-{experts}-{_short(dtype)}", arguments, _precision(dtype), {0: 0})


@_of("write_kv")
def _write_kv(g: torch.Generator) -> Iterator[Case]:
    """Rows are not alone: they share the cache. Slots differ, since which of two equal ones stays is not defined."""
    for groups, tokens, width, cache_dtype in (
        (3, 32, 64, torch.float32),
        (1, 1, 8, torch.bfloat16),
        (2, 16, 7, torch.float32),
    ):
        pages = 40 // tokens + 2
        slots = torch.randperm(pages * tokens - 1, generator=g)[:ROWS] + 1
        rows = (_random(g, ROWS, groups, width), _random(g, ROWS, groups, width))
        cache = _random(g, pages, groups, 2, tokens, width, dtype=cache_dtype)
        yield Case(f"{groups}-{tokens}-{width}", (cache, *rows, slots), 0.0, {})
    yield Case(
        "one-row", (torch.zeros(2, 1, 2, 4, 8), _random(g, 1, 1, 8), _random(g, 1, 1, 8), torch.tensor([7])), 0.0, {}
    )


@dataclass(frozen=True)
class AttentionShape:
    """Sequences with contexts of the given lengths, whose last rows ask."""

    contexts: tuple[int, ...]
    heads: int
    groups: int
    width: int
    tokens: int
    window: int = 0
    dtype: torch.dtype = torch.float32


ATTENTION = {
    "one-page": AttentionShape((16,), 4, 2, 16, 32),
    "several-groups-of-pages": AttentionShape((300, 17, 131), 9, 3, 64, 16),
    "window": AttentionShape((300, 140, 20), 4, 4, 24, 16, window=37),
    "window-over-groups": AttentionShape((500, 420), 2, 1, 8, 4, window=400),
    "window-of-one": AttentionShape((40, 9), 2, 1, 8, 4, window=1),
    "page-of-one": AttentionShape((21, 3), 4, 1, 32, 1),
    "bfloat16": AttentionShape((200, 90), 8, 2, 32, 32, dtype=torch.bfloat16),
    "one-head": AttentionShape((65,), 1, 1, 1, 8),
}


def attention_arguments(shape: AttentionShape, g: torch.Generator) -> tuple[Any, ...]:
    """A cache on scattered pages, with a padding row at the end as a tile has; unused pages hold other values."""
    counts = [-(-context // shape.tokens) for context in shape.contexts]
    pages = sum(counts) + 3
    free = (torch.randperm(pages - 1, generator=g) + 1).tolist()
    table = torch.zeros(len(counts) + 1, max(counts), dtype=torch.int64)
    for number, count in enumerate(counts, 1):
        table[number, :count] = torch.tensor([free.pop() for _ in range(count)])
    sequence, position = [], []
    each = (ROWS - 1) // len(counts)
    for number, context in enumerate(shape.contexts, 1):
        rows = min(each, context)
        sequence += [number] * rows
        position += range(context - rows, context)
    padding = ROWS - len(sequence)
    cache = _random(g, pages, shape.groups, 2, shape.tokens, shape.width, dtype=shape.dtype)
    query = _random(g, ROWS, shape.heads, shape.width, dtype=shape.dtype, scale=2)
    return (
        query,
        cache,
        table,
        torch.tensor(sequence + [0] * padding),
        torch.tensor(position + [0] * padding),
        shape.width**-0.5,
        shape.window,
    )


@_of("paged_attention")
def _paged_attention(g: torch.Generator) -> Iterator[Case]:
    for name, shape in ATTENTION.items():
        yield Case(name, attention_arguments(shape, g), _precision(shape.dtype), {0: 0, 3: 0, 4: 0})


@_of("sample")
def _sample(g: torch.Generator) -> Iterator[Case]:
    """Greedy, drawn and reported rows; the op's many rules have tests of their own."""
    reals = torch.tensor([[temperature, 1, 0, 1, 1, 0, 0] for temperature in (0.0, 1.0, 0.7, 2.0)] * 4)
    for vocab, num_top in ((100, 0), (1000, 3), (3, 5)):
        wholes = torch.zeros(ROWS, 7, dtype=torch.int64)
        wholes[:, 1:3] = _index(g, 2**32, ROWS, 2)
        wholes[:, 3] = -1
        wholes[:, 6] = int(num_top > 0)
        lists = tuple(torch.empty(0, columns, dtype=torch.int64) for columns in (4, 2, 2, 2))
        penalised, bias_at, banned, allowed = lists
        logits, offsets = _random(g, ROWS, vocab, scale=3), torch.empty(0)
        arguments = (logits, reals, wholes, penalised, bias_at, offsets, banned, allowed, None, num_top)
        yield Case(f"{vocab}", arguments, 1e-5, {0: 0, 1: 0, 2: 0})
