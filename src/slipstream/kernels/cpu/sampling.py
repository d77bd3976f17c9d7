"""The native sampler: `slipstream.ops.sample` over whole steps in one call that lets other Python threads run."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.core.errors import SlipstreamError
from slipstream.kernels.cpu.library import NativeLibrary, NativePool

_ADDRESSES = (
    *("logits", "reals", "wholes", "penalised", "bias_at", "bias_value", "banned", "allowed", "grammar"),
    *("tokens", "logprobs", "top_ids", "top_logprobs", "ranks"),
)
_COUNTS = ("num_penalised", "num_bias", "num_banned", "num_allowed")
_INPUTS = _ADDRESSES[1:9]

Array = NDArray[Any]
Results = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]


class _Batch(ctypes.Structure):
    """`ss_sample_batch` of sample.h."""

    _fields_ = (
        *((name, c_void_p) for name in _ADDRESSES),
        *((name, c_int64) for name in _COUNTS),
        ("rows", c_int32),
        ("num_top", c_int32),
    )


class NativeSampler:
    """Draws tokens for rows over `vocab` tokens, rows spread over `pool`'s threads (None: the caller's alone).

    Every instruction set and number of threads gives the same bits. One thread may call it at a time.
    """

    def __init__(self, library: NativeLibrary, vocab: int, *, pool: NativePool | None = None) -> None:
        self.vocab = vocab
        handle = library.handle
        handle.ss_sampler_create.restype = c_void_p
        handle.ss_sampler_create.argtypes = (c_int32, c_int32, c_int32)
        handle.ss_sampler_destroy.restype = None
        handle.ss_sampler_destroy.argtypes = (c_void_p,)
        handle.ss_sampler_run.restype = c_int32
        handle.ss_sampler_run.argtypes = (c_void_p, c_void_p, POINTER(_Batch))
        self._pool = pool
        self._address = handle.ss_sampler_create(vocab, library.isa, 1 if pool is None else pool.threads)
        if not self._address:
            raise MemoryError("no memory for the native sampler")
        self.close = weakref.finalize(self, handle.ss_sampler_destroy, self._address)
        self._run = handle.ss_sampler_run
        self._batch = _Batch()
        self._reference = ctypes.byref(self._batch)
        self._inputs: list[Array | None] = [None] * len(_INPUTS)
        self._room = (0, 0)
        self._views: dict[tuple[int, int], Results] = {}

    def sample(
        self, logits: Any, rows: int, inputs: Sequence[Array | None], counts: tuple[int, int, int, int], num_top: int
    ) -> Results:
        """Tokens, logprobs, top ids, top logprobs and ranks of `rows` rows, as `slipstream.ops.sample` describes them.

        `logits` [R, V] float32 is a tensor or an array, rows one after the other in memory. `inputs` are reals, wholes,
        penalised, bias_at, bias_value, banned, allowed and grammar; the five lists have `counts` entries (bias counts
        once), and any more rows are not looked at. The results are written over by the next call. Raises
        SlipstreamError if an entry names a row or token that is not there.
        """
        batch, seen = self._batch, self._inputs
        batch.logits = _address_of(logits, rows, self.vocab)
        for place, array in enumerate(inputs):
            if array is not seen[place]:
                seen[place] = array
                setattr(batch, _INPUTS[place], None if array is None else array.ctypes.data)
        batch.num_penalised, batch.num_bias, batch.num_banned, batch.num_allowed = counts
        batch.rows = rows
        batch.num_top = num_top = min(num_top, self.vocab)
        results = self._views.get((rows, num_top))
        if results is None:
            results = self._room_for(rows, num_top)
        status = self._run(self._address, None if self._pool is None else self._pool.address, self._reference)
        if status == -2:
            raise MemoryError("no memory for sampling")
        if status:
            raise SlipstreamError("an entry for sampling names a row or token that is not there")
        return results

    def _room_for(self, rows: int, num_top: int) -> Results:
        """Views of the arrays of results, which grow when they must."""
        if rows > self._room[0] or rows * num_top > self._room[1]:
            most, most_top = max(rows, 2 * self._room[0]), max(rows * num_top, 2 * self._room[1])
            self._room = most, most_top
            self._tokens, self._ranks = np.empty(most, np.int64), np.empty(most, np.int64)
            self._logprobs = np.empty(most, np.float32)
            self._top_ids, self._top_logprobs = np.empty(most_top, np.int64), np.empty(most_top, np.float32)
            for name in _ADDRESSES[9:]:
                setattr(self._batch, name, getattr(self, f"_{name}").ctypes.data)
            self._views.clear()
        if len(self._views) > 1000:
            self._views.clear()
        entries = rows * num_top
        results = self._views[rows, num_top] = (
            self._tokens[:rows],
            self._logprobs[:rows],
            self._top_ids[:entries].reshape(rows, num_top),
            self._top_logprobs[:entries].reshape(rows, num_top),
            self._ranks[:rows],
        )
        return results


def _address_of(logits: Any, rows: int, vocab: int) -> int:
    if tuple(logits.shape) != (rows, vocab):
        raise ValueError(f"logits must be [{rows}, {vocab}], not {list(logits.shape)}")
    if isinstance(logits, np.ndarray):
        if not logits.flags.c_contiguous or logits.dtype != np.float32:
            raise ValueError("logits must be float32, rows one after the other in memory")
        return int(logits.ctypes.data)
    if not logits.is_contiguous() or logits.element_size() != 4:
        raise ValueError("logits must be float32, rows one after the other in memory")
    return int(logits.data_ptr())
