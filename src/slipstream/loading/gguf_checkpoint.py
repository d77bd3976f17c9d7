"""A GGUF model as a `Checkpoint`: Hugging Face names, shapes and config over the mapped file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream.core.errors import LoadError
from slipstream.loading import gguf_config
from slipstream.loading.description import describe
from slipstream.loading.gguf import PLAIN_DTYPES, GGUFFile
from slipstream.loading.gguf_names import ROPE_FACTORS, View, stored_order, views


class GGUFCheckpoint:
    """See `Checkpoint`. Raises LoadError naming the file for whatever is wrong with it."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self.path = self._file.path
        self.metadata: dict[str, Any] = self._file.metadata
        try:
            self.config = gguf_config.huggingface_config(self.metadata, self._file.tensors, self._rope_factors())
            heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
            arch = gguf_config.architecture(self.metadata)
            self._views = views(self._file.tensors.values(), arch, heads, kv_heads)
        except LoadError as error:
            raise LoadError(f"{self.path}: {error}") from None
        self.chat_template = gguf_config.chat_template(self.metadata)
        self.generation_config = gguf_config.generation_config(self.metadata)
        self.eos_token_ids = gguf_config.end_token_ids(self.metadata)

    def names(self) -> list[str]:
        return list(self._views)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._view(name).shape

    def format(self, name: str) -> str:
        return self._view(name).stored.type

    def nbytes(self, name: str) -> int:
        return self._view(name).nbytes

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        view = self._view(name)
        return stored_order(self._file.raw(view.stored.name), view)

    def tensor(self, name: str) -> torch.Tensor:
        view = self._view(name)
        dtype = PLAIN_DTYPES.get(view.stored.type)
        if dtype is None:
            return self._file.dequantized(view.stored, self.raw(name), view.shape)
        if view.heads:
            return torch.from_numpy(self.raw(name)).view(dtype).reshape(view.shape)
        tensor = self._file.tensor(view.stored.name)
        return tensor if view.expert is None else tensor[view.expert]

    def close(self) -> None:
        self._file.close()

    def describe(self) -> dict[str, Any]:
        rows = ((view.stored.type, view.shape, view.nbytes) for view in self._views.values())
        return describe(self.path, self.kind, self.config, rows)

    def _view(self, name: str) -> View:
        view = self._views.get(name)
        if view is None:
            raise LoadError(f"{self.path}: there is no tensor {name!r}")
        return view

    def _rope_factors(self) -> list[float] | None:
        if ROPE_FACTORS not in self._file.tensors:
            return None
        factors: list[float] = self._file.tensor(ROPE_FACTORS).reshape(-1).tolist()
        return factors
