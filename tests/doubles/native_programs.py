"""Small programs for the native executor: written line by line, run by the library and by their definition."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from doubles.native_weights import pack, random_fields, sprinkle
from slipstream.kernels.cpu import library as native
from slipstream.ops.native_spec.arithmetic import F32
from slipstream.ops.native_spec.cache import Pages, page_bytes
from slipstream.ops.native_spec.program import Batch, Interpreter, read
from slipstream.ops.native_spec.quantise import Quantised
from slipstream.ops.native_spec.weights import packed_size

Bytes = npt.NDArray[np.uint8]
Value = F32 | Quantised

Q8_BLOCK = np.dtype(
    [("q", "i1", 32), ("scale", "f4"), ("fsum", "f4"), ("neg8", "i4"), ("neg8h", "i4", 2), ("unused", "i4", 3)]
)


@cache
def libraries() -> list[native.NativeLibrary]:
    """The library once for each instruction set that this processor runs; empty if it is not built.

    SLIPSTREAM_TEST_NATIVE names a folder with another build (of sanitizers, say) to be tested instead.
    """
    folder = os.environ.get("SLIPSTREAM_TEST_NATIVE")
    found = native._open(Path(folder) if folder else Path(native.__file__).parent)
    if isinstance(found, native.Missing):
        return []
    handle, path = found
    return [native.NativeLibrary(handle, path, isa) for isa in range(handle.ss_best_isa() + 1)]


def why_missing() -> str:
    """Why `libraries` is empty."""
    found = native._open(Path(native.__file__).parent)
    return f"the native library is {found.reason}" if isinstance(found, native.Missing) else ""


@cache
def pool(threads: int) -> native.NativePool:
    return native.NativePool(libraries()[0], threads, sorted(os.sched_getaffinity(0)))


def aligned(size: int) -> Bytes:
    """Zeros at an address that is a multiple of 64."""
    raw = np.zeros(size + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + size]


class Builder:
    """A program's text and weights, line by line. Methods return the number of what they add."""

    def __init__(self, rng: np.random.Generator, max_rows: int = 64) -> None:
        self.rng = rng
        self.max_rows = max_rows
        self._lines: dict[str, list[str]] = {name: [] for name in ("buffer", "weight", "vector", "cache", "do")}
        self._data: list[Bytes] = []
        self._size = 0

    def _add(self, what: str, name: str, **fields: Any) -> int:
        count = len(self._lines[what])
        words = [what, str(count)] if what != "do" else [what]
        self._lines[what].append(
            " ".join([*words, *([name] if name else []), *(f"{k}={v}" for k, v in fields.items())])
        )
        return count

    def _store(self, data: Bytes) -> int:
        offset = self._size
        filled = np.zeros(-(-data.size // 64) * 64, np.uint8)
        filled[: data.size] = data
        self._data.append(filled)
        self._size += filled.size
        return offset

    def buffer(self, width: int, kind: str = "f32", rows: str = "all") -> int:
        count = len(self._lines["buffer"])
        return self._add("buffer", f"b{count}", kind=kind, width=width, slot=count, rows=rows)

    def weight(self, kind: str, outputs: int, inputs: int, *, size: float | None = None, wild: bool = False) -> int:
        fields = random_fields(self.rng, kind, outputs, inputs, size=size or inputs**-0.5, wild=wild)
        where = {"offset": self._store(pack(fields)), "bytes": packed_size(kind, outputs, inputs)}
        return self._add("weight", "w", kind=kind, outputs=outputs, inputs=inputs, **where)

    def vector(self, count: int, *, wild: bool = False, values: F32 | None = None) -> int:
        data = self.rng.normal(size=count).astype(np.float32) if values is None else values
        data = sprinkle(self.rng, data) if wild else data
        return self._add("vector", "v", count=count, offset=self._store(np.ascontiguousarray(data).view(np.uint8)))

    def cache(self, kind: str, heads: int, width: int) -> int:
        return self._add("cache", "", heads=heads, width=width, kind=kind)

    def do(self, name: str, **fields: Any) -> int:
        return self._add("do", name, **{k: v for k, v in fields.items() if v is not None})

    @property
    def text(self) -> str:
        lines = (line for part in self._lines.values() for line in part)
        return "\n".join(["slipstream-program 1", *lines, ""])

    @property
    def weights(self) -> Bytes:
        out = aligned(max(64, self._size))
        if self._data:
            out[: self._size] = np.concatenate(self._data)
        return out


@dataclass
class Part:
    """`rows` new tokens of a sequence that has `context` tokens in its pages already."""

    context: int
    rows: int


@dataclass
class Plan:
    """Which rows a batch has. `order` shuffles them, `window` is how far they see (0: everything)."""

    parts: list[Part]
    page_size: int = 16
    window: int = 0
    shuffled: bool = False
    wild: bool = False
    vocabulary: int = 1
    caches: list[tuple[str, int, int]] = field(default_factory=list)


def make_batch(rng: np.random.Generator, plan: Plan) -> Batch:
    """Scattered pages; what no row may see is NaN, or in no page at all; what it may see is random."""
    size = plan.page_size
    lengths = [part.context + part.rows for part in plan.parts]
    stride = max(-(-length // size) for length in lengths) + int(rng.integers(0, 3))
    num_pages = sum(-(-length // size) for length in lengths) + 3
    free = list(rng.permutation(np.arange(1, num_pages)))
    table = np.zeros((len(plan.parts) + 1, stride), np.int32)
    columns: list[tuple[int, int, int]] = []
    for number, part in enumerate(plan.parts, 1):
        first_seen = max(0, part.context - plan.window + 1) if plan.window else 0
        for page in range(first_seen // size, -(-lengths[number - 1] // size)):
            table[number, page] = free.pop()
        columns += [(number, position, first_seen) for position in range(part.context, lengths[number - 1])]
    if plan.shuffled:
        columns = [columns[i] for i in rng.permutation(len(columns))]
    sequence, position, _ = (np.array(column, np.int32) for column in zip(*columns, strict=True))
    wants = rng.random(len(columns)) < 0.5
    wants[int(rng.integers(len(columns)))] = True
    caches = []
    for kind, heads, width in plan.caches:
        data = np.full(num_pages * page_bytes(kind, heads, width, size), 0xFF, np.uint8)
        pages = Pages(kind, heads, width, size, data)
        for number, part in enumerate(plan.parts, 1):
            first_seen = max(0, part.context - plan.window + 1) if plan.window else 0
            where = np.arange(first_seen, lengths[number - 1], dtype=np.int32)
            key, value = (rng.normal(size=(len(where), heads * width)).astype(np.float32) for _ in "kv")
            if plan.wild:
                key, value = sprinkle(rng, key, 0.001), sprinkle(rng, value, 0.001)
            pages.write(key, value, table[number, where // size] * size + where % size)
        caches.append(data)
    return Batch(
        token=rng.integers(plan.vocabulary, size=len(columns)).astype(np.int32),
        position=position,
        sequence=sequence,
        slot=(table[sequence, position // size] * size + position % size).astype(np.int32),
        wants_logits=wants,
        page_table=table,
        page_size=size,
        caches=caches,
    )


def copied(batch: Batch) -> Batch:
    """The batch with caches of its own."""
    return replace(batch, caches=[data.copy() for data in batch.caches])


def rows_of(batch: Batch, rows: Any) -> Batch:
    """The batch of some of its rows, over the same caches."""
    names = ("token", "position", "sequence", "slot", "wants_logits")
    return replace(batch, **{name: np.ascontiguousarray(getattr(batch, name)[rows]) for name in names})


class Executor:
    """A program in the library. Its buffers are written and read as values."""

    def __init__(self, built: Builder, library: native.NativeLibrary, threads: int = 1) -> None:
        self.listing = read(built.text)
        self._library, self._pool = library, pool(threads)
        self._weights = built.weights
        self.program = native.NativeProgram(
            library, built.text, self._weights.ctypes.data, self._weights.size, max_rows=built.max_rows
        )

    def _rows(self, buffer: int, rows: int) -> Bytes:
        address, row_bytes = self.program.buffer(buffer)
        flat = np.ctypeslib.as_array((ctypes.c_uint8 * (rows * row_bytes)).from_address(address))
        return flat.reshape(rows, row_bytes)

    def write(self, buffer: int, value: Value) -> None:
        if isinstance(value, Quantised):
            blocks = self._rows(buffer, len(value.q)).view(Q8_BLOCK)
            blocks["q"] = value.q.reshape(*blocks.shape, 32)
            blocks["scale"], blocks["fsum"], blocks["neg8"] = value.scale, value.fsum, value.neg8
            blocks["neg8h"] = value.neg8h.reshape(*blocks.shape, 2)
        else:
            self._rows(buffer, len(value)).view(np.float32)[:, : value.shape[1]] = value

    def read(self, buffer: int, rows: int) -> Value:
        """A copy of a buffer's rows; the stored sums of a quantised one must fit its numbers."""
        fields, raw = self.listing.buffers[buffer], self._rows(buffer, rows).copy()
        if fields["kind"] == "f32":
            return raw.view(np.float32)[:, : int(fields["width"])].copy()
        blocks = raw.view(Q8_BLOCK)
        value = Quantised(blocks["q"].reshape(rows, -1), blocks["scale"].copy(), blocks["fsum"].copy())
        np.testing.assert_array_equal(blocks["neg8"], value.neg8)
        np.testing.assert_array_equal(blocks["neg8h"].reshape(rows, -1), value.neg8h)
        return value

    def run(self, batch: Batch, vocabulary: int = 0, first: int = 0, last: int | None = None) -> F32:
        """Run instructions [first, last) -> logits of the rows that want them."""
        wanted = int(batch.wants_logits.sum())
        logits = np.full((wanted, max(1, vocabulary)), np.float32(np.nan))
        wants = batch.wants_logits.astype(np.uint8)
        arrays = [batch.token, batch.position, batch.sequence, batch.slot, batch.page_table]
        arrays = [np.ascontiguousarray(x) for x in arrays]
        caches = []
        for data in batch.caches:
            caches.append(aligned(data.size))
            caches[-1][:] = data
        arguments = native.NativeBatch(
            len(batch.token),
            wanted,
            batch.page_size,
            batch.page_table.shape[1],
            *(x.ctypes.data for x in arrays),
            wants.ctypes.data,
            (ctypes.c_void_p * max(1, len(caches)))(*(data.ctypes.data for data in caches)),
            logits.ctypes.data,
        )
        run = self._library.handle.ss_program_run
        end = self.program.length if last is None else last
        code = run(self.program.address, self._pool.address, ctypes.byref(arguments), first, end)
        assert code == 0, f"the library refuses the batch: {code}"
        for data, mine in zip(batch.caches, caches, strict=True):
            data[:] = mine
        return logits


def assert_same(got: Value | None, want: Value | None, what: str) -> None:
    """Equal bits, but that a NaN equals any NaN."""
    if isinstance(want, Quantised):
        assert isinstance(got, Quantised)
        for name in ("q", "scale", "fsum"):
            assert_same(getattr(got, name), getattr(want, name), f"{what}: {name}")
        return
    assert isinstance(got, np.ndarray)
    assert isinstance(want, np.ndarray)
    assert got.shape == want.shape, (what, got.shape, want.shape)
    bits = {4: np.uint32, 2: np.uint16, 1: np.uint8}[want.itemsize]
    differ = np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(want).view(bits)
    if want.dtype == np.float32:
        differ &= ~(np.isnan(got) & np.isnan(want))
    if differ.any():
        at = tuple(int(i[0]) for i in np.nonzero(differ))
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.size} differ, first at {at}: {got[at]!r}, should be {want[at]!r}"
        )


def assert_same_caches(built: Builder, got: Batch, want: Batch, what: str) -> None:
    """Equal pages, but for the scratch page."""
    for number, fields in enumerate(read(built.text).caches):
        shape = (fields["kind"], int(fields["heads"]), int(fields["width"]), want.page_size)
        mine, theirs = (Pages(*shape, batch.caches[number]) for batch in (got, want))
        names = ("keys", "values") + (("key_scales", "value_scales") if fields["kind"] == "int8" else ())
        for name in names:
            pair = [getattr(pages, name)[1:] for pages in (mine, theirs)]
            if fields["kind"] == "bf16":
                pair = [(x.astype(np.uint32) << 16).view(np.float32) for x in pair]
            assert_same(*(np.ascontiguousarray(x) for x in pair), f"{what}: cache {number}, {name}")


def check(
    built: Builder,
    batch: Batch,
    inputs: dict[int, Value],
    outputs: list[int],
    *,
    vocabulary: int = 0,
    threads: tuple[int, ...] = (1, 2),
) -> None:
    """Run a program by its definition and by the library in every way, and compare outputs, logits and caches."""
    reference = Interpreter(built.text, built.weights)
    reference.values.update(inputs)
    after = copied(batch)
    reference.run(after)
    for library in libraries():
        for count in threads:
            executor = Executor(built, library, count)
            for buffer, value in inputs.items():
                executor.write(buffer, value)
            mine = copied(batch)
            logits = executor.run(mine, vocabulary)
            what = f"{native.ISAS[library.isa]}, {count} threads\n{built.text}"
            for buffer in outputs:
                want = reference.values[buffer]
                got = executor.read(buffer, len(want.q) if isinstance(want, Quantised) else len(want))
                assert_same(got, want, f"{what}: buffer {buffer}")
            if vocabulary:
                assert_same(logits, reference.logits, f"{what}: logits")
            assert_same_caches(built, mine, after, what)
