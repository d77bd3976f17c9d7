"""A Hugging Face model folder: config.json, safetensors files and what lies beside them.

Tensors are used in place: safetensors maps each file privately, and a tensor is a view of the map. Pickle files
(pytorch_model.bin and the like) are never opened, since loading one can run code.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from slipstream.core.errors import LoadError
from slipstream.loading.description import describe

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class SafetensorsFolder:
    """See `Checkpoint`. Raises LoadError naming the file for whatever is missing, damaged or does not fit together."""

    kind = "safetensors"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.config = read_json(path / "config.json")
        self.generation_config = read_json(path / "generation_config.json", missing={})
        self.chat_template = _chat_template(path)
        self.eos_token_ids = _token_ids(path, self.config, self.generation_config)
        self.has_tokenizer = (path / "tokenizer.json").is_file()
        self._files: dict[str, Any] = {}
        self._where = self._from_index() if not (path / _SINGLE).is_file() else self._from_single()
        self._closed = False

    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name)[0]

    def format(self, name: str) -> str:
        return self._entry(name)[1]

    def nbytes(self, name: str) -> int:
        shape, kind = self._entry(name)
        bits = re.search(r"\d+", kind)  # BF16, I64, F8_E4M3, ...; only BOOL has no number
        return math.prod(shape) * int(bits[0] if bits else 8) // 8

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        view: npt.NDArray[np.uint8] = self.tensor(name).reshape(-1).view(torch.uint8).numpy()
        view.flags.writeable = False
        return view

    def tensor(self, name: str) -> torch.Tensor:
        file = self._holder(name)
        with _refusing(self.path / self._where[name]):
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def close(self) -> None:
        self._files.clear()
        self._closed = True

    def describe(self) -> dict[str, Any]:
        rows = ((self.format(name), self.shape(name), self.nbytes(name)) for name in self._where)
        return describe(self.path, self.kind, self.config, rows)

    def _holder(self, name: str) -> Any:
        if name not in self._where:
            raise LoadError(f"{self.path}: there is no tensor {name!r}")
        if self._closed:
            raise LoadError(f"{self.path}: the model has been closed")
        return self._files[self._where[name]]

    def _entry(self, name: str) -> tuple[tuple[int, ...], str]:
        part = self._holder(name).get_slice(name)
        return tuple(part.get_shape()), part.get_dtype()

    def _open(self, file: str) -> list[str]:
        """Map one file and return the names in it."""
        with _refusing(self.path / file):
            self._files[file] = safe_open(self.path / file, framework="pt")
            names: list[str] = list(self._files[file].keys())
        return names

    def _from_single(self) -> dict[str, str]:
        return dict.fromkeys(self._open(_SINGLE), _SINGLE)

    def _from_index(self) -> dict[str, str]:
        """Tensor name to shard, every shard present and holding what the index says."""
        index = self.path / _INDEX
        if not index.is_file():
            raise LoadError(no_weights(self.path))
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise LoadError(f"{index}: there is no weight_map that says which file holds which tensor")
        held: dict[str, set[str]] = {}
        for name, file in where.items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise LoadError(
                    f"{index}: tensor {name!r} is said to be in {file!r}, not a .safetensors file beside it"
                )
            if file not in held:
                if not (self.path / file).is_file():
                    raise LoadError(f"{self.path / file}: this file is missing, though {_INDEX} lists it")
                held[file] = set(self._open(file))
            if name not in held[file]:
                raise LoadError(f"{self.path / file}: tensor {name!r} is not in this file, though {_INDEX} says so")
        return where


def no_weights(folder: Path) -> str:
    """The sentence for a folder without usable weights."""
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        return (
            f"{folder}: the weights are pickle files (such as .bin), which can run code when loaded and are refused; "
            "get or convert the model as safetensors"
        )
    return f"{folder}: there are no weights (neither {_SINGLE} nor {_INDEX}, nor a .gguf file)"


def read_json(path: Path, *, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """The JSON object in `path`; `missing`, if given, where there is no such file. Raises LoadError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise LoadError(f"{path}: the file is missing") from None
    except OSError as error:
        raise LoadError(f"{path}: cannot be opened ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path}: this is not valid JSON ({_first_line(error)})") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path}: this should be a JSON object, not a {type(value).__name__}")
    return value


def _chat_template(folder: Path) -> str | None:
    """chat_template.jinja, else `chat_template` of tokenizer_config.json (of several, the one named default)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise LoadError(f"{file}: cannot be read ({_first_line(error)})") from None
    value = read_json(folder / "tokenizer_config.json", missing={}).get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise LoadError(f"{folder / 'tokenizer_config.json'}: chat_template must be text or a list of named templates")
    return value


def _token_ids(folder: Path, *configs: dict[str, Any]) -> tuple[int, ...]:
    """The ids under `eos_token_id` of all `configs`, without repetitions."""
    found: list[int] = []
    for config in configs:
        value = config.get("eos_token_id")
        ids: Iterable[Any] = value if isinstance(value, list) else [value] if value is not None else []
        for item in ids:
            if type(item) is not int:
                raise LoadError(f"{folder}: eos_token_id must be a token id or a list of them, not {value!r}")
            found.append(item)
    return tuple(dict.fromkeys(found))


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turn what the safetensors library and torch raise over a bad file into a LoadError."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, KeyError, OverflowError) as error:
        raise LoadError(f"{path}: not a readable safetensors file ({_first_line(error)})") from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
