"""Writing a step to a folder, for replay.cpp to run without Python.

g++ -std=c++17 -O2 -g -ffp-contract=off -fno-math-errno -pthread src/slipstream/kernels/cpu/*.cpp -o replay
./replay DUMP_DIR [isa] [threads] [repeats]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def write_dump(
    folder: Path,
    text: str,
    weights: Array,
    *,
    token: Array,
    position: Array,
    sequence: Array,
    slot: Array,
    wants_logits: Array,
    page_table: Array,
    page_size: int,
    caches: Sequence[Array],
    vocabulary: int,
    max_rows: int,
) -> None:
    """Write program.txt, weights.bin, batch.bin and cacheN.bin to `folder`, which is made if it is missing.

    Arrays of rows [R], page_table [sequences + 1, stride]; `caches` are the bytes of whole pages, the scratch page
    first, as they are before the step. `vocabulary` is the width of a row of logits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.txt").write_text(text)
    np.ascontiguousarray(weights).tofile(folder / "weights.bin")
    lines = [line.split("#")[0].split() for line in text.splitlines()]
    fields = {what: [_fields(words) for words in lines if words[:1] == [what]] for what in ("buffer", "cache")}
    shapes = [(f["kind"] == "q8", int(f["width"]), f["rows"] == "wanted") for f in fields["buffer"]]
    pages = []
    for of in fields["cache"]:
        token_bytes = 4 * int(of["width"]) if of["kind"] == "bf16" else 2 * int(of["width"]) + 8
        pages.append(int(of["heads"]) * page_size * token_bytes)
    counts = [len(token), int(wants_logits.sum()), page_size, page_table.shape[1], len(page_table)]
    counts += [max_rows, vocabulary, len(caches), len(shapes)]
    numbers: list[Any] = [counts, shapes, pages, token, position, sequence, slot, page_table]
    with (folder / "batch.bin").open("wb") as file:
        for part in numbers:
            file.write(np.asarray(part, np.int32).tobytes())
        file.write(np.asarray(wants_logits, np.uint8).tobytes())
    for number, data in enumerate(caches):
        np.ascontiguousarray(data).tofile(folder / f"cache{number}.bin")


def _fields(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words if "=" in word)
