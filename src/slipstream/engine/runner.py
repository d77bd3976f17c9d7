"""Runs a step: one batch through the model and through `sample`."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class StepResult:
    """Per row that wanted logits, in row order; see `ops.sample` for what the arrays hold."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]
    ranks: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Handle:
    """A step that was launched."""

    outputs: tuple[Tensor, ...] | None


_NOTHING = StepResult(
    np.empty(0, np.int64),
    np.empty(0, np.float32),
    np.empty((0, 0), np.int64),
    np.empty((0, 0), np.float32),
    np.empty(0, np.int64),
)


class Runner:
    """The one forward path: prompts, decoding and verification are the same call with other rows."""

    def __init__(self, step: Step) -> None:
        self.step = step

    @torch.inference_mode()
    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> Handle:
        """Start a step. On this device the work is done when it returns."""
        logits = self.step.run(batch)
        if not len(sampling):
            return Handle(None)
        return Handle(sampling.sample(logits))

    def collect(self, handle: Handle) -> StepResult:
        """Wait for a step and bring its results to the host."""
        if handle.outputs is None:
            return _NOTHING
        return StepResult(*(output.numpy() for output in handle.outputs))
