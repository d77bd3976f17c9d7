"""Programs and packed weights: made once, kept in the user's cache, found again by what they were made from."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from slipstream import __version__
from slipstream.core.config import cache_dir
from slipstream.devices.packed_file import (
    PackedWeights,
    last_used,
    mark_used,
    pack_in_memory,
    read_packed,
    write_packed,
    write_whole,
)
from slipstream.devices.stored import BUFFER_PREFIX, Stored
from slipstream.kernels.cpu.packing import PACK_VERSION, pack
from slipstream.kernels.cpu.program import Program, ProgramError, parse

_PACKAGES = ("devices", "kernels", "layers", "models", "ops")
"""The packages whose code decides what a program looks like."""
KEPT = {".program": 6, ".weights": 3}
"""Files of each kind that are kept of a model, the last used ones: settings and versions have files of their own."""
_ABANDONED_AFTER = 24 * 3600

Progress = Callable[[int, int], None]


class WeightSource(Protocol):
    """Where a model's weights come from."""

    key: str
    """Differs when any of the files differ."""
    place: str
    """Where the files are: the same after they have changed."""
    config: Mapping[str, Any]
    """The model's config.json."""

    def stored(self) -> Mapping[str, Sequence[Stored]]:
        """For each parameter of the model what is stored of it: one tensor, or one per expert."""

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """A stored tensor's bytes, flat, rows in the order of the published checkpoint."""

    def tensor(self, name: str) -> Tensor:
        """A stored tensor's values."""


@dataclass(frozen=True)
class Options:
    """What a program depends on beside the model."""

    cache_kind: str = "bf16"
    quantization: str = "none"


@dataclass(frozen=True)
class Prepared:
    """A program with its weights in memory. `origin` says how it came about, for people."""

    program: Program
    text: str
    weights: PackedWeights
    origin: str


def prepare(
    model: nn.Module, specs: Sequence[Any], source: WeightSource, options: Options, progress: Progress | None = None
) -> Prepared:
    """The program of a model and its weights, from the cache or made now (then kept there).

    `progress` gets bytes packed and in all. Raises NotLowerable.
    """
    folder = cache_dir() / "programs"
    program, found = program_of(model, specs, source, options)
    path = _path(source, ".weights", source.key, PACK_VERSION, program.layout())
    packed = read_packed(path, program.layout(), program.data_size)
    if packed is not None:
        mark_used(path)
        return Prepared(program, program.text(), packed, "from the cache" if found else "new, weights from the cache")
    buffers = dict(model.named_buffers())
    packed = pack_in_memory(program.data_size, lambda data: _fill(data, program, source, buffers, progress))
    kept = write_packed(path, program.layout(), packed)
    _tidy(path)
    return Prepared(program, program.text(), packed, "packed now" if kept else f"packed now; {folder} is not writable")


def program_of(model: nn.Module, specs: Sequence[Any], source: WeightSource, options: Options) -> tuple[Program, bool]:
    """The program of a model, and whether it was in the cache. Raises NotLowerable."""
    described = json.dumps(dict(source.config), sort_keys=True, default=str)
    made_from = (source.key, described, options, __version__, _code(), *_foreign_code(model))
    path = _path(source, ".program", *made_from)
    try:
        program = parse(path.read_text(encoding="utf-8"))
    except (OSError, ProgramError, UnicodeDecodeError):
        pass
    else:
        mark_used(path)
        return program, True
    # Recording and lowering are needed only here; a warm start leaves them alone.
    from slipstream.devices.lower import lower
    from slipstream.devices.record import record

    program = lower(
        record(model, specs),
        source.stored(),
        cache_kind=options.cache_kind,
        quantization=options.quantization,
    )
    text = program.text().encode()
    write_whole(path, lambda file: file.write(text))
    _tidy(path)
    return program, False


def _path(source: WeightSource, suffix: str, *made_from: object) -> Path:
    """Where a file is kept: the model's place, and what the file was made from."""
    return cache_dir() / "programs" / f"{_digest(source.place)[:12]}-{_digest(*made_from)}{suffix}"


def _tidy(path: Path) -> None:
    """Remove what a new file leaves over: its model's files that were not used for longest, and unfinished ones.

    Who has one of them open keeps what it has; who looks for one makes it anew.
    """
    model = path.name.partition("-")[0]
    found = sorted(path.parent.glob(f"{model}-*{path.suffix}"), key=last_used, reverse=True)
    stale = found[KEPT[path.suffix] :]
    long_ago = time.time() - _ABANDONED_AFTER
    abandoned = [file for file in path.parent.glob(".writing-*") if last_used(file) < long_ago]
    for file in (*stale, *abandoned):
        with suppress(OSError):
            file.unlink()


def _fill(
    data: npt.NDArray[np.uint8],
    program: Program,
    source: WeightSource,
    buffers: Mapping[str, Tensor],
    progress: Progress | None,
) -> None:
    """Pack every weight and write every vector to its place."""
    forms = {part.name: part.form for parts in source.stored().values() for part in parts}
    for weight in program.weights:
        target = data[weight.offset : weight.offset + weight.size]
        pack(source.raw(weight.name), forms[weight.name], weight.kind, weight.outputs, weight.inputs, target)
        if progress is not None:
            progress(weight.offset + weight.size, len(data))
    for vector in program.vectors:
        if vector.name.startswith(BUFFER_PREFIX):
            values = buffers[vector.name.removeprefix(BUFFER_PREFIX)]
        else:
            values = source.tensor(vector.name)
        target = data[vector.offset : vector.offset + 4 * vector.count]
        target.view(np.float32)[:] = values.float().numpy()
    if progress is not None:
        progress(len(data), len(data))


def _digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """Names the code that makes programs, so that another version of it does not find the programs of this one."""
    root = Path(__file__).parents[1]
    found = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def _foreign_code(model: nn.Module) -> list[str]:
    """Names the code of a model's modules that are not of these packages."""
    found = set()
    for kind in {type(module) for module in model.modules()}:
        if kind.__module__.partition(".")[0] not in ("slipstream", "torch"):
            path = getattr(sys.modules.get(kind.__module__), "__file__", None)
            code = hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
            found.add(f"{kind.__module__}.{kind.__qualname__} {code}")
    return sorted(found)
