"""A model whose cache slot holds a hash of the tokens up to it, and whose logits are a hash of what it reads back.

Any wrong page, slot, rollback or position changes the tokens, at thousands of steps a second. The hash has 44 bits,
kept as two 22-bit halves in the key and the value of an ordinary paged cache (float32 holds 24 bits exactly).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.cache.spec import CacheSpec, PagedKV
from slipstream.ops.rows import Rows

HALF = 22
MASK = (1 << HALF) - 1


def mix(*values: int) -> int:
    """A 64-bit hash of whole numbers."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 29
        state = state * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 32
    return state


class HashModel:
    """A model of `vocab` tokens with one cached layer. `window` > 0: it reads only that many positions back."""

    def __init__(self, vocab: int = 96, max_position: int = 4096, window: int = 0, sharpness: float = 6.0) -> None:
        self.vocab_size = vocab
        self.max_position = max_position
        self.window = window
        generator = np.random.default_rng(7)
        self._logits = torch.from_numpy((generator.random((4096, vocab)) * sharpness).astype(np.float32))

    def cache_specs(self) -> list[CacheSpec]:
        return [PagedKV(kv_heads=1, head_dim=1, window=self.window)]

    def forward(self, rows: Rows, caches: list[Tensor]) -> Tensor:
        """Hashes [R, 2], as floats: each row's own, from the hashes that it reads at earlier positions."""
        cache = caches[0].numpy()
        table = rows.page_table.numpy()
        size = cache.shape[3]
        out = np.zeros((rows.token.shape[0], 2), np.float32)
        fields = (rows.token, rows.position, rows.sequence, rows.slot)
        for row, (token, position, sequence, slot) in enumerate(zip(*(f.tolist() for f in fields), strict=True)):
            if sequence == 0:
                continue
            past = self._read(cache, table[sequence], position - 1, size)
            other = past % max(position if not self.window else min(position, self.window - 1), 1)
            far = self._read(cache, table[sequence], position - 1 - other, size)
            value = mix(past, far, position, token)
            low, high = value & MASK, (value >> HALF) & MASK
            cache[slot // size, 0, :, slot % size, 0] = (low, high)
            # What the head sees is read back from the page table, not from the slot that was written.
            out[row] = cache[table[sequence][position // size], 0, :, position % size, 0]
        return torch.from_numpy(out)

    @staticmethod
    def _read(cache: np.ndarray, pages: np.ndarray, position: int, size: int) -> int:
        if position < 0:
            return 1
        low, high = cache[pages[position // size], 0, :, position % size, 0].tolist()
        return (int(high) << HALF) | int(low)

    def logits(self, hidden: Tensor) -> Tensor:
        """A table row by the hash, so that equal hashes and only those have equal logits (nearly always)."""
        index = (hidden[:, 0].long() ^ (hidden[:, 1].long() << 3)) & 4095
        return self._logits[index]


class WindowedReference:
    """What a HashModel must give, computed without cache, pages or batches."""

    def __init__(self, model: HashModel) -> None:
        self.model = model

    def hashes(self, tokens: list[int]) -> list[int]:
        """The hash at every position of a sequence."""
        found: list[int] = []
        for position, token in enumerate(tokens):
            past = found[position - 1] if position else 1
            window = self.model.window
            other = past % max(position if not window else min(position, window - 1), 1)
            far = found[position - 1 - other] if position - 1 - other >= 0 else 1
            value = mix(past, far, position, token)
            found.append(((value >> HALF & MASK) << HALF) | (value & MASK))
        return found

    def logits(self, tokens: list[int]) -> Tensor:
        """Logits [vocab] of the token after `tokens`."""
        value = self.hashes(tokens)[-1]
        return self.model.logits(torch.tensor([[value & MASK, value >> HALF]], dtype=torch.float32))[0]
