"""The run itself: subjects take turns (slipstream, peer A, slipstream, peer B, ...), a memory probe between them."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from peer_engines import environments
from peer_engines.plan import Plan, spread_over
from peer_engines.subjects import SLIPSTREAM, Subject
from peer_engines.worker import PeerError, Worker
from slipstream.devices.bandwidth import ReadProbe

PROMPTS = Path(__file__).parents[1] / "prompts" / "spec_bench_30.jsonl"
WAKE_UP = (16, 4)
"""Prompt and answer of the uncounted request that a worker begins with after it was stopped."""
CHECKED_TOKENS = 16
SLOW = "transformers"
LONG_PROMPTS = "llama.cpp"
"""The engine that is compared on long prompts too; the others would take minutes for them."""


@dataclass
class Entry:
    """What is known of one subject. `logprob`: mean log-probability of its first tokens, by slipstream's model."""

    subject: Subject
    worker: Worker | None = None
    load_s: float | None = None
    description: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    equal_tokens: int = 0
    logprob: float | None = None
    error: str | None = None

    def report(self) -> dict[str, Any]:
        known = {name: value for name, value in vars(self).items() if name not in ("subject", "worker")}
        return {**asdict(self.subject), **known, "install": environments.record(self.subject.engine)}


class Comparison:
    """Peers, and slipstream in each format that they are set against. Close it at the end.

    They are started one after the other, slipstream first, and each is stopped until its turn comes.
    """

    def __init__(self, model: Path, peers: Sequence[Subject], plan: Plan, threads: int) -> None:
        self.model, self.plan, self.threads = model, plan, threads
        wanted = {peer.against for peer in peers}
        self.ours = {subject.name: Entry(subject) for subject in SLIPSTREAM if subject.name in wanted}
        self.peers = [Entry(peer) for peer in peers]
        self.prompt: list[int] = []
        self.pairs: list[dict[str, Any]] = []
        self._probe = ReadProbe(threads)
        torch.set_num_threads(threads)

    @property
    def entries(self) -> list[Entry]:
        """All, each slipstream before the peers that are set against it."""
        found = []
        for name, ours in self.ours.items():
            found += [ours, *(entry for entry in self.peers if entry.subject.against == name)]
        return found

    def start(self) -> None:
        """Load and warm up all. A peer that fails is left out with its error; raises PeerError if slipstream fails."""
        for entry in self.ours.values():
            self._start(entry)
        for entry in self.peers:
            try:
                self._start(entry)
            except PeerError as error:
                self._leave_out(entry, error)

    def measure(self) -> None:
        """All pairs: in each round every peer after a turn of the slipstream that it is set against."""
        before, plan = self._probe.measure(), self.plan
        for number in range(plan.pairs):
            for entry in [entry for entry in self.entries if entry in self.peers and entry.error is None]:
                engine = entry.subject.engine
                if engine == SLOW and not spread_over(number, plan.slow_pairs, plan.pairs):
                    continue
                say(f"round {number + 1} of {plan.pairs}: {entry.subject.name}")
                long = engine == LONG_PROMPTS and spread_over(number, plan.long_pairs, plan.pairs)
                ours = self._turn(self.ours[entry.subject.against], long=long)
                between = self._probe.measure()
                try:
                    theirs = self._turn(entry, long=long)
                except PeerError as error:
                    self._leave_out(entry, error)
                    continue
                after = self._probe.measure()
                self.pairs.append(
                    {
                        "peer": entry.subject.name,
                        "against": entry.subject.against,
                        "slipstream": ours,
                        "other": theirs,
                        "probes": [before, between, after],
                    }
                )
                before = after

    def close(self) -> None:
        for entry in (*self.ours.values(), *self.peers):
            if entry.worker is not None:
                entry.worker.close()

    def _start(self, entry: Entry) -> None:
        say(f"starting {entry.subject.name}")
        plan = self.plan
        worker = entry.worker = entry.subject.start(self.model, self.threads)
        entry.load_s = worker.wait_loaded()
        entry.description = worker.call("describe", shapes=plan.shapes)
        if not self.prompt:  # the first one is slipstream
            self.prompt = _prompt(worker, plan.long_len)
        prompt = self.prompt[: plan.input_len]
        worker.call("generate", prompt=self.prompt[: plan.short_len], count=plan.output_len)
        entry.tokens = worker.call("generate", prompt=prompt, count=CHECKED_TOKENS)["tokens"]
        worker.pause()
        judge = self.ours.get(entry.subject.against, entry)
        entry.equal_tokens = equal_tokens(entry.tokens, judge.tokens)
        assert judge.worker is not None
        judge.worker.resume()
        entry.logprob = judge.worker.call("score", prompt=prompt, tokens=entry.tokens)["logprob"]
        judge.worker.pause()

    def _turn(self, entry: Entry, *, long: bool) -> dict[str, float]:
        """Seconds of each of the plan's measures, and to the first token after the short prompt (`ttft`)."""
        worker, plan = entry.worker, self.plan
        assert worker is not None
        worker.resume()
        worker.call("generate", prompt=self.prompt[: WAKE_UP[0]], count=WAKE_UP[1])
        found: dict[str, float] = {}
        firsts = []
        for name, (length, count) in zip(plan.decodes, plan.shapes, strict=True):
            times = worker.call("generate", prompt=self.prompt[:length], count=count)["times"]
            found[name] = times[-1] - times[0]
            firsts.append(times[0])
        found["ttft"], found[plan.prefills[0]] = firsts
        if long:
            times = worker.call("generate", prompt=self.prompt[: plan.long_len], count=1)["times"]
            found[plan.prefills[1]] = times[0]
        worker.pause()
        return found

    def _leave_out(self, entry: Entry, error: PeerError) -> None:
        entry.error = str(error)
        say(f"left out: {error}")
        if entry.worker is not None:
            entry.worker.close()


def equal_tokens(tokens: Sequence[int], ours: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, ours, strict=False)))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _prompt(worker: Worker, length: int) -> list[int]:
    """`length` tokens of the prompts' text, from its beginning again where it is too short."""
    texts = [json.loads(line)["turns"][0] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    tokens = worker.call("encode", text="\n\n".join(texts))["tokens"]
    return list(itertools.islice(itertools.cycle(tokens), length))
