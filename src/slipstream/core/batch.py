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
        # Writing one number through a memoryview costs less than through an array.
        self._token = self.token.data
        self._position = self.position.data
        self._sequence = self.sequence.data
        self._slot = self.slot.data
        self._wants_logits = self.wants_logits.data
        self._page_table = self.page_table.data
        self._context_len = self.context_len.data
        self._adapter = self.adapter.data
        # What each row of page_table was copied from.
        self._tables: list[Int32Array | None] = [None] * (max_sequences + 1)

    def clear(self) -> None:
        """Empty the batch; the arrays stay."""
        self.num_rows = 0
        self.num_sequences = 0

    def add_sequence(self, pages: Int32Array, context_len: int, adapter: int = 0) -> int:
        """Add a sequence with its page table; `context_len` counts its tokens once this step is done. -> its number.

        `pages` must not be changed afterwards: the same array under the same number is not copied again.
        """
        number = self.num_sequences = self.num_sequences + 1
        if self._tables[number] is not pages:
            self._tables[number] = pages
            self.page_table[number, : len(pages)] = pages
        self._context_len[number] = context_len
        self._adapter[number] = adapter
        return number

    def add_rows(
        self, sequence: int, tokens: Sequence[int], start: int, *, wants_logits: bool | Sequence[bool]
    ) -> None:
        """Add rows for `tokens` at positions from `start` on; they are written to the sequence's own pages."""
        first = self.num_rows
        if len(tokens) == 1:
            size = self.page_size
            self.num_rows = first + 1
            self._token[first] = tokens[0]
            self._position[first] = start
            self._sequence[first] = sequence
            self._slot[first] = self._page_table[sequence, start // size] * size + start % size
            self._wants_logits[first] = wants_logits if isinstance(wants_logits, bool) else wants_logits[0]
            return
        last = self.num_rows = first + len(tokens)
        self.token[first:last] = tokens
        self.sequence[first:last] = sequence
        self.wants_logits[first:last] = wants_logits
        position = np.arange(start, start + len(tokens), dtype=np.int32)
        self.position[first:last] = position
        self.slot[first:last] = (
            self.page_table[sequence, position // self.page_size] * self.page_size + position % self.page_size
        )
