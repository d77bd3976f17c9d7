"""What the engine's own Python costs per step, without a model: `python bench/host_cost.py`.

The step returns made-up logits of the default model's size; every row samples with temperature 1 and top_p 0.95. What
is left is the host's work: schedule, fill, hand over, absorb (with text) and the loop around them. `--sample` says what
draws the tokens: nothing (`none`: every row gets the same one), the op, or the native library.

Each count of sequences runs several times; a figure is the median over the steps in which all sequences decode, of the
best run, since other processes only ever add. `wall` is the time between two steps, from the end of one to the start of
the next, without sampling, and so all that the host does. With `--native-us` the step reads memory for that long
without the interpreter lock, as the real one does: the caches are then cold for the host's work, and threads that wait
for tokens get to run meanwhile.

With `--write` the results go to bench/results/host_cost.json.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from slipstream.cache.manager import CacheManager
from slipstream.core.batch import StepBatch
from slipstream.core.sampling_params import SamplingParams
from slipstream.devices.host import cpu_name
from slipstream.engine.core import Engine
from slipstream.engine.cost_model import CostModel
from slipstream.engine.inputs import InputProcessor
from slipstream.engine.llm import LLM
from slipstream.engine.runner import Runner
from slipstream.kernels.cpu.library import Missing, load_library
from slipstream.kernels.cpu.sampling import NativeSampler
from slipstream.loading import catalog
from slipstream.loading.checkpoint import open_checkpoint
from slipstream.text.tokenizer import Tokenizer

VOCAB = 49_152
COUNTS = (1, 8, 32)
PHASES = ("schedule", "fill", "sample", "absorb", "hand over")
RESULTS = Path(__file__).parent / "results" / "host_cost.json"


class Busy:
    """Reads memory for a set time without holding the interpreter lock, as a step reads weights.

    It leaves the processor's caches without the interpreter's own memory, which makes the host's work slower.
    """

    def __init__(self, microseconds: float) -> None:
        weights = np.ones(1 << 27, np.uint8).view(np.int64)
        np.bitwise_or.reduce(weights)
        begin = time.perf_counter()
        np.bitwise_or.reduce(weights)
        share = microseconds * 1e-6 / (time.perf_counter() - begin)
        self._weights = weights[: int(len(weights) * share)]

    def __call__(self) -> None:
        if len(self._weights):
            np.bitwise_or.reduce(self._weights)


class ConstantStep:
    """A step whose logits are made beforehand."""

    def __init__(self, busy: Busy, rows: int) -> None:
        self._busy = busy
        generator = torch.Generator().manual_seed(3)
        row = torch.randn(VOCAB, generator=generator) * 3
        row[2000:2200] += 8  # some hundred likely tokens, as after a model
        self._logits = row.repeat(rows, 1)

    def run(self, batch: StepBatch) -> torch.Tensor:
        self._busy()
        return self._logits[: int(np.count_nonzero(batch.wants_logits[: batch.num_rows]))]


class Phases:
    """Microseconds of each phase of every step, from wrapped methods."""

    def __init__(self, llm: LLM) -> None:
        self._engine = engine = llm.loaded.engine
        self._now: dict[str, float] = {}
        self._steps: list[dict[str, float]] = []
        self._launched = 0.0
        worker = llm._worker
        wrapped = [
            ("schedule", engine.scheduler, "schedule"),
            ("schedule", engine.scheduler, "shape_of"),
            ("fill", engine, "_fill"),
            ("sample", engine.sampling, "draw"),
            ("absorb", engine, "_absorb"),
            ("hand over", worker, "_deliver"),
        ]
        for phase, owner, name in wrapped:
            setattr(owner, name, self._timed(phase, getattr(owner, name)))
        self._run, engine.runner.step.run = engine.runner.step.run, self._step  # type: ignore[method-assign]

    def begin(self) -> None:
        """Forget what was measured."""
        self._steps.clear()
        self._now = {}
        self._launched = 0.0

    def medians(self, count: int) -> dict[str, float]:
        """Of the steps in which `count` sequences had a row each."""
        decoding = [step for step in self._steps if step["rows"] == count][3:-3]
        names = ("wall", "host", "schedule", "fill", "sample", "absorb", "hand over")
        return {name: statistics.median(step.get(name, 0.0) for step in decoding) for name in names}

    def _step(self, batch: StepBatch) -> torch.Tensor:
        """The step: what is before it belongs to the phases since the step before."""
        begin = time.perf_counter()
        now, self._now = self._now, {}
        if self._launched:
            now["wall"] = (begin - self._launched - self._engine.sampling.device_s) * 1e6
            now["host"] = self._engine.stats.host_ms * 1e3
            now["rows"] = batch.num_rows
            self._steps.append(now)
        logits = self._run(batch)
        self._launched = time.perf_counter()
        return logits

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = clock()
            try:
                return function(*args, **kwargs)
            finally:
                now = self._now
                now[phase] = now.get(phase, 0.0) + (clock() - begin) * 1e6

        return timed


def make_llm(native_us: float, sequences: int, sampler: Any) -> LLM:
    """An LLM over the constant step, with the default model's tokenizer where that is there."""
    try:
        path = catalog.resolve(None, fetch_missing=False)
        tokenizer = Tokenizer.from_gguf_metadata(open_checkpoint(path).metadata)
    except Exception:
        print("the default model is not in the cache: without text", file=sys.stderr)
        tokenizer = None
    length = 4096

    def load() -> Any:
        step = ConstantStep(Busy(native_us), sequences)
        engine = Engine(
            Runner(step),
            CacheManager(sequences * length // 16 + 1, 16),
            CostModel(1.0, 1.0, 0.01),
            vocab_size=VOCAB,
            eos_ids={2},
            tokenizer=tokenizer,
            max_model_len=length,
            max_sequences=sequences,
            max_rows=2048,
            max_step_ms=1e9,
            row_tile=16,
            sampler=sampler,
        )
        inputs = InputProcessor(
            tokenizer=tokenizer, template=None, vocab_size=VOCAB, max_model_len=length, defaults=SamplingParams()
        )
        return SimpleNamespace(engine=engine, inputs=inputs)

    return LLM.over(load)


class NoSampler:
    """Gives every row the same word at no cost."""

    def __init__(self, token: int = 314) -> None:
        self._token = token
        self._known: dict[int, tuple[Any, ...]] = {}

    def sample(self, logits: Any, rows: int, *arguments: Any) -> tuple[Any, ...]:
        if rows not in self._known:
            tokens, none = np.full(rows, self._token, np.int64), np.empty((rows, 0), np.int64)
            self._known[rows] = tokens, np.empty(rows, np.float32), none, none.astype(np.float32), tokens
        return self._known[rows]


def make_sampler(kind: str) -> Any:
    if kind != "native":
        return NoSampler() if kind == "none" else None
    library = load_library()
    if isinstance(library, Missing):
        raise SystemExit(f"the native library is {library.reason}")
    return NativeSampler(library, VOCAB)


def run(llm: LLM, phases: Phases, count: int, tokens: int, stream: bool) -> dict[str, float]:
    """One run of `count` sequences. -> medians over its decoding steps, in microseconds."""
    engine = llm.loaded.engine
    phases.begin()
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=tokens, ignore_eos=True, seed=1)
    prompts = [[(7 * s + i) % 1000 + 20 for i in range(64)] for s in range(count)]
    llm.generate(prompts, params, on_update=(lambda update: None) if stream else None)
    engine.cache.clear_prefixes()
    return phases.medians(count)


def measure(args: argparse.Namespace, count: int) -> dict[str, float]:
    """The best of several runs."""
    with make_llm(args.native_us, count, make_sampler(args.sample)) as llm:
        phases = Phases(llm)
        runs = [run(llm, phases, count, args.tokens, args.stream) for _ in range(args.runs)]
    return min(runs, key=lambda figures: figures["wall"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", choices=("none", "op", "native"), default="none")
    parser.add_argument("--native-us", type=float, default=0.0, help="the step computes for this long")
    parser.add_argument("--stream", action="store_true", help="the caller looks at every token")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args()
    found = {}
    for count in args.counts:
        figures = measure(args, count)
        found[count] = {name: round(value, 1) for name, value in figures.items()}
        split = ", ".join(f"{phase} {figures[phase]:.1f}" for phase in PHASES)
        print(
            f"{count:3} sequences: host_ms {figures['host']:.1f} us (allowed {150 + 15 * count}), wall without step "
            f"{figures['wall']:.1f} us, {figures['wall'] / count:.1f} us a sequence; {split}",
            flush=True,
        )
    if args.write:
        result = {
            "command": shlex.join(["python", *sys.argv]),
            "cpu": cpu_name(),
            "torch": version("torch"),
            "python": sys.version.split()[0],
            "microseconds": found,
        }
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
