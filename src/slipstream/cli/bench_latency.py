"""What `slipstream bench latency` measures, and how it is counted."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.cli.percentiles import Figures, nearest_rank
from slipstream.core.errors import ConfigError
from slipstream.core.request import RequestUpdate
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

PROMPT_SEED = 20240229
PROBES_AGREE = 0.15
"""Probes before and after a run may differ by this; else its share of the bandwidth says nothing."""


@dataclass(frozen=True)
class Shape:
    """What is run: `batch_size` prompts of `input_len` tokens, each continued by `output_len`."""

    input_len: int
    output_len: int
    batch_size: int

    def check(self) -> None:
        for name, least in (("input_len", 1), ("output_len", 2), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be {least} or more", param=name)


@dataclass
class Run:
    """One repeat. `times` holds for each request when each of its tokens came, in seconds since the run began."""

    times: list[list[float]]
    probes: tuple[float, float]

    @property
    def prefill_seconds(self) -> float:
        """Until every request had its first token."""
        return max(times[0] for times in self.times)

    @property
    def decode_window(self) -> tuple[int, float]:
        """Tokens, and seconds, from the moment when every request had one until the first of them was done."""
        begin, end = self.prefill_seconds, min(times[-1] for times in self.times)
        return sum(begin < moment <= end for times in self.times for moment in times), end - begin

    @property
    def probes_differ(self) -> bool:
        return probes_differ(self.probes)


@dataclass
class Latency:
    """All repeats of a shape, and the bytes that a decoding step reads."""

    shape: Shape
    bytes_per_step: float
    runs: list[Run] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Median, min, max and 95th percentile: rates over the repeats, times over all requests and tokens."""
        shape, runs = self.shape, self.runs
        windows = [run.decode_window for run in runs]
        used = [(run, window) for run, window in zip(runs, windows, strict=True) if not run.probes_differ]
        shares = [
            self.bytes_per_step * (tokens / shape.batch_size) / seconds / statistics.mean(run.probes)
            for run, (tokens, seconds) in used
        ]
        every = [times for run in runs for times in run.times]
        gaps = [(b - a) * 1e3 for times in every for a, b in itertools.pairwise(times)]
        return {
            "decode_tokens_per_s": spread(tokens / seconds for tokens, seconds in windows),
            "prefill_tokens_per_s": spread(shape.batch_size * shape.input_len / run.prefill_seconds for run in runs),
            "ttft_ms": spread(times[0] * 1e3 for times in every),
            "inter_token_ms": spread(gaps),
            "bandwidth_share": {
                **spread(shares),
                "probed_gb_per_s": spread(probe / 1e9 for run in runs for probe in run.probes),
                "bytes_per_step": self.bytes_per_step,
                "runs_used": len(used),
                "runs_dropped": len(runs) - len(used),
            },
        }


def probes_differ(probes: tuple[float, float]) -> bool:
    """Whether two probes of the bandwidth are too far apart for what ran between them to be compared with it."""
    return max(probes) > (1 + PROBES_AGREE) * min(probes)


def spread(values: Iterable[float]) -> Figures:
    """Median, min, max and 95th percentile (nearest rank) of values; None each if there are none."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(("median", "min", "max", "p95"))
    p95 = nearest_rank(ordered, 95)
    return {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1], "p95": p95}


def measure(llm: LLM, shape: Shape, *, warmup: int, repeats: int) -> Latency:
    """Run a shape `warmup` times uncounted and `repeats` times counted, with a memory probe around each."""
    from slipstream.devices.bandwidth import ReadProbe

    shape.check()
    chooser = random.Random(PROMPT_SEED)
    vocab: int = llm.loaded.model.vocab_size
    prompts = [[chooser.randrange(vocab) for _ in range(shape.input_len)] for _ in range(shape.batch_size)]
    params = SamplingParams(temperature=0.0, max_tokens=shape.output_len, ignore_eos=True)

    def generate(on_update: Callable[[RequestUpdate], None]) -> None:
        llm.generate(list(prompts), params, on_update=on_update)

    for _ in range(warmup):
        token_times(generate)
    threads = llm.loaded.device.threads
    probe = llm.run_in_engine(lambda: ReadProbe(threads))
    latency = Latency(shape, bytes_per_step(llm, shape))
    before = llm.run_in_engine(probe.measure)
    for _ in range(repeats):
        times = token_times(generate)
        after = llm.run_in_engine(probe.measure)
        latency.runs.append(Run(times, (before, after)))
        before = after
        if latency.runs[-1].decode_window[0] == 0:
            raise ConfigError(
                "the first request was done before the last one had begun, so nothing can be said of decoding; "
                "give a larger --output-len or a smaller --batch-size",
                param="output_len",
            )
    return latency


def token_times(run: Callable[[Callable[[RequestUpdate], None]], object]) -> list[list[float]]:
    """Call `run` with a receiver of updates. -> for each request, seconds until each of its tokens came."""
    times: dict[str, list[float]] = {}
    begin = time.perf_counter()

    def on_update(update: RequestUpdate) -> None:
        now = time.perf_counter() - begin
        for delta in update.deltas:
            times.setdefault(update.request.id, []).extend([now] * len(delta.token_ids))

    run(on_update)
    return list(times.values())


def bytes_per_step(llm: LLM, shape: Shape) -> float:
    """Bytes that a decoding step has to read: the weights once, and each sequence's keys and values.

    Keys and values are taken at the mean context of the decoding phase.
    """
    model, device = llm.loaded.model, llm.loaded.device
    context = shape.input_len + shape.output_len / 2
    cache = 0.0
    for spec in model.cache_specs():
        seen = min(context, spec.window) if spec.window else context
        cache += device.page_bytes([spec], 1) * seen
    return llm.loaded.weight_bytes + cache * shape.batch_size
