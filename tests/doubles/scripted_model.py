"""A model that emits given tokens: after a prompt, script entry `i` is its most likely token number `i`."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.cache.spec import CacheSpec, PagedKV
from slipstream.ops.rows import Rows


class ScriptedModel:
    """`script[i]` follows position `start + i - 1`; past the end it repeats the last token."""

    def __init__(self, script: list[int], *, start: int, vocab: int = 96, max_position: int = 4096) -> None:
        self.script = script
        self.start = start
        self.vocab_size = vocab
        self.max_position = max_position

    def cache_specs(self) -> list[CacheSpec]:
        return [PagedKV(kv_heads=1, head_dim=1)]

    def forward(self, rows: Rows, caches: list[Tensor]) -> Tensor:
        """Positions [R, 1]; nothing is cached."""
        return rows.position[:, None].float()

    def logits(self, hidden: Tensor) -> Tensor:
        """The scripted token has logit 10, the others 0."""
        logits = torch.zeros(hidden.shape[0], self.vocab_size)
        for row, position in enumerate(hidden[:, 0].long().tolist()):
            index = min(max(position + 1 - self.start, 0), len(self.script) - 1)
            logits[row, self.script[index]] = 10.0
        return logits
