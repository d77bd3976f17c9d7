"""What a checkpoint holds, summed up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def describe(
    path: Path, kind: str, config: Mapping[str, Any], tensors: Iterable[tuple[str, tuple[int, ...], int]]
) -> dict[str, Any]:
    """A plain dict for display, from (format, shape, stored bytes) of every tensor.

    `parameters` counts stored values, `bytes` and `bytes_per_format` what they take in the file (largest first), and
    `context_length` is in tokens, None if the config does not say.
    """
    per_format: dict[str, int] = {}
    parameters = count = 0
    for name, shape, nbytes in tensors:
        per_format[name] = per_format.get(name, 0) + nbytes
        parameters += math.prod(shape)
        count += 1
    text = config.get("text_config") or config  # models that also see keep the language model's settings apart
    classes = config.get("architectures") or [None]
    return {
        "path": str(path),
        "kind": kind,
        "architecture": classes[0],
        "model_type": config.get("model_type"),
        "context_length": text.get("max_position_embeddings"),
        "parameters": parameters,
        "tensors": count,
        "bytes": sum(per_format.values()),
        "bytes_per_format": dict(sorted(per_format.items(), key=lambda item: -item[1])),
    }
