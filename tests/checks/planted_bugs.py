"""Bugs planted on purpose, one at a time. Each must be caught by a check of the suite; one that survives is the suite's
fault.

A bug is a function that breaks the program through a `MonkeyPatch`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from slipstream.cache.manager import CacheManager, SequencePages
from slipstream.cache.pages import PagePool
from slipstream.cache.prefix_tree import Node, PrefixTree
from slipstream.core.batch import StepBatch
from slipstream.core.request import Request
from slipstream.devices.tiled_step import TiledStep
from slipstream.engine.core import Engine
from slipstream.engine.scheduler import Scheduler, Work
from slipstream.engine.sequence import Sequence as EngineSequence
from slipstream.engine.sequence import State
from slipstream.sampling import state as sampling_state
from slipstream.sampling.state import SequenceSampler
from slipstream.text.detokenizer import Detokenizer
from slipstream.text.stop_strings import StopStrings

Patch = pytest.MonkeyPatch
BUGS: dict[str, Callable[[Patch], None]] = {}


def bug(function: Callable[[Patch], None]) -> Callable[[Patch], None]:
    BUGS[function.__name__] = function
    return function


def _wrap(patch: Patch, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by one that gets the original first."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))


# --- pages and the prefix tree ---


@bug
def wrong_page(patch: Patch) -> None:
    """The last page of a long table is another sequence's."""

    def add(original: Any, self: StepBatch, pages: np.ndarray, context_len: int, adapter: int = 0) -> int:
        number: int = original(self, pages, context_len, adapter)
        if number > 1 and len(pages) > 2:
            self.page_table[number, 1] = self.page_table[number - 1, 0]
        return number

    _wrap(patch, StepBatch, "add_sequence", add)


@bug
def stale_page_table(patch: Patch) -> None:
    """A shorter table leaves the entries of the one before in use."""

    def add(original: Any, self: StepBatch, pages: np.ndarray, context_len: int, adapter: int = 0) -> int:
        return original(self, pages[: max(len(pages) - 1, 1)], context_len, adapter)

    _wrap(patch, StepBatch, "add_sequence", add)


@bug
def page_not_replaced(patch: Patch) -> None:
    """A page computed twice is freed, but its sequence goes on reading it."""
    patch.setattr(SequencePages, "replace", lambda self, index, page: None)


@bug
def reference_not_taken(patch: Patch) -> None:
    """A match does not count as a use."""

    def match(original: Any, self: CacheManager, pages: SequencePages, tokens: Sequence[int]) -> int:
        found: int = original(self, pages, tokens)
        for node in pages.nodes[:1]:
            node.refs -= 1
        return found

    _wrap(patch, CacheManager, "match", match)


@bug
def reference_kept(patch: Patch) -> None:
    """Releasing a path forgets its last node."""
    _wrap(patch, PrefixTree, "release", lambda original, self, nodes: original(self, nodes[:-1] or nodes[:0]))


@bug
def evicts_pages_in_use(patch: Patch) -> None:
    patch.setattr(PrefixTree, "_evictable", staticmethod(lambda node: node.attached and not node.children))

    def offer(self: PrefixTree, nodes: Sequence[Node]) -> None:
        for node in nodes:
            node.refs += 1
            self.num_unreferenced -= node.refs == 1
            self._offer(node)

    patch.setattr(PrefixTree, "acquire", offer)


@bug
def whole_prompt_matched(patch: Patch) -> None:
    """A prompt that is cached to its end leaves no row to sample from, so one page too many is taken as known."""

    def match(original: Any, self: CacheManager, pages: SequencePages, tokens: Sequence[int]) -> int:
        return original(self, pages, [*tokens, *([0] * (self.page_size if len(tokens) > 3 * self.page_size else 0))])

    _wrap(patch, CacheManager, "match", match)


@bug
def commits_too_early(patch: Patch) -> None:
    """The page that is being filled is put into the tree before it is full."""

    def commit(original: Any, self: CacheManager, pages: SequencePages, tokens: Sequence[int], computed: int) -> None:
        begun = -(-computed // self.page_size) * self.page_size
        original(self, pages, tokens, min(begun, len(tokens)))

    _wrap(patch, CacheManager, "commit", commit)


@bug
def salt_not_in_key(patch: Patch) -> None:
    _wrap(patch, SequencePages, "__init__", lambda original, self, namespace=None: original(self, None))


@bug
def key_is_last_token(patch: Patch) -> None:
    """Two pages that end alike are taken for the same."""

    def keys(original: Any, self: CacheManager, tokens: Sequence[int], first: int, last: int) -> Any:
        return ((key[-1],) for key in original(self, tokens, first, last))

    _wrap(patch, CacheManager, "_keys", keys)


@bug
def frees_window_too_early(patch: Patch) -> None:
    def free(original: Any, self: CacheManager, pages: SequencePages, length: int) -> None:
        original(self, pages, length + self.page_size)

    _wrap(patch, CacheManager, "free_behind_window", free)


@bug
def keeps_pages_of_window(patch: Patch) -> None:
    """Pages behind the window are forgotten, not freed."""

    def free(original: Any, self: CacheManager, pages: SequencePages, length: int) -> None:
        if self.window:
            keep = max(0, length - self.window + 1) // self.page_size
            pages.start = max(pages.start, min(keep, pages.num_pages))

    _wrap(patch, CacheManager, "free_behind_window", free)


@bug
def page_leaks_on_release(patch: Patch) -> None:
    def release(original: Any, self: CacheManager, pages: SequencePages) -> None:
        pages.num_pages = max(len(pages.nodes), pages.num_pages - 1)
        original(self, pages)

    _wrap(patch, CacheManager, "release", release)


@bug
def page_given_back_twice(patch: Patch) -> None:
    def give_back(original: Any, self: PagePool, page: int) -> None:
        original(self, page)
        if page % 5 == 0:
            self._free.append(page)

    _wrap(patch, PagePool, "give_back", give_back)


# --- rows ---


@bug
def off_by_one_position(patch: Patch) -> None:
    """Rows after the first of a chunk have the position before theirs."""

    def add(original: Any, self: StepBatch, sequence: int, tokens: Sequence[int], start: int, **rest: Any) -> None:
        original(self, sequence, tokens, start, **rest)
        if len(tokens) > 1:
            self.position[self.num_rows - 1] -= 1

    _wrap(patch, StepBatch, "add_rows", add)


@bug
def slot_of_next_row(patch: Patch) -> None:
    def add(original: Any, self: StepBatch, sequence: int, tokens: Sequence[int], start: int, **rest: Any) -> None:
        original(self, sequence, tokens, start, **rest)
        if start % self.page_size == 1:
            self.slot[self.num_rows - len(tokens)] -= 1

    _wrap(patch, StepBatch, "add_rows", add)


@bug
def padding_writes_real_page(patch: Patch) -> None:
    def tile(original: Any, self: TiledStep, batch: StepBatch, start: int, end: int, *rest: Any) -> Any:
        rows = original(self, batch, start, end, *rest)
        if end - start < self.row_tile:
            rows.sequence[-1], rows.slot[-1] = 1, batch.page_table[1, 0] * batch.page_size
        return rows

    _wrap(patch, TiledStep, "_tile", tile)


@bug
def last_tile_dropped(patch: Patch) -> None:
    """A step computes full tiles only when it has more than one."""

    def run(original: Any, self: TiledStep, batch: StepBatch) -> Any:
        kept, rows = batch.num_rows, batch.wants_logits[: batch.num_rows].sum()
        if kept > self.row_tile:
            batch.num_rows = kept - kept % self.row_tile
        logits = original(self, batch)
        batch.num_rows = kept
        return logits if len(logits) == rows else logits.new_zeros((int(rows), self.model.vocab_size))

    _wrap(patch, TiledStep, "run", run)


@bug
def logits_in_wrong_order(patch: Patch) -> None:
    _wrap(patch, TiledStep, "_head", lambda original, self, hidden: original(self, hidden).flip(0))


@bug
def chunk_loses_a_token(patch: Patch) -> None:
    """After a chunk one token more counts as computed than was."""

    def advance(original: Any, self: Engine, sequence: EngineSequence, rows: int, *rest: Any) -> None:
        more = 1 if rows > 2 and sequence.computed + rows + 1 < len(sequence.tokens) else 0
        sequence.computed += more
        original(self, sequence, rows, *rest)

    _wrap(patch, Engine, "_advance", advance)


# --- scheduling ---


@bug
def preempted_keeps_computed(patch: Patch) -> None:
    def preempt(original: Any, self: Scheduler, sequence: EngineSequence) -> None:
        computed = sequence.computed
        original(self, sequence)
        sequence.computed = computed

    _wrap(patch, Scheduler, "_preempt", preempt)


@bug
def preempted_loses_output(patch: Patch) -> None:
    def preempt(original: Any, self: Scheduler, sequence: EngineSequence) -> None:
        original(self, sequence)
        if sequence.num_output > 1:
            del sequence.tokens[-1]

    _wrap(patch, Scheduler, "_preempt", preempt)


@bug
def preempted_keeps_pages(patch: Patch) -> None:
    def preempt(original: Any, self: Scheduler, sequence: EngineSequence) -> None:
        release, self.cache.release = self.cache.release, lambda pages: None  # type: ignore[method-assign]
        try:
            original(self, sequence)
        finally:
            self.cache.release = release  # type: ignore[method-assign]

    _wrap(patch, Scheduler, "_preempt", preempt)


@bug
def abort_forgets_waiting(patch: Patch) -> None:
    """An abort reaches running sequences only."""

    def finish(original: Any, self: Scheduler, sequence: EngineSequence) -> None:
        if sequence.state is State.WAITING:
            return
        original(self, sequence)

    _wrap(patch, Scheduler, "finish", finish)


@bug
def abort_keeps_pages(patch: Patch) -> None:
    def abort(original: Any, self: Engine, request_id: str) -> Any:
        release, self.cache.release = self.cache.release, lambda pages: None  # type: ignore[method-assign]
        try:
            return original(self, request_id)
        finally:
            self.cache.release = release  # type: ignore[method-assign]

    _wrap(patch, Engine, "abort", abort)


@bug
def abort_first_choice_only(patch: Patch) -> None:
    def abort(original: Any, self: Engine, request_id: str) -> Any:
        active = self._active.get(request_id)
        if active is not None:
            active.sequences = active.sequences[:1]
        return original(self, request_id)

    _wrap(patch, Engine, "abort", abort)


@bug
def finishes_with_first_choice(patch: Patch) -> None:
    """A request of several choices ends when its first one does."""

    def finish(original: Any, self: Engine, update: Any) -> Any:
        active = self._active.get(update.request.id)
        if active is not None and active.sequences[0].state is State.FINISHED:
            for other in active.sequences:
                self.scheduler.finish(other)
        return original(self, update)

    _wrap(patch, Engine, "_finish_update", finish)


@bug
def long_prompt_starves(patch: Patch) -> None:
    """Rows go to the shortest prompts only."""

    def share(prompts: list[EngineSequence], rows: int) -> list[tuple[EngineSequence, int]]:
        shares = {}
        for sequence in sorted(prompts, key=lambda s: s.remaining):
            shares[id(sequence)] = min(sequence.remaining, rows)
            rows -= shares[id(sequence)]
        return [(sequence, shares[id(sequence)]) for sequence in prompts]

    patch.setattr(Scheduler, "_share", staticmethod(share))


@bug
def planned_twice(patch: Patch) -> None:
    """A sequence at its first token is planned among the decoding ones and among the prompts."""

    def schedule(original: Any, self: Scheduler) -> Any:
        plan = original(self)
        return plan + [Work(work.sequence, 1) for work in plan if work.rows == 1 and work.sequence.computed == 0]

    _wrap(patch, Scheduler, "schedule", schedule)


@bug
def cached_prompt_forgotten(patch: Patch) -> None:
    """A prompt that is cached but for its last token is planned nowhere."""

    def schedule(original: Any, self: Scheduler) -> Any:
        plan = original(self)
        return [w for w in plan if w.rows > 1 or w.sequence.num_output or not w.sequence.computed]

    _wrap(patch, Scheduler, "schedule", schedule)


@bug
def forgets_latest_use(patch: Patch) -> None:
    """Pages are dropped by when they were first used, not by when they were last."""

    def release(original: Any, self: PrefixTree, nodes: Sequence[Node]) -> Any:
        used = [node.last_used for node in nodes]
        freed = original(self, nodes)
        for node, before in zip(nodes, used, strict=True):
            node.last_used = before
        self._heap = [(node.last_used, tie, node) for _, tie, node in self._heap]
        heapq.heapify(self._heap)
        return freed

    _wrap(patch, PrefixTree, "release", release)


@bug
def ignores_step_time(patch: Patch) -> None:
    def rows(self: Scheduler, plan: list[Any], prompts: list[EngineSequence]) -> int:
        return min(self.max_rows - len(plan), sum(s.remaining for s in prompts))

    patch.setattr(Scheduler, "_prompt_rows", rows)


@bug
def ignores_priority(patch: Patch) -> None:
    def add(original: Any, self: Engine, request: Request) -> None:
        request.priority = 0
        original(self, request)

    _wrap(patch, Engine, "add", add)


# --- sampling ---


@bug
def noise_without_position(patch: Patch) -> None:
    patch.setattr(sampling_state, "row_key", lambda choice, position: (choice & 0xFFFFFFFF, choice >> 32))


@bug
def noise_without_choice(patch: Patch) -> None:
    _wrap(patch, sampling_state, "choice_key", lambda original, seed, index: original(seed, 0))


@bug
def noise_by_step(patch: Patch) -> None:
    """Noise follows the number of steps, which batching and preemption change."""
    calls = [0]

    def key(original: Any, choice: int, position: int) -> Any:
        calls[0] += 1
        return original(choice, calls[0])

    _wrap(patch, sampling_state, "row_key", key)


@bug
def seed_shared_by_requests(patch: Patch) -> None:
    _wrap(patch, sampling_state, "choice_key", lambda original, seed, index: original(1, index))


@bug
def penalty_misses_last_token(patch: Patch) -> None:
    """Penalties count the output without its latest token."""

    def commit(original: Any, self: SequenceSampler, tokens: Sequence[int]) -> None:
        counts = self._counts
        held = _LATE.get(id(self), [])
        self._counts = None
        original(self, tokens)
        self._counts = counts
        if counts is not None:
            for token in held:
                counts.add(token)
        _LATE[id(self)] = list(tokens)

    _LATE: dict[int, list[int]] = {}
    _wrap(patch, SequenceSampler, "commit", commit)


@bug
def penalty_forgotten_on_preemption(patch: Patch) -> None:
    def preempt(original: Any, self: Scheduler, sequence: EngineSequence) -> None:
        original(self, sequence)
        if sequence.sampler._counts is not None:
            sequence.sampler._counts._array[:, 1] = 0

    _wrap(patch, Scheduler, "_preempt", preempt)


@bug
def min_tokens_off_by_one(patch: Patch) -> None:
    def write(original: Any, self: SequenceSampler, batch: Any, drafted: Sequence[int], position: int) -> int:
        ends = self._ends
        if self.output_length + 1 >= self.params.min_tokens:
            self._ends = ends[:0]
        row: int = original(self, batch, drafted, position)
        self._ends = ends
        return row

    _wrap(patch, SequenceSampler, "write_row", write)


@bug
def bias_dropped(patch: Patch) -> None:
    def build(original: Any, self: SequenceSampler, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._bias_at, self._bias_value = self._bias_at[:1], self._bias_value[:1]

    _wrap(patch, SequenceSampler, "__init__", build)


@bug
def prompt_logprobs_shifted(patch: Patch) -> None:
    """A prompt token gets the logprob of the row after the one that predicts it."""

    def scored(original: Any, sequence: EngineSequence, start: int, end: int) -> range:
        found = original(sequence, start, end)
        return range(found.start, found.stop - 1) if len(found) > 2 else found

    original = Engine._scored
    patch.setattr(Engine, "_scored", staticmethod(lambda *args: scored(original, *args)))


@bug
def prompt_logprobs_from_cache(patch: Patch) -> None:
    """A request that wants prompt logprobs takes cached pages, whose rows are never computed."""
    patch.setattr(EngineSequence, "wants_scores", property(lambda self: False))


# --- ends and text ---


@bug
def one_token_too_many(patch: Patch) -> None:
    def add(original: Any, self: Engine, request: Request) -> None:
        request.max_tokens += 1
        original(self, request)

    _wrap(patch, Engine, "add", add)


@bug
def eos_ignored(patch: Patch) -> None:
    def build(original: Any, self: Engine, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.eos_ids = frozenset()

    _wrap(patch, Engine, "__init__", build)


@bug
def half_characters(patch: Patch) -> None:
    """Bytes are turned into text as they come."""

    def push(original: Any, self: Detokenizer, ids: Sequence[int]) -> str:
        return original(self, ids) + self.finish()

    _wrap(patch, Detokenizer, "push", push)


@bug
def stop_string_within_a_piece_only(patch: Patch) -> None:
    def push(original: Any, self: StopStrings, text: str) -> Any:
        fresh = StopStrings(_STOPS[id(self)][0], _STOPS[id(self)][1])
        sent, matched = original(fresh, text)
        return (sent, matched) if matched else (text, None)

    def build(original: Any, self: StopStrings, stops: Sequence[str], include: bool = False) -> None:
        original(self, stops, include)
        _STOPS[id(self)] = (list(stops), include)

    _STOPS: dict[int, tuple[list[str], bool]] = {}
    _wrap(patch, StopStrings, "__init__", build)
    _wrap(patch, StopStrings, "push", push)


@bug
def held_back_text_lost(patch: Patch) -> None:
    patch.setattr(Engine, "_rest_of_text", staticmethod(lambda sequence, delta: ""))


@bug
def stop_token_text_shown(patch: Patch) -> None:
    """The text of a stop token leaks into the answer."""
    original = Engine._text
    patch.setattr(
        Engine, "_text", staticmethod(lambda sequence, token, hidden: original(sequence, token, hidden=False))
    )
