"""Runs a step: one batch through the model and through `sample`."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.batch import StepBatch
from slipstream.sampling.batch import SamplingBatch


class Step(Protocol):
    """A compiled step: what `Device.compile` returns."""

    def run(self, batch: StepBatch) -> Tensor:
        """Logits of the rows that want them, in row order: [rows, vocab] float32."""
        ...


@dataclass(slots=True)
class StepResult:
    """Per row that wanted logits, in row order; see `ops.sample` for what the arrays hold. Good until the next step."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]


class Sampler(Protocol):
    """Draws tokens for the rows of a step, as `slipstream.ops.sample` does."""

    def sample(self, logits: Tensor, sampling: SamplingBatch) -> StepResult:
        """`logits` [R, V] float32 with R = len(sampling), rows one after the other in memory."""
        ...


class OpSampler:
    """The op `slipstream::sample`, whatever runs it on the logits' device."""

    @torch.inference_mode()
    def sample(self, logits: Tensor, sampling: SamplingBatch) -> StepResult:
        return StepResult(*(output.numpy() for output in sampling.sample(logits)))


@dataclass(slots=True)
class Handle:
    """A step that was launched. `device_s` is the time for which the host had nothing to do, in seconds."""

    result: StepResult
    device_s: float


NOTHING = StepResult(
    np.empty(0, np.int64),
    np.empty(0, np.float32),
    np.empty((0, 0), np.int64),
    np.empty((0, 0), np.float32),
    np.empty(0, np.int64),
)


class Runner:
    """The one forward path: prompts, decoding and verification are the same call with other rows.

    `sampler` None: the op in PyTorch.
    """

    def __init__(self, step: Step, sampler: Sampler | None = None) -> None:
        self.step = step
        self.sampler: Sampler = sampler or OpSampler()

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> Handle:
        """Start a step. On this device the work is done when it returns."""
        begin = perf_counter()
        logits = self.step.run(batch)
        result = self.sampler.sample(logits, sampling) if len(sampling) else NOTHING
        return Handle(result, perf_counter() - begin)

    def collect(self, handle: Handle) -> StepResult:
        """Wait for a step and bring its results to the host."""
        return handle.result
