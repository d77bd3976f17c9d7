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
from peer_engines.subjects import SLIPSTREAM, Subject
from peer_engines.worker import PeerError, Worker
from slipstream.devices.bandwidth import ReadProbe

PROMPTS = Path(__file__).parents[1] / "prompts" / "spec_bench_30.jsonl"
WAKE_UP = (16, 4)
"""Prompt and answer of the uncounted request that a worker begins with after it was stopped."""
CHECKED_TOKENS = 16


@dataclass(frozen=True)
class Plan:
    """What a piece measures (lengths in tokens), and the number of pairs for each peer."""

    input_len: int = 128
    output_len: int = 64
    prefill_len: int = 512
    pairs: int = 9


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
    """Slipstream and its peers, started one after the other, each stopped until its turn comes. Close it at the end."""

    def __init__(self, model: Path, peers: Sequence[Subject], plan: Plan, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model, self.plan, self.threads = model, plan, threads
        self.ours = Entry(SLIPSTREAM)
        self.peers = [Entry(peer) for peer in peers]
        self.prompt: list[int] = []
        self.pairs: list[dict[str, Any]] = []

    def start(self) -> None:
        """Load and warm up all. A peer that fails is left out with its error; raises PeerError if slipstream fails."""
        self._start(self.ours)
        for entry in self.peers:
            try:
                self._start(entry)
            except PeerError as error:
                self._leave_out(entry, error)

    def measure(self) -> None:
        """All pairs: in each round every peer after a piece of slipstream's own."""
        probe = ReadProbe()
        before = probe.measure()
        for number in range(self.plan.pairs):
            for entry in [entry for entry in self.peers if entry.error is None]:
                _say(f"pair {number + 1} of {self.plan.pairs}: {entry.subject.name}")
                ours = self._piece(self.ours)
                between = probe.measure()
                try:
                    theirs = self._piece(entry)
                except PeerError as error:
                    self._leave_out(entry, error)
                    continue
                after = probe.measure()
                self.pairs.append(
                    {
                        "peer": entry.subject.name,
                        "slipstream": ours,
                        "other": theirs,
                        "probes": [before, between, after],
                    }
                )
                before = after

    def close(self) -> None:
        for entry in (self.ours, *self.peers):
            if entry.worker is not None:
                entry.worker.close()

    def _start(self, entry: Entry) -> None:
        _say(f"starting {entry.subject.name}")
        plan = self.plan
        worker = entry.worker = entry.subject.start(self.model, self.threads)
        entry.load_s = worker.wait_loaded()
        entry.description = worker.call("describe", input_len=plan.input_len, output_len=plan.output_len)
        if entry is self.ours:
            texts = [json.loads(line)["turns"][0] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
            self.prompt = worker.call("encode", text="\n\n".join(texts))["tokens"][: plan.prefill_len]
        worker.call("generate", prompt=self.prompt, count=1)
        short = self.prompt[: plan.input_len]
        entry.tokens = worker.call("generate", prompt=short, count=plan.output_len)["tokens"][:CHECKED_TOKENS]
        worker.pause()
        entry.equal_tokens = equal_tokens(entry.tokens, self.ours.tokens)
        assert self.ours.worker is not None
        self.ours.worker.resume()
        entry.logprob = self.ours.worker.call("score", prompt=short, tokens=entry.tokens)["logprob"]
        self.ours.worker.pause()

    def _piece(self, entry: Entry) -> dict[str, float]:
        """One turn of a subject: seconds to the first token, of decoding, and of the longer prompt."""
        worker, plan = entry.worker, self.plan
        assert worker is not None
        worker.resume()
        worker.call("generate", prompt=self.prompt[: WAKE_UP[0]], count=WAKE_UP[1])
        times = worker.call("generate", prompt=self.prompt[: plan.input_len], count=plan.output_len)["times"]
        prefill = worker.call("generate", prompt=self.prompt, count=1)["times"]
        worker.pause()
        return {"ttft_s": times[0], "decode_s": times[-1] - times[0], "prefill_s": prefill[0]}

    def _leave_out(self, entry: Entry, error: PeerError) -> None:
        entry.error = str(error)
        _say(f"left out: {error}")
        if entry.worker is not None:
            entry.worker.close()


def equal_tokens(tokens: Sequence[int], ours: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, ours, strict=False)))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
