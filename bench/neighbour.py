"""What a busy neighbour costs: `python bench/neighbour.py`. About two minutes.

Tokens per second of one stream (16 tokens of prompt, 128 of answer, greedy) alone and beside a process that does
nothing but loop, left to the system, pinned to this process's first CPU, and to its second. Each pair is a run alone
and a run beside; a ratio is the speed beside over the speed alone. `longest_gap_ms` is the longest time between two of
the tokens.

Results go to bench/results/neighbour.json.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conditions import RESULTS, conditions, finish
from pairs import Pair, interval, ratio

from slipstream import LLM, SamplingParams
from slipstream.cli.bench_latency import token_times
from slipstream.devices.bandwidth import ReadProbe
from slipstream.devices.foreign_load import ForeignLoad
from slipstream.devices.host import allowed_cpus

RESULT = RESULTS / "neighbour.json"
SPIN = """
import os, sys
if len(sys.argv) > 1:
    os.sched_setaffinity(0, {int(sys.argv[1])})
print(flush=True)
while True:
    pass
"""
PROMPT = list(range(100, 116))
TOKENS = 128


@contextmanager
def busy(cpu: int | None) -> Iterator[None]:
    """A process that loops, pinned to a CPU if one is given."""
    command = [sys.executable, "-c", SPIN, *([] if cpu is None else [str(cpu)])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.2)  # for the system to spread the load
        try:
            yield
        finally:
            process.kill()


def run(llm: LLM) -> dict[str, float]:
    """One stream."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    times = token_times(lambda on_update: llm.generate(PROMPT, params, on_update=on_update))[0]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return {"tokens_per_s": len(gaps) / sum(gaps), "longest_gap_ms": max(gaps) * 1e3}


def measure(llm: LLM, pairs: int, threads: int) -> dict[str, Any]:
    cpus = sorted(os.sched_getaffinity(0))
    neighbours: dict[str, int | None] = {"anywhere": None, **{f"on CPU {cpu}": cpu for cpu in cpus[:2]}}
    run(llm)
    probe = llm.run_in_engine(lambda: ReadProbe(threads))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in neighbours}
    for _ in range(pairs):
        for name, cpu in neighbours.items():
            before = llm.run_in_engine(probe.measure)
            alone = run(llm)
            between = llm.run_in_engine(probe.measure)
            with busy(cpu):
                beside = run(llm)
            after = llm.run_in_engine(probe.measure)
            found[name].append({"alone": alone, "beside": beside, "probes": [before, between, after]})
    return {name: {**figures(runs), "pairs": runs} for name, runs in found.items()}


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    speeds = [Pair(one["beside"]["tokens_per_s"], one["alone"]["tokens_per_s"], one["probes"]) for one in runs]
    shown: dict[str, Any] = {
        name: {
            "tokens_per_s": interval([one[name]["tokens_per_s"] for one in runs]),
            "longest_gap_ms": {
                "median": statistics.median(one[name]["longest_gap_ms"] for one in runs),
                "max": max(one[name]["longest_gap_ms"] for one in runs),
            },
        }
        for name in ("alone", "beside")
    }
    return {**shown, "beside_over_alone": ratio(speeds)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=allowed_cpus())
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    load = ForeignLoad()  # the neighbours are children, and have ended when it is asked
    with LLM(prefix_caching=False, threads=options.threads) as llm:
        found = measure(llm, options.pairs, options.threads)
        model = llm.loaded.checkpoint.path.name
    result = {
        "what": "one stream alone and beside one busy process; a ratio is the speed beside over the speed alone",
        **conditions(load, options.threads),
        "model": model,
        "neighbour": found,
    }
    for name, shown in found.items():
        over, gap = shown["beside_over_alone"], shown["beside"]["longest_gap_ms"]
        told = (
            "no pair left"
            if over["median"] is None
            else f"{over['median']:.2f} ({over['low']:.2f} to {over['high']:.2f})"
        )
        print(
            f"{name}: {shown['alone']['tokens_per_s']['median']:.0f} tokens/s alone, "
            f"{shown['beside']['tokens_per_s']['median']:.0f} beside: {told}, {over['dropped']} dropped; "
            f"longest gap {gap['median']:.1f} ms, at most {gap['max']:.1f}"
        )
    return finish(result, options.json)


if __name__ == "__main__":
    sys.exit(main())
