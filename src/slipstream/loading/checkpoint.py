"""One view of a model on disk, whichever kind of files it is in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from slipstream.core.damage import reading
from slipstream.core.errors import LoadError
from slipstream.loading.gguf_checkpoint import GGUFCheckpoint
from slipstream.loading.safetensors_folder import SafetensorsFolder, no_weights

_LATER_PART = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf", re.DOTALL)


class Checkpoint(Protocol):
    """An open model. Tensor names, shapes and the config are those of a published Hugging Face checkpoint.

    Methods that take a name raise LoadError for one that is not in `names()`.
    """

    path: Path
    """The folder, the GGUF file, or the first part of a split one."""
    kind: str
    """"gguf" or "safetensors"."""
    config: dict[str, Any]
    """config.json, or what a GGUF file says in its terms. Raw: nothing has been checked."""
    generation_config: dict[str, Any]
    """generation_config.json, or a GGUF file's token ids and `general.sampling.*` in its terms; {} if there is none."""
    chat_template: str | None
    """The default chat template, in Jinja."""
    eos_token_ids: tuple[int, ...]
    """Every token id that ends a reply, from all places that name one."""
    metadata: dict[str, Any]
    """A GGUF file's key-value pairs; {} otherwise."""

    def names(self) -> list[str]:
        """All tensors, in the files' order."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape in values, rows first."""

    def format(self, name: str) -> str:
        """How it is stored: "F32", "BF16", "Q4_1", ..."""

    def nbytes(self, name: str) -> int:
        """The bytes it takes as stored."""

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The stored bytes, flat uint8, rows in the order of `tensor`: a view of the file's map (not to be written to),
        or a copy where GGUF keeps the rows in another order."""

    def tensor(self, name: str) -> torch.Tensor:
        """The values: over the file's map in their own dtype (not to be written to), or, for a quantised format, a new
        float32 tensor. LoadError if the format is not one that is read."""

    def close(self) -> None:
        """Let go of the files. Tensors that were handed out stay valid."""

    def describe(self) -> dict[str, Any]:
        """Architecture, context length, parameter count and stored bytes per format; see `description.describe`."""


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a .gguf file (any part of a split one), a Hugging Face folder, or a folder that holds one GGUF model.

    Raises LoadError, one sentence that names the file and the problem.
    """
    path = Path(path)
    with reading(str(path)):
        return _open(path)


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".safetensors":
        raise LoadError(f"{path}: give the folder that holds this file together with its config.json")
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt"):
        raise LoadError(f"{path}: pickle files can run code when loaded and are refused; use safetensors or GGUF")
    if not path.exists():
        raise LoadError(f"{path}: there is no such file or folder")
    return GGUFCheckpoint(path)


def _open_folder(folder: Path) -> Checkpoint:
    models = sorted(file for file in folder.glob("*.gguf") if not _LATER_PART.fullmatch(file.name))
    has_safetensors = next(folder.glob("*.safetensors*"), None) is not None
    if (folder / "config.json").is_file() and (has_safetensors or not models):
        return SafetensorsFolder(folder)
    if len(models) == 1:
        return GGUFCheckpoint(models[0])
    if models:
        names = ", ".join(file.name for file in models)
        raise LoadError(f"{folder}: the folder holds several GGUF models ({names}); give the path of one")
    if has_safetensors:
        raise LoadError(f"{folder}: there is no config.json beside the safetensors files")
    raise LoadError(no_weights(folder))
