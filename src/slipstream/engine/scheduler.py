"""Who gets how many rows in the next step.

Running sequences that only need their next token get one row each, best rank first. What time is left under
`max_step_ms` goes to prompts: the oldest gets at least half of it, so that it always comes to an end, the shortest
remaining ones the rest. When pages run out, the worst-ranked sequence gives all of its back and is computed again
later.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from slipstream.cache.manager import CacheManager
from slipstream.engine.cost_model import UNIT_ROWS, CostModel, StepShape, attention_units, bundle_of
from slipstream.engine.sequence import Sequence, State

ALONE_FACTOR = 4.0
"""A step in which nobody waits for a next token may take this many times `max_step_ms`."""

MAX_SCORED_ROWS = 64
"""Prompt rows whose logits are wanted, per sequence and step: it bounds the memory of logits."""

_SAFETY = 0.9
_RUNNING = State.RUNNING


@dataclass(slots=True)
class Work:
    """Rows of one sequence in a step: its tokens from `sequence.computed` on."""

    sequence: Sequence
    rows: int


class Scheduler:
    """The waiting and the running, and the plan of each step. Only the engine thread touches it."""

    def __init__(
        self,
        cache: CacheManager,
        costs: CostModel,
        *,
        max_sequences: int,
        max_rows: int,
        max_step_ms: float,
        row_tile: int,
    ) -> None:
        self.cache = cache
        self.costs = costs
        self.max_sequences = max_sequences
        self.max_rows = max_rows
        self.max_step_ms = max_step_ms
        self.row_tile = row_tile
        self._bundle = bundle_of(row_tile)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence by rank."""
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=_rank)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever it was doing, and give its pages back."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            return
        sequence.state = State.FINISHED
        self.cache.release(sequence.pages)

    def schedule(self) -> list[Work]:
        """The next step's rows; pages for them are reserved. Empty when nothing can run."""
        if self.waiting:
            self._admit()
        plan: list[Work] = []
        prompts: list[Sequence] = []
        preempted = self.num_preemptions
        page_size = self.cache.page_size
        for sequence in self.running.copy():
            computed = sequence.computed
            remaining = len(sequence.tokens) - computed
            if remaining > 1:
                prompts.append(sequence)
            elif remaining == 1 and sequence.state is _RUNNING and len(plan) < self.max_rows:
                room = computed < sequence.pages.num_pages * page_size or self._make_room(sequence, 1)
                if room:
                    plan.append(Work(sequence, 1))
        if prompts and len(plan) < self.max_rows:
            self._add_prompts(plan, [sequence for sequence in prompts if sequence.state is _RUNNING])
        if self.num_preemptions == preempted:
            return plan
        # Making room for one has preempted another, which may have been planned before.
        return [work for work in plan if work.sequence.state is _RUNNING]

    def shape_of(self, plan: list[Work]) -> StepShape:
        """What the cost model needs to know of a plan."""
        rows = 0
        attention = 0.0
        for work in plan:
            rows += work.rows
            attention += attention_units(work.sequence.computed, work.rows, self._bundle)
        return StepShape(-(-rows // self.row_tile), attention)

    def _admit(self) -> None:
        index = 0
        while index < len(self.waiting):
            sequence = self.waiting[index]
            if self.cache.prefix_caching and sequence.held_up:
                index += 1
                continue
            if len(self.running) < self.max_sequences and self._start(sequence):
                del self.waiting[index]
                continue
            victim = self._worst(self.running)
            if victim is None or victim.request.priority <= sequence.request.priority:
                return
            self._preempt(victim)

    def _start(self, sequence: Sequence) -> bool:
        """Admit a sequence if the pages of its whole length are to be had, besides what was promised to others."""
        promised = sum(max(0, self._pages_held(other) - other.pages.num_held) for other in self.running)
        found = 0 if sequence.wants_scores else self.cache.match(sequence.pages, sequence.tokens)
        needed = self._pages_held(sequence) - sequence.pages.num_held
        if self.running and needed + promised > self.cache.num_available:
            self.cache.release(sequence.pages)
            return False
        sequence.computed = found
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = found
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=_rank)
        return True

    def _pages_held(self, sequence: Sequence) -> int:
        """The most pages that a sequence holds at once until its next token: with a window, those that a chunk sees."""
        pages = self.cache.pages_for(len(sequence.tokens) + 1)
        if self.cache.window:
            pages = min(pages, self.cache.pages_for(self.cache.window + self.max_rows) + 1)
        return pages

    def _make_room(self, sequence: Sequence, rows: int) -> bool:
        """Get pages for the next `rows` rows, at the cost of worse-ranked sequences. -> False: preempted itself."""
        while not self.cache.grow(sequence.pages, sequence.computed + rows):
            victim = self._worst(self.running)
            assert victim is not None
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.cache.release(sequence.pages)
        self.running.remove(sequence)
        sequence.computed = 0
        sequence.request.metrics.num_preemptions += 1
        self.num_preemptions += 1
        self.add(sequence)

    @staticmethod
    def _worst(sequences: list[Sequence]) -> Sequence | None:
        return sequences[-1] if sequences else None

    def _add_prompts(self, plan: list[Work], prompts: list[Sequence]) -> None:
        if not prompts:
            return
        shares = self._share(prompts, self._prompt_rows(plan, prompts))
        for sequence, rows in shares:
            if rows == 0 or sequence.state is not State.RUNNING:
                continue
            if self._make_room(sequence, rows):
                plan.append(Work(sequence, rows))

    def _prompt_rows(self, plan: list[Work], prompts: list[Sequence]) -> int:
        """The most prompt rows that keep the step under its time."""
        bound = self.max_step_ms * _SAFETY * (1.0 if plan else ALONE_FACTOR)
        low = UNIT_ROWS
        high = max(low, min(self.max_rows - len(plan), sum(_useful_rows(s) for s in prompts)))
        decoding = self.shape_of(plan)

        def fits(rows: int) -> bool:
            attention = sum(attention_units(s.computed, n, self._bundle) for s, n in self._share(prompts, rows) if n)
            tiles = -(-(len(plan) + rows) // self.row_tile)
            return self.costs.predict(StepShape(tiles, decoding.attention + attention)) <= bound

        while low < high:
            middle = (low + high + 1) // 2
            if fits(middle):
                low = middle
            else:
                high = middle - 1
        return min(low, self.max_rows - len(plan))

    @staticmethod
    def _share(prompts: list[Sequence], rows: int) -> list[tuple[Sequence, int]]:
        """Split rows over prompts, which come best rank first. The order of the result is that of `prompts`."""
        oldest, others = prompts[0], prompts[1:]
        shares = {id(oldest): min(_useful_rows(oldest), rows - rows // 2 if others else rows)}
        left = rows - shares[id(oldest)]
        for sequence in sorted(others, key=lambda s: s.remaining):
            shares[id(sequence)] = min(_useful_rows(sequence), left)
            left -= shares[id(sequence)]
        shares[id(oldest)] = min(_useful_rows(oldest), shares[id(oldest)] + left)
        return [(sequence, shares[id(sequence)]) for sequence in prompts]


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


def _useful_rows(sequence: Sequence) -> int:
    return min(sequence.remaining, MAX_SCORED_ROWS) if sequence.wants_scores else sequence.remaining
