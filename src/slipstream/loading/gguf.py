"""GGUF models: one file, or the parts of a split one, mapped into memory."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.core.errors import LoadError
from slipstream.loading.gguf_blocks import dequantize, readable_names
from slipstream.loading.gguf_header import GGUFTensor, Header, read_header
from slipstream.loading.mapping import map_file, tensor_over

__all__ = ["PLAIN_DTYPES", "GGUFFile", "GGUFTensor"]

# These are used as stored, from the map; everything else becomes float32.
PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# What llama.cpp's gguf-split names its parts.
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class GGUFFile:
    """An open GGUF model.

    `metadata` maps keys to strings, ints, floats, bools and lists of these; `tensors` maps names to their entries, in
    the file's order. For a split model any part may be given: the siblings are opened too, `path` and `metadata` are
    the first part's. Raises LoadError (one sentence, naming file and problem) for whatever is wrong with the files.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        data, header = _open(self.path)
        self.metadata: dict[str, Any] = header.metadata
        self.tensors: dict[str, GGUFTensor] = dict(header.tensors)
        self._maps: dict[str, mmap.mmap] = dict.fromkeys(header.tensors, data)
        if _split_count(self.path, header) > 1:
            self._add_parts(data, header)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's stored bytes, flat uint8: a read-only view of the map, no copy."""
        tensor = self._entry(name)
        view = np.frombuffer(self._maps[name], np.uint8, tensor.nbytes, tensor.offset)
        view.flags.writeable = False
        return view

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor in its shape. F32, F16 and BF16 come in their own dtype straight from the map (do not write to
        them); a quantised format is dequantised to a new float32 tensor. Raises LoadError for a format not read."""
        tensor = self._entry(name)
        dtype = PLAIN_DTYPES.get(tensor.type)
        if dtype is not None:
            return tensor_over(self._maps[name], tensor.offset, tensor.shape, dtype)
        return self.dequantized(tensor, self.raw(name), tensor.shape)

    def dequantized(self, tensor: GGUFTensor, raw: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> torch.Tensor:
        """New float32 values of `shape` from stored bytes of `tensor` (all of them, or whole rows in any order)."""
        if not tensor.fmt.readable:
            raise LoadError(
                f"{self.path}: tensor {tensor.name!r} is stored as {tensor.type}, which Slipstream cannot read; "
                f"it reads {readable_names()}"
            )
        out = torch.empty(shape, dtype=torch.float32)
        dequantize(raw, tensor.fmt, out.numpy())
        return out

    def close(self) -> None:
        """Let go of the maps. Tensors and views that were handed out stay valid."""
        self._maps.clear()

    def _entry(self, name: str) -> GGUFTensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise LoadError(f"{self.path}: there is no tensor {name!r}")
        if name not in self._maps:
            raise LoadError(f"{self.path}: the file has been closed")
        return tensor

    def _add_parts(self, data: mmap.mmap, header: Header) -> None:
        """Replace what the given part said by what all parts say together."""
        match = _PART.fullmatch(self.path.name)
        count = _split_count(self.path, header)
        if match is None or int(match["count"]) != count:
            raise LoadError(
                f"{self.path}: this is a part of a model split into {count} files, "
                f"which must be named like model-00001-of-{count:05}.gguf"
            )
        given = int(match["number"])
        parts = [
            self.path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)
        ]
        self.tensors, self._maps = {}, {}
        for number, part in enumerate(parts, 1):
            if number != given and not part.exists():
                raise LoadError(f"{part}: this part of the split model is missing; all {count} parts must be together")
            part_data, part_header = (data, header) if number == given else _open(part)
            self._add_part(part, number, count, part_data, part_header)
        self.path = parts[0]
        total = self.metadata.get("split.tensors.count")
        if total is not None and total != len(self.tensors):
            raise LoadError(
                f"{self.path}: the split model should have {total} tensors, its parts have {len(self.tensors)}"
            )

    def _add_part(self, path: Path, number: int, count: int, data: mmap.mmap, header: Header) -> None:
        if _split_count(path, header) != count or header.metadata.get("split.no") != number - 1:
            raise LoadError(f"{path}: the file does not say that it is part {number} of {count}; it belongs elsewhere")
        if number == 1:
            self.metadata = header.metadata
        twice = self.tensors.keys() & header.tensors.keys()
        if twice:
            raise LoadError(f"{path}: tensor {min(twice)!r} is in an earlier part too")
        self.tensors.update(header.tensors)
        self._maps.update(dict.fromkeys(header.tensors, data))


def _open(path: Path) -> tuple[mmap.mmap, Header]:
    data = map_file(path)
    return data, read_header(path, data)


def _split_count(path: Path, header: Header) -> int:
    count = header.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count < 100_000:
        raise LoadError(f"{path}: split.count is {count!r}; the file is damaged")
    return count
