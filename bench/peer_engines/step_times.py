"""How long single steps of Slipstream's native program take, beside the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.core.batch import StepBatch
from slipstream.devices.native_cpu import NativeCpuDevice
from slipstream.engine.build import LoadedEngine

CHUNK = 512


class StepTimes:
    """A step with caches of its own for one sequence of up to `longest` tokens. Use it in the engine's thread."""

    def __init__(self, loaded: LoadedEngine, longest: int) -> None:
        assert isinstance(loaded.device, NativeCpuDevice), "steps are timed under native numerics"
        size = loaded.config.page_size
        pages = -(-longest // size)
        self._table = np.arange(1, pages + 1, dtype=np.int32)  # page 0 is scratch
        specs = loaded.model.cache_specs()
        self._step: Any = loaded.device.compile(loaded.model, loaded.device.allocate(specs, pages + 1, size))
        self._batch = StepBatch(max_rows=CHUNK, max_sequences=1, max_pages=pages, page_size=size)
        self._vocab = loaded.model.vocab_size
        self._raw = 0.0
        call = self._step._call

        def watched(*arguments: Any) -> Any:
            begin = time.perf_counter()
            status = call(*arguments)
            self._raw += time.perf_counter() - begin
            return status

        self._step._call = watched

    def measure(self, counts: Sequence[int], context: int, repeats: int) -> dict[str, dict[str, list[float]]]:
        """Steps of so many rows at a context, all with logits, in turns.

        -> `ms`: the step as the engine calls it, and `raw_ms`: the library's part of it, for each count.
        """
        self._fill(context)
        found: dict[str, dict[str, list[float]]] = {
            kind: {str(count): [] for count in counts} for kind in ("ms", "raw_ms")
        }
        for repeat in range(-1, repeats):
            for count in counts:
                self._put(context, count, wants_logits=True)
                self._raw = 0.0
                begin = time.perf_counter()
                self._step.run(self._batch)
                spent = time.perf_counter() - begin
                if repeat >= 0:
                    found["ms"][str(count)].append(spent * 1e3)
                    found["raw_ms"][str(count)].append(self._raw * 1e3)
        return found

    def _fill(self, context: int) -> None:
        """Compute the sequence's first tokens."""
        for start in range(0, context, CHUNK):
            self._put(start, min(CHUNK, context - start), wants_logits=False)
            self._step.run(self._batch)

    def _put(self, start: int, count: int, *, wants_logits: bool) -> None:
        self._batch.clear()
        number = self._batch.add_sequence(self._table, start + count)
        tokens = [20 + 7919 * (start + i) % (self._vocab - 20) for i in range(count)]
        self._batch.add_rows(number, tokens, start, wants_logits=[wants_logits] * count)
