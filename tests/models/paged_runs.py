"""Sequences through the CPU's tiled step as an engine would run them: in chunks, interleaved, on scattered pages."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.core.batch import StepBatch
from slipstream.devices.tiled_step import TiledStep
from slipstream.models.decoder import Decoder
from slipstream.ops.rows import Rows


class _HiddenAndLogits:
    """A model whose "logits" are its hidden states with its logits beside them."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def forward(self, rows: Rows, caches: list[Tensor]) -> Tensor:
        return self.model.forward(rows, caches)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden.float(), self.model.logits(hidden)], dim=-1)


@dataclass
class _Progress:
    tokens: list[int]
    pages: np.ndarray
    done: int = 0


Chunks = Callable[[int, int], int]
"""(tokens done, tokens in all) -> rows of the next step, of which 0 lets the sequence wait."""


def run_paged(
    model: Decoder, sequences: list[list[int]], chunk: Chunks, *, page_size: int, seed: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Hidden states [T, hidden] and logits [T, vocab] of every sequence; pages are dealt out in random order."""
    draw = random.Random(seed)
    counts = [-(-len(tokens) // page_size) for tokens in sequences]
    total = sum(counts) + 4
    free = draw.sample(range(1, total), total - 1)
    dtype = model.embed_tokens.weight.dtype
    caches = [torch.zeros(spec.shape(total, page_size), dtype=dtype) for spec in model.cache_specs()]
    step = TiledStep(_HiddenAndLogits(model), caches)
    running = [
        _Progress(tokens, np.array([free.pop() for _ in range(count)], np.int32))
        for tokens, count in zip(sequences, counts, strict=True)
    ]
    batch = StepBatch(
        max_rows=sum(map(len, sequences)), max_sequences=len(sequences), max_pages=max(counts), page_size=page_size
    )
    results: list[list[Tensor]] = [[] for _ in sequences]
    while any(item.done < len(item.tokens) for item in running):
        owners = _fill(batch, running, chunk, draw)
        if batch.num_rows:
            for owner, rows in zip(owners, step.run(batch), strict=True):
                results[owner].append(rows)
    width = model.config.hidden
    whole = [torch.stack(rows) for rows in results]
    return [(rows[:, :width], rows[:, width:]) for rows in whole]


def _fill(batch: StepBatch, running: list[_Progress], chunk: Chunks, draw: random.Random) -> list[int]:
    """Put the next rows of every sequence into the batch, in random order -> the owner of each row."""
    batch.clear()
    owners: list[int] = []
    for index in draw.sample(range(len(running)), len(running)):
        item = running[index]
        count = min(chunk(item.done, len(item.tokens)), len(item.tokens) - item.done)
        if count > 0:
            number = batch.add_sequence(item.pages, item.done + count)
            part = item.tokens[item.done : item.done + count]
            batch.add_rows(number, part, item.done, wants_logits=True)
            item.done += count
            owners += [index] * count
    return owners


def random_chunks(seed: int, *, decode: int) -> Chunks:
    """Chunks of 0 to 90 rows, and the last `decode` tokens one at a time."""
    draw = random.Random(seed)

    def chunk(done: int, total: int) -> int:
        if done >= total - decode:
            return 1
        return min(draw.choice((0, 1, 5, 16, 17, 33, 64, 90)), total - decode - done)

    return chunk


def one_by_one(done: int, total: int) -> int:
    """Token-by-token decoding from the first token on."""
    return 1
