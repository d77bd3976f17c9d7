"""A checkpoint as the source of a model's packed weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from slipstream.devices.stored import Stored
from slipstream.loading.checkpoint import Checkpoint
from slipstream.loading.weights import check_names
from slipstream.models.base import CheckpointModel

_PART = re.compile(r"(.*)-\d{5}-of-(\d{5}\.gguf)", re.DOTALL)


class CheckpointSource:
    """See `slipstream.devices.program_cache.WeightSource`. Raises LoadError if the checkpoint is not the model's."""

    def __init__(self, checkpoint: Checkpoint, model: CheckpointModel) -> None:
        self._checkpoint = checkpoint
        self._table = check_names(model, checkpoint)
        self.key = content_key(checkpoint.path)
        self.place = str(checkpoint.path.resolve())
        self.config: Mapping[str, Any] = checkpoint.config

    def stored(self) -> Mapping[str, Sequence[Stored]]:
        """For each parameter what is stored of it, experts in their order."""
        found: dict[str, list[tuple[int, Stored]]] = {}
        for name, slot in self._table.items():
            part = Stored(name, self._checkpoint.format(name), tuple(self._checkpoint.shape(name)))
            found.setdefault(slot.parameter, []).append((slot.index or 0, part))
        return {name: [part for _, part in sorted(parts, key=lambda each: each[0])] for name, parts in found.items()}

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """A stored tensor's bytes."""
        return self._checkpoint.raw(name)

    def tensor(self, name: str) -> Tensor:
        """A stored tensor's values."""
        return self._checkpoint.tensor(name)


def content_key(path: Path) -> str:
    """A text that differs when a file of the model at `path` was replaced or changed: names, sizes and times."""
    found = hashlib.sha256()
    for file in _files(path):
        status = file.stat()
        found.update(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.suffix in (".safetensors", ".json"))
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    part = re.compile(re.escape(match[1]) + r"-\d{5}-of-" + re.escape(match[2]))
    return sorted(file for file in path.parent.iterdir() if part.fullmatch(file.name))
