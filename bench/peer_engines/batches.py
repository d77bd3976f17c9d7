"""Many requests at once: slipstream, vLLM and slipstream in another format in turns, a memory probe between them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pairs import Pair, ratio

from peer_engines.comparison import say
from peer_engines.subjects import Subject
from peer_engines.worker import Worker
from slipstream.cli.bench_latency import spread
from slipstream.devices.bandwidth import ReadProbe

SEED = 1
VOCAB = range(20, 49_000)
"""Ids to draw from: no control tokens of the default model, and within its vocabulary."""


@dataclass(frozen=True)
class BatchPlan:
    """Requests at once, lengths in tokens, and the number of counted rounds; one uncounted round comes first."""

    sizes: tuple[int, ...] = (8, 32)
    input_len: int = 32
    output_len: int = 128
    rounds: int = 5


def prompts(size: int, length: int) -> list[list[int]]:
    """The same each time; the tokens of a prompt are distinct."""
    chooser = random.Random(SEED)
    return [chooser.sample(VOCAB, length) for _ in range(size)]


class Batches:
    """The peer runs between the two slipstreams, so that one run of it makes a pair with each. Close it at the end.

    A subject that fails ends the run with PeerError.
    """

    def __init__(self, model: Path, ours: Sequence[Subject], peer: Subject, plan: BatchPlan, threads: int) -> None:
        first, second = ours
        self.model, self.plan, self.threads = model, plan, threads
        self.order = (first, peer, second)
        self.workers: dict[str, Worker] = {}
        self.descriptions: dict[str, Any] = {}
        self.rounds: list[dict[str, Any]] = []
        self._probe = ReadProbe(threads)

    def run(self) -> None:
        """Load all, one uncounted round, and the counted ones."""
        for subject in self.order:
            say(f"starting {subject.name}")
            worker = self.workers[subject.name] = subject.start(self.model, self.threads)
            worker.wait_loaded()
            self.descriptions[subject.name] = worker.call(
                "describe", shapes=[(self.plan.input_len, self.plan.output_len)]
            )
            worker.pause()
        for number in range(self.plan.rounds + 1):
            for size in self.plan.sizes:
                say(f"{size} requests, " + (f"round {number} of {self.plan.rounds}" if number else "to warm up"))
                measured = self._round(size)
                if number:
                    self.rounds.append(measured)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    def rows(self) -> list[dict[str, Any]]:
        """For each size and subject: tokens/s over the whole run, and slipstream's speed over the peer's."""
        first, peer, second = (subject.name for subject in self.order)
        found = []
        for size in self.plan.sizes:
            rounds = [one for one in self.rounds if one["requests"] == size]
            for name in (first, second, peer):
                speeds = spread(one["tokens"][name] / one["seconds"][name] for one in rounds)
                row: dict[str, Any] = {"requests": size, "name": name, "tokens_per_s": speeds}
                if name != peer:
                    near = slice(0, 3) if name == first else slice(1, 4)
                    row["ratio"] = ratio(
                        [
                            Pair(
                                one["tokens"][name] / one["seconds"][name],
                                one["tokens"][peer] / one["seconds"][peer],
                                one["probes"][near],
                            )
                            for one in rounds
                        ]
                    )
                found.append(row)
        return found

    def _round(self, size: int) -> dict[str, Any]:
        asked = prompts(size, self.plan.input_len)
        probes = [self._probe.measure()]
        seconds: dict[str, float] = {}
        tokens: dict[str, int] = {}
        for subject in self.order:
            worker = self.workers[subject.name]
            worker.resume()
            worker.call("batch", prompts=asked[:1], count=4)  # wakes it up
            done = worker.call("batch", prompts=asked, count=self.plan.output_len)
            worker.pause()
            seconds[subject.name], tokens[subject.name] = done["seconds"], done["tokens"]
            probes.append(self._probe.measure())
        return {"requests": size, "seconds": seconds, "tokens": tokens, "probes": probes}


def batch_table(result: dict[str, Any]) -> str:
    """The result in Markdown."""
    lines = [
        "| requests | engine | tokens/s | Slipstream's speed over the peer's (95 %) |",
        "|---:|---|---:|---|",
    ]
    for row in result["rows"]:
        found = row.get("ratio")
        cell = ""
        if found is not None:
            dropped = f", {found['dropped']} dropped" if found["dropped"] else ""
            middle = found["median"]
            text = "no pair left" if middle is None else f"{middle:.2f} ({found['low']:.2f} to {found['high']:.2f})"
            cell = text + dropped
        lines.append(f"| {row['requests']} | {row['name']} | {row['tokens_per_s']['median']:.0f} | {cell} |")
    if result["quick"]:
        lines += ["", "**A quick run: it shows that the harness works, not how fast anything is.**"]
    if result["disturbed"]:
        lines += ["", "**Not valid: other processes disturbed the run.**"]
    return "\n".join(lines)
