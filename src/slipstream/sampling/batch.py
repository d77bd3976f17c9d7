"""The arguments of `slipstream::sample` for one step, in arrays that are kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

import slipstream.ops.sample_cpu  # noqa: F401  (registers the CPU's version)
from slipstream.ops.sample import Real, SampleResult, Whole, sample

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
MaskArray = npt.NDArray[np.int32]

GREEDY_REALS = (0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0)
"""A row of `Real` columns with every rule off."""
NO_WHOLES = (0, 0, 0, -1, 0, 0, 0)
"""A row of `Whole` columns with every rule off."""
_KEY0, _KEY1 = int(Whole.KEY0), int(Whole.KEY1)

SampleArguments = tuple[
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor,
    torch.Tensor | None,
    int,
]


@dataclass(slots=True)
class Draws:
    """Per row, in row order; see `slipstream.ops.sample` for what the arrays hold. Good until the next step."""

    tokens: IntArray
    logprobs: FloatArray
    top_ids: IntArray
    top_logprobs: FloatArray
    ranks: IntArray


class Sampler(Protocol):
    """What may draw in the op's place; see `slipstream.kernels.cpu.sampling.NativeSampler`."""

    def sample(
        self,
        logits: Any,
        rows: int,
        inputs: Sequence[npt.NDArray[Any] | None],
        counts: tuple[int, int, int, int],
        num_top: int,
    ) -> tuple[IntArray, FloatArray, IntArray, FloatArray, IntArray]: ...


class _Rows:
    """An array [n, ...] that grows by doubling and is emptied without giving memory back."""

    def __init__(self, tail: tuple[int, ...], dtype: npt.DTypeLike, capacity: int = 64) -> None:
        self.array: npt.NDArray[Any] = np.empty((capacity, *tail), dtype)
        self.count = 0

    def extend(self, count: int) -> npt.NDArray[Any]:
        """Room for `count` more rows, not initialised."""
        needed = self.count + count
        if needed > len(self.array):
            grown = np.empty((max(needed, 2 * len(self.array)), *self.array.shape[1:]), self.array.dtype)
            grown[: self.count] = self.array[: self.count]
            self.array = grown
        new = self.array[self.count : needed]
        self.count = needed
        return new

    def tensor(self, device: torch.device | str) -> torch.Tensor:
        tensor = torch.from_numpy(self.array[: self.count])
        return tensor if str(device) == "cpu" else tensor.to(device)


class SamplingBatch:
    """Rows of one step in the order in which they are added, which must be that of the logits' rows.

    Use: `clear`, then `add_row` (or a `SequenceSampler`'s `write_row`) per row, then `draw(logits)` or `tensors()`.
    `sampler` None: `draw` runs the op in PyTorch.
    """

    def __init__(self, vocab_size: int, sampler: Sampler | None = None) -> None:
        self.vocab_size = vocab_size
        self.sampler = sampler
        self.device_s = 0.0
        """Seconds that the last `draw` spent outside of the host's own work."""
        self.num_top = 0
        self.num_rows = 0
        self._reals = _Rows((len(Real),), np.float32)
        self._wholes = _Rows((len(Whole),), np.int64)
        self._written: list[object] = []  # the `reals` and `wholes` that each row was copied from
        self._make_room()
        self._penalised = _Rows((4,), np.int64)
        self._bias_at = _Rows((2,), np.int64)
        self._bias_value = _Rows((), np.float32)
        self._banned = _Rows((2,), np.int64)
        self._allowed = _Rows((2,), np.int64)
        self._grammar = _Rows((-(-vocab_size // 32),), np.int32, capacity=0)
        self._uses_grammar = False
        self._uses_lists = False
        self._lists = (self._penalised, self._bias_at, self._bias_value, self._banned, self._allowed)

    def __len__(self) -> int:
        return self.num_rows

    def clear(self) -> None:
        """Forget the rows. Tensors from `tensors()` must no longer be in use."""
        self.num_rows = self.num_top = 0
        if self._uses_lists:
            self._grammar.count = 0
            for rows in self._lists:
                rows.count = 0
            self._uses_grammar = self._uses_lists = False

    def add_row(
        self,
        reals: Sequence[float] | FloatArray = GREEDY_REALS,
        wholes: Sequence[int] | IntArray = NO_WHOLES,
        *,
        key: tuple[int, int] = (0, 0),
        num_top: int = 0,
    ) -> int:
        """Add a row and return its index. `reals` and `wholes` are columns as `Real` and `Whole` name them.

        Neither may be changed afterwards: the same two in the same row as in the step before are not copied again.
        """
        row = self.num_rows
        self.num_rows = row + 1
        written = self._written
        if 2 * row == len(written):
            self._make_room()
        if written[2 * row] is not reals or written[2 * row + 1] is not wholes:
            self._reals.array[row] = reals
            self._wholes.array[row] = wholes
            written[2 * row], written[2 * row + 1] = reals, wholes
        self._cells[row, _KEY0], self._cells[row, _KEY1] = key
        if num_top > self.num_top:
            self.num_top = num_top
        return row

    def _make_room(self) -> None:
        """Twice as many rows."""
        known = len(self._written) // 2
        for rows in (self._reals, self._wholes):
            rows.count = known
            rows.extend(max(known, 64))
        self._written += [None] * (2 * max(known, 64))
        self._cells = self._wholes.array.data

    def _set(self, row: int, column: Whole, value: int) -> None:
        """Change a column that was copied from the row's `wholes`."""
        self._wholes.array[row, column] = value
        self._written[2 * row] = None

    def add_penalised(self, row: int, entries: IntArray) -> IntArray:
        """Add [N, 3] of (token, times in output, in prompt); returns the [N, 3] view kept here, to be adjusted."""
        self._uses_lists = True
        new = self._penalised.extend(len(entries))
        new[:, 0] = row
        new[:, 1:] = entries
        return new[:, 1:]

    def add_bias(self, row: int, tokens: IntArray, values: FloatArray) -> None:
        self._add_tokens(self._bias_at, row, tokens)
        self._bias_value.extend(len(values))[:] = values

    def ban(self, row: int, tokens: IntArray | Sequence[int]) -> None:
        self._add_tokens(self._banned, row, tokens)

    def allow_only(self, row: int, tokens: IntArray | Sequence[int]) -> None:
        self._set(row, Whole.ONLY_ALLOWED, 1)
        self._add_tokens(self._allowed, row, tokens)

    def score(self, row: int, token: int) -> None:
        """Have the row report log-probability and rank of `token` instead of the sampled one."""
        self._set(row, Whole.SCORE_TOKEN, token)
        self._set(row, Whole.WANTS_LOGPROBS, 1)

    def set_grammar(self, row: int, mask: MaskArray) -> None:
        """`mask` [ceil(V / 32)] int32: bit t % 32 of word t // 32 is set if token t may come."""
        self._grammar.extend(max(0, row + 1 - self._grammar.count))
        self._grammar.array[row] = mask
        self._set(row, Whole.USES_GRAMMAR, 1)
        self._uses_grammar = self._uses_lists = True

    def _add_tokens(self, rows: _Rows, row: int, tokens: IntArray | Sequence[int]) -> None:
        self._uses_lists = True
        new = rows.extend(len(tokens))
        new[:, 0] = row
        new[:, 1] = tokens

    def tensors(self, device: torch.device | str = "cpu") -> SampleArguments:
        """The op's arguments after `logits`. On the CPU they share memory with this object until `clear`."""
        grammar = self._grammar_rows().tensor(device) if self._uses_grammar else None
        self._reals.count = self._wholes.count = len(self)
        lists = [rows.tensor(device) for rows in (self._reals, self._wholes, *self._lists)]
        reals, wholes, penalised, bias_at, bias_value, banned, allowed = lists
        return reals, wholes, penalised, bias_at, bias_value, banned, allowed, grammar, self.num_top

    def _grammar_rows(self) -> _Rows:
        self._grammar.extend(len(self) - self._grammar.count)  # rows without a grammar hold anything
        return self._grammar

    def draw(self, logits: torch.Tensor) -> Draws:
        """Draw tokens by `logits` [R, V] float32, R = len(self)."""
        begin = perf_counter()
        if self.sampler is None:
            result = self._run_op(logits)
        else:
            inputs = (
                *(self._reals.array, self._wholes.array, *(rows.array for rows in self._lists)),
                self._grammar_rows().array if self._uses_grammar else None,
            )
            penalised, bias, _, banned, allowed = self._lists
            counts = penalised.count, bias.count, banned.count, allowed.count
            begin = perf_counter()
            result = Draws(*self.sampler.sample(logits, self.num_rows, inputs, counts, self.num_top))
        self.device_s = perf_counter() - begin
        return result

    @torch.inference_mode()
    def _run_op(self, logits: torch.Tensor) -> Draws:
        result: SampleResult = sample(logits, *self.tensors(logits.device))
        return Draws(*(output.cpu().numpy() for output in result))
