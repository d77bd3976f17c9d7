"""The header of a GGUF file: magic, version, key-value metadata and the table of tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. Nothing in the file
is trusted: every count and length is checked against the bytes that are left before anything is allocated.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from slipstream.core.errors import LoadError
from slipstream.loading.gguf_blocks import FORMATS, Format

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
# Metadata value types by number, as numpy types; 8 is a string and 9 an array.
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9

# Far above what any model writes; they keep a damaged count or length from filling the memory.
_MAX_ITEMS = 1 << 24
_MAX_STRING = 1 << 26
_MAX_NESTING = 4
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32
# The fewest bytes an entry can take: a key's length, type and value; a tensor's name length, dims, type and offset.
_SMALLEST_PAIR, _SMALLEST_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor table: `shape` in torch's order (rows first), `offset` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    fmt: Format
    offset: int
    nbytes: int

    @property
    def type(self) -> str:
        """The stored format's name, such as Q4_1."""
        return self.fmt.name


@dataclass(frozen=True)
class Header:
    """What a file says before its tensor data."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_header(path: Path, data: mmap) -> Header:
    """Parse and check the header of the mapped file. Raises LoadError naming `path` and the problem."""
    return _Parser(path, data).header()


class _Parser:
    """A position in the mapped file. Every read says what it reads, for the error's sentence."""

    def __init__(self, path: Path, data: mmap) -> None:
        self.path = path
        self.data = data
        self.end = len(data)
        self.pos = 0

    def fail(self, problem: str) -> NoReturn:
        raise LoadError(f"{self.path}: {problem}")

    def need(self, size: int, what: str) -> int:
        """Step over `size` bytes and return where they start."""
        start = self.pos
        if size > self.end - start:
            self.fail(f"the file ends inside {what}; it is truncated or damaged")
        self.pos = start + size
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.need(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.need(8, what))[0]
        return value

    def count(self, what: str, smallest: int) -> int:
        """A 64-bit count of items that take at least `smallest` bytes each."""
        count = self.u64(what)
        if count > min(_MAX_ITEMS, (self.end - self.pos) // smallest):
            self.fail(f"{what} is {count}, more than the file can hold; it is truncated or damaged")
        return count

    def string(self, what: str) -> str:
        size = self.u64(what)
        start = self.need(size, what)
        if size > _MAX_STRING:
            self.fail(f"{what} is said to be {size} bytes long; the file is damaged")
        try:
            return self.data[start : self.pos].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not valid UTF-8; the file is damaged")

    def header(self) -> Header:
        version = self.version()
        tensor_count = self.count("the number of tensors", _SMALLEST_TENSOR)
        pair_count = self.count("the number of metadata entries", _SMALLEST_PAIR)
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self.string("a metadata key")
            if key in metadata:
                self.fail(f"metadata key {key!r} appears twice; the file is damaged")
            metadata[key] = self.value(self.u32(f"the type of {key!r}"), f"the value of {key!r}")
        return Header(version, metadata, self.tensors(tensor_count, self.alignment(metadata)))

    def version(self) -> int:
        magic = self.data[self.need(4, "the magic number") : 4]
        if magic != b"GGUF":
            self.fail("this is not a GGUF file (its first four bytes are not GGUF)")
        version = self.u32("the version")
        if version & 0xFFFF == 0 and version:
            self.fail("this GGUF file is big-endian; Slipstream reads little-endian files only")
        if version not in (2, 3):
            self.fail(f"this is GGUF version {version}; Slipstream reads versions 2 and 3")
        return version

    def value(self, kind: int, what: str, nesting: int = 0) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what, nesting)
        return self.scalars(kind, 1, what)[0]

    def scalars(self, kind: int, count: int, what: str) -> list[Any]:
        code = _SCALARS.get(kind)
        if code is None:
            self.fail(f"{what} has the unknown type {kind}; the file is damaged or newer than this reader")
        dtype = np.dtype(code)
        start = self.need(count * dtype.itemsize, what)
        items: list[Any] = np.frombuffer(self.data, dtype, count, start).tolist()
        return items

    def array(self, what: str, nesting: int) -> list[Any]:
        kind = self.u32(what)
        if kind == _STRING:
            return self.strings(self.count(f"the length of {what}", 8), what)
        if kind == _ARRAY:
            if nesting == _MAX_NESTING:
                self.fail(f"{what} is nested more than {_MAX_NESTING} deep; the file is damaged")
            count = self.count(f"the length of {what}", 12)
            return [self.array(what, nesting + 1) for _ in range(count)]
        return self.scalars(kind, self.count(f"the length of {what}", 1), what)

    def strings(self, count: int, what: str) -> list[str]:
        # A vocabulary has 10^5 strings, so this loop is kept bare; only its last position needs a check, since slices
        # of a map are clipped at its end and a length beyond the end makes the next read fail.
        data, unpack, pos = self.data, _U64.unpack_from, self.pos
        out: list[str] = []
        append = out.append
        try:
            for _ in range(count):
                start, size = pos + 8, unpack(data, pos)[0]
                if size > _MAX_STRING:
                    self.fail(f"a string in {what} is said to be {size} bytes long; the file is damaged")
                pos = start + size
                append(data[start:pos].decode())
        except UnicodeDecodeError:
            self.fail(f"{what} holds text that is not valid UTF-8; the file is damaged")
        except struct.error:
            self.fail(f"the file ends inside {what}; it is truncated or damaged")
        self.need(pos - self.pos, what)
        return out

    def alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            self.fail(f"general.alignment is {alignment!r}, not a power of two; the file is damaged")
        return alignment

    def tensors(self, count: int, alignment: int) -> dict[str, GGUFTensor]:
        entries = [self.entry(alignment) for _ in range(count)]
        start = -(-self.pos // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for entry in entries:
            if entry.name in tensors:
                self.fail(f"tensor {entry.name!r} appears twice; the file is damaged")
            offset = start + entry.offset
            if offset + entry.nbytes > self.end:
                self.fail(f"the data of tensor {entry.name!r} lies beyond the file's end; it is truncated or damaged")
            tensors[entry.name] = GGUFTensor(entry.name, entry.shape, entry.fmt, offset, entry.nbytes)
        self.check_overlap(tensors)
        return tensors

    def entry(self, alignment: int) -> GGUFTensor:
        """One row of the tensor table, its offset still counted from the start of the data."""
        name = self.string("a tensor's name")
        what = f"the entry of tensor {name!r}"
        dims = self.u32(what)
        if dims > _MAX_DIMS:
            self.fail(f"tensor {name!r} has {dims} dimensions; at most {_MAX_DIMS} are allowed, the file is damaged")
        shape = tuple(self.u64(what) for _ in range(dims))[::-1]
        fmt = FORMATS.get(kind := self.u32(what))
        if fmt is None:
            self.fail(f"tensor {name!r} is stored in the unknown format {kind}; the file is damaged or too new")
        offset = self.u64(what)
        if offset % alignment:
            self.fail(f"the offset of tensor {name!r} is not a multiple of {alignment}; the file is damaged")
        values = 1
        for size in shape:
            values *= size
        if values == 0 or (shape[-1] if shape else 1) % fmt.block:
            self.fail(f"tensor {name!r} of shape {list(shape)} cannot be stored as {fmt.name}; the file is damaged")
        return GGUFTensor(name, shape, fmt, offset, values // fmt.block * fmt.size)

    def check_overlap(self, tensors: dict[str, GGUFTensor]) -> None:
        end = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self.fail(f"the data of tensor {tensor.name!r} overlaps another tensor's; the file is damaged")
            end = tensor.offset + tensor.nbytes
