"""Packed weights in memory and in a file of the user's cache.

A file is a header of one page, which says what is in it, and the packed bytes. It is written under another name and
then renamed, so that a reader finds a whole file or none, whoever writes at the same time. A file whose header or size
is not what is expected counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu.packing import PACK_VERSION

HEADER_SIZE = 4096
IN_HUGE_PAGES = True
"""Whether weights are read into memory of their own, in huge pages; otherwise the file is mapped."""

Bytes = npt.NDArray[np.uint8]


class PackedWeights:
    """Bytes at an address that does not change. They are given back with the last reference to this object."""

    def __init__(self, memory: mmap.mmap, offset: int, size: int) -> None:
        self._memory = memory
        self.data: Bytes = np.frombuffer(memory, np.uint8, size, offset)
        self.size = size

    @property
    def address(self) -> int:
        return int(self.data.ctypes.data)


def huge_memory(size: int, begin: int = 0) -> mmap.mmap:
    """Zeroed memory of this process; it is taken when it is first used.

    From byte `begin` (a multiple of the system's page) on it is in huge pages where the system gives them. They are
    read a little faster, but the first byte that is used of one takes all of it.
    """
    # Python's default is a shared mapping, which the system treats as a file: it gets no huge pages.
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and begin < size:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, begin)
    return memory


def pack_in_memory(size: int, fill: Callable[[Bytes], None]) -> PackedWeights:
    """New memory that `fill` has written to."""
    packed = PackedWeights(huge_memory(size), 0, size)
    fill(packed.data)
    return packed


def read_packed(path: Path, layout: str, size: int) -> PackedWeights | None:
    """The weights in `path`, if it is a whole file of that layout and size."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != HEADER_SIZE + size or file.read(HEADER_SIZE) != _header(layout, size):
                return None
            return _contents(file, size)
    except OSError:
        return None


def _contents(file: BinaryIO, size: int) -> PackedWeights | None:
    if not IN_HUGE_PAGES:
        memory = mmap.mmap(file.fileno(), HEADER_SIZE + size, access=mmap.ACCESS_READ)
        return PackedWeights(memory, HEADER_SIZE, size)
    packed = PackedWeights(huge_memory(size), 0, size)
    view = packed.data.data
    done = 0
    while done < size:
        count = os.preadv(file.fileno(), [view[done:]], HEADER_SIZE + done)
        if count <= 0:
            return None
        done += count
    return packed


def write_packed(path: Path, layout: str, packed: PackedWeights) -> bool:
    """Keep weights in `path`. -> False where that folder cannot be written to."""

    def write(file: BinaryIO) -> None:
        file.write(_header(layout, packed.size))
        file.write(packed.data.data)

    return write_whole(path, write)


def write_whole(path: Path, write: Callable[[BinaryIO], Any]) -> bool:
    """Make or replace a file at once. -> False where that is not possible; nothing is left behind then."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False) as file:
            temporary = Path(file.name)
            write(file)  # type: ignore[arg-type]
        temporary.replace(path)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        return False
    return True


def mark_used(path: Path) -> None:
    """Count a file as used now."""
    with contextlib.suppress(OSError):
        os.utime(path)


def last_used(path: Path) -> float:
    """When a file was written or marked as used, in seconds as `time.time` counts; 0 if it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _header(layout: str, size: int) -> bytes:
    said = {
        "slipstream-weights": PACK_VERSION,
        "layout": hashlib.sha256(layout.encode()).hexdigest(),
        "size": size,
    }
    return json.dumps(said).encode().ljust(HEADER_SIZE - 1) + b"\n"
