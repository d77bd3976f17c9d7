"""Files mapped into memory, and torch tensors that use the mapped bytes in place."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from slipstream.core.errors import LoadError


def map_file(path: Path) -> mmap.mmap:
    """Map a whole file, privately: pages are shared with the page cache until somebody writes to them, and a write
    never reaches the file. (A read-only map would do, but torch warns about tensors over one.)

    Raises LoadError when the file cannot be opened or is empty.
    """
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except ValueError:
        raise LoadError(f"{path}: the file is empty") from None
    except OSError as error:
        raise LoadError(f"{path}: cannot be opened ({error.strerror or error})") from None


def tensor_over(data: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over the map's bytes from `offset`, which the caller has checked to lie inside it.

    No copy is made, unless the offset is not a multiple of the item size. The tensor keeps the map alive.
    """
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if offset % dtype.itemsize:
        copied = bytearray(data[offset : offset + count * dtype.itemsize])
        return torch.frombuffer(copied, dtype=dtype).reshape(shape)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).reshape(shape)
