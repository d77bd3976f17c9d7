"""The rows of one step as flat arrays, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]


class StepBatch:
    """Preallocated int32 arrays and two counts.

    Per row: `token`, `position`, `sequence`, `slot` (cache row to write: page * page_size + offset), `state_in`,
    `state_out` (-1: keep none), `wants_logits`. Per sequence: `page_table[sequence]`, `context_len`, `adapter`.
    Sequence 0, page 0 and state slot 0 are scratch: padding rows belong to them and nobody reads them, so real
    sequences count from 1.
    """

    def __init__(self, *, max_rows: int, max_sequences: int, max_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.token = np.zeros(max_rows, np.int32)
        self.position = np.zeros(max_rows, np.int32)
        self.sequence = np.zeros(max_rows, np.int32)
        self.slot = np.zeros(max_rows, np.int32)
        self.state_in = np.zeros(max_rows, np.int32)
        self.state_out = np.full(max_rows, -1, np.int32)
        self.wants_logits = np.zeros(max_rows, np.bool_)
        self.page_table = np.zeros((max_sequences + 1, max_pages), np.int32)
        self.context_len = np.zeros(max_sequences + 1, np.int32)
        self.adapter = np.zeros(max_sequences + 1, np.int32)
        self.num_rows = 0
        self.num_sequences = 0

    def clear(self) -> None:
        """Empty the batch; the arrays stay."""
        self.num_rows = 0
        self.num_sequences = 0

    def add_sequence(self, pages: Int32Array, context_len: int, adapter: int = 0) -> int:
        """Add a sequence with its page table; `context_len` counts its tokens once this step is done. -> its number."""
        self.num_sequences += 1
        number = self.num_sequences
        self.page_table[number, : len(pages)] = pages
        self.context_len[number] = context_len
        self.adapter[number] = adapter
        return number

    def add_rows(
        self, sequence: int, tokens: Sequence[int], start: int, *, wants_logits: bool | Sequence[bool]
    ) -> None:
        """Add rows for `tokens` at positions from `start` on; they are written to the sequence's own pages."""
        first, last = self.num_rows, self.num_rows + len(tokens)
        self.num_rows = last
        self.token[first:last] = tokens
        self.sequence[first:last] = sequence
        self.wants_logits[first:last] = wants_logits
        if last - first == 1:
            self.position[first] = start
            page = self.page_table[sequence, start // self.page_size]
            self.slot[first] = page * self.page_size + start % self.page_size
            return
        position = np.arange(start, start + len(tokens), dtype=np.int32)
        self.position[first:last] = position
        self.slot[first:last] = (
            self.page_table[sequence, position // self.page_size] * self.page_size + position % self.page_size
        )
