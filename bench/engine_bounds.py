"""What the engine promises of its steps, measured with the default model: `python bench/engine_bounds.py`.

1. A step of 16 sequences against a step of one, float32, context 256 (interleaved pairs, median, bootstrap interval).
2. The times between the tokens of one stream while 4,096-token prompts keep arriving, against `--max-step-ms`.
3. The host's share of a step (`host_ms`) at 1 and 16 sequences.

Results go to bench/results/engine_bounds.json.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pairs import interval

from slipstream import LLM, SamplingParams
from slipstream.devices.bandwidth import ReadProbe
from slipstream.devices.foreign_load import ForeignLoad
from slipstream.devices.host import cpu_name


def step_ms(llm: LLM, sequences: int, context: int, steps: int) -> tuple[list[float], list[float]]:
    """Times and host times in ms of steps that decode `sequences` sequences up to a context."""
    engine = llm.loaded.engine
    recorded: list[tuple[int, float, float]] = []
    step = engine.step

    def watched() -> Any:
        updates = step()
        alone = engine.batch.num_rows == engine.batch.num_sequences  # every sequence has one row: all decode
        recorded.append((engine.batch.num_rows if alone else 0, engine.stats.step_ms, engine.stats.host_ms))
        return updates

    engine.step = watched  # type: ignore[method-assign]
    # Prompts in as few steps as possible, so that all sequences decode at once for a while.
    bound, engine.scheduler.max_step_ms = engine.scheduler.max_step_ms, 1e9
    prompts = [[(7 * s + i) % 1000 + 20 for i in range(context - steps)] for s in range(sequences)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True))
    engine.step = step  # type: ignore[method-assign]
    engine.scheduler.max_step_ms = bound
    decoding = [(total, host) for rows, total, host in recorded if rows == sequences][1:]
    return [total for total, _ in decoding], [host for _, host in decoding]


def compare_batches(llm: LLM, pairs: int) -> dict[str, Any]:
    """Interleaved pairs of one sequence and 16."""
    ratios, one, sixteen, hosts = [], [], [], {1: [], 16: []}
    for _ in range(pairs):
        single, host_single = step_ms(llm, 1, 256, 32)
        many, host_many = step_ms(llm, 16, 256, 32)
        one.append(statistics.median(single))
        sixteen.append(statistics.median(many))
        ratios.append(sixteen[-1] / one[-1])
        hosts[1] += host_single
        hosts[16] += host_many
    return {
        "step_ms_1": statistics.median(one),
        "step_ms_16": statistics.median(sixteen),
        "ratio": interval(ratios),
        "host_ms_1": statistics.median(hosts[1]),
        "host_ms_16": statistics.median(hosts[16]),
    }


def stream_under_load(llm: LLM, max_step_ms: float, prompts: int) -> dict[str, Any]:
    """Times between the tokens of one stream while 4,096-token prompts arrive, one as soon as the last is done."""
    gaps: list[float] = []
    rows: list[int] = []
    last = [0.0]
    done = threading.Event()

    def on_update(update: Any) -> None:
        now = time.perf_counter()
        if last[0] and not done.is_set():
            gaps.append((now - last[0]) * 1e3)
            rows.append(llm.loaded.engine.batch.num_rows)
        last[0] = now

    def arrivals() -> None:
        chooser = random.Random(1)
        time.sleep(1.0)
        for _ in range(prompts):
            prompt = [chooser.randrange(20, 40000) for _ in range(4096)]
            llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
        done.set()

    thread = threading.Thread(target=arrivals)
    thread.start()
    params = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
    stream = threading.Thread(
        target=lambda: llm.generate([5, 6, 7], params, on_update=lambda u: _until(done, on_update, u)), daemon=True
    )
    stream.start()
    thread.join()
    ordered = sorted(gaps)
    p99 = ordered[int(len(ordered) * 0.99)]
    return {
        "max_step_ms": max_step_ms,
        "tokens": len(gaps),
        "prompts": prompts,
        "median_ms": statistics.median(gaps),
        "p95_ms": ordered[int(len(ordered) * 0.95)],
        "p99_ms": p99,
        "max_ms": ordered[-1],
        "limit_ms": max_step_ms * 1.2,
        "holds": p99 <= max_step_ms * 1.2,
        "prompt_rows_per_step": statistics.mean(rows) - 1,
    }


class _Enough(Exception):
    """The prompts are done; the stream may end."""


def _until(done: threading.Event, on_update: Any, update: Any) -> None:
    if done.is_set():
        raise _Enough
    on_update(update)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--prompts", type=int, default=4, help="0: keep the stored figures of the stream")
    parser.add_argument("--max-step-ms", type=float, default=100.0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "engine_bounds.json")
    args = parser.parse_args()
    threading.excepthook = lambda info: None if info.exc_type is _Enough else threading.__excepthook__(info)
    kept = json.loads(args.output.read_text()) if args.output.exists() else {"stream": None}
    load = ForeignLoad()
    with LLM(max_step_ms=args.max_step_ms, cache_memory=2 * 2**30, prefix_caching=False) as llm:
        probe = llm.run_in_engine(ReadProbe)
        before = llm.run_in_engine(probe.measure)
        result = {
            "what": __doc__.split("\n")[0],
            "command": shlex.join(["python", "bench/engine_bounds.py", *sys.argv[1:]]),
            "batch": compare_batches(llm, args.pairs),
            "probed_gb_per_s": [before / 1e9, llm.run_in_engine(probe.measure) / 1e9],
            "stream": stream_under_load(llm, args.max_step_ms, args.prompts) if args.prompts else kept["stream"],
            "foreign_load": load.share(),
            "cpu": cpu_name(),
            "threads": llm.loaded.device.threads,
            "versions": {name: version(name) for name in ("slipstream-llm", "torch")},
        }
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
