"""Runs a step: one batch through the model and through `sample`."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
from torch import Tensor

from slipstream.core.batch import StepBatch
from slipstream.sampling.batch import Draws, SamplingBatch


class Step(Protocol):
    """A compiled step: what `Device.compile` returns."""

    def run(self, batch: StepBatch) -> Tensor:
        """Logits of the rows that want them, in row order: [rows, vocab] float32."""
        ...


@dataclass(slots=True)
class Handle:
    """A step that was launched. `device_s`: seconds in which the host had nothing to do."""

    draws: Draws
    device_s: float


_NOTHING = Draws(
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

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> Handle:
        """Start a step. On this device the work is done when it returns."""
        begin = perf_counter()
        logits = self.step.run(batch)
        device_s = perf_counter() - begin
        if not len(sampling):
            return Handle(_NOTHING, device_s)
        draws = sampling.draw(logits)
        return Handle(draws, device_s + sampling.device_s)

    def collect(self, handle: Handle) -> Draws:
        """Wait for a step and bring its results to the host; they are good until the next launch."""
        return handle.draws
