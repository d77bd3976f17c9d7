"""Arrays that are kept from step to step hold what fresh ones would."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.cache.manager import SequencePages
from slipstream.core.batch import StepBatch
from slipstream.core.sampling_params import SamplingParams
from slipstream.sampling.batch import SamplingBatch
from slipstream.sampling.state import SequenceSampler

SIZE = 4
PAGES = 12


def step_batch() -> StepBatch:
    return StepBatch(max_rows=64, max_sequences=6, max_pages=PAGES, page_size=SIZE)


def fill(batch: StepBatch, steps: list[tuple[SequencePages, int, int]]) -> list[Any]:
    """What a step reads of a batch with these sequences: pages, first position and rows of each."""
    batch.clear()
    tables = []
    for pages, start, rows in steps:
        number = batch.add_sequence(pages.table, start + rows)
        batch.add_rows(number, list(range(start + 7, start + 7 + rows)), start, wants_logits=rows == 1)
        tables.append(batch.page_table[number, : pages.num_pages].tolist())
    rows = batch.num_rows
    fields = (batch.token, batch.position, batch.sequence, batch.slot, batch.wants_logits)
    return [tables, batch.context_len[1 : batch.num_sequences + 1].tolist(), *(f[:rows].tolist() for f in fields)]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_batch_used_again_holds_what_a_fresh_one_does(data: st.DataObject) -> None:
    kept = step_batch()
    sequences = [SequencePages() for _ in range(5)]
    page = iter(range(1, 10_000))
    for _ in range(data.draw(st.integers(1, 6))):
        for pages in sequences:
            change = data.draw(st.sampled_from(["nothing", "nothing", "append", "replace", "clear"]))
            if (change == "append" or not pages.num_pages) and pages.num_pages < PAGES:
                pages.append(next(page))
            elif change == "replace":
                pages.replace(data.draw(st.integers(0, pages.num_pages - 1)), next(page))
            elif change == "clear":
                pages.clear()
                pages.append(next(page))
        order = data.draw(st.permutations(sequences))[: data.draw(st.integers(1, 5))]
        steps = []
        for pages in order:
            rows = data.draw(st.sampled_from([1, 1, 1, 3]))
            steps.append((pages, pages.num_pages * SIZE - rows, rows))
        assert fill(kept, steps) == fill(step_batch(), steps)


def sampler(kind: str, seed: int) -> SequenceSampler:
    params: dict[str, Any] = {
        "greedy": {"temperature": 0},
        "plain": {"top_p": 0.9},
        "allowed": {"allowed_token_ids": [1, 2], "min_p": 0.1},
        "bias": {"logit_bias": {3: 1.5}, "top_k": 4},
        "scored": {"prompt_logprobs": 2},
        "grammar": {"logprobs": 1},
    }[kind]
    return SequenceSampler(SamplingParams(**params), prompt_ids=[1, 2], vocab_size=40, seed=seed)


def write(batch: SamplingBatch, rows: list[tuple[str, SequenceSampler]]) -> list[Any]:
    batch.clear()
    for kind, sequence in rows:
        if kind == "scored":
            sequence.write_score_row(batch, 5)
        mask = np.array([1, 2], np.int32) if kind == "grammar" else None
        sequence.write_row(batch, (), sequence.prompt_length + sequence.output_length, mask)
    *lists, grammar, num_top = batch.tensors()
    masks = [] if grammar is None else [grammar[row].tolist() for row in range(len(grammar)) if lists[1][row, 5]]
    return [*(entries.tolist() for entries in lists), masks, num_top]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_sampling_rows_written_again_hold_what_fresh_ones_do(data: st.DataObject) -> None:
    kept = SamplingBatch(40)
    kinds = ["greedy", "plain", "allowed", "bias", "scored", "grammar", "plain", "greedy"]
    known = [(kind, sampler(kind, seed)) for seed, kind in enumerate(kinds)]
    for _ in range(data.draw(st.integers(1, 6))):
        rows = data.draw(st.permutations(known))[: data.draw(st.integers(1, len(known)))]
        if data.draw(st.booleans()):
            rows = rows * 20  # more rows than there is room for at first
        assert write(kept, rows) == write(SamplingBatch(40), rows)
        for _, sequence in known[::2]:
            sequence.commit((data.draw(st.integers(0, 39)),))
