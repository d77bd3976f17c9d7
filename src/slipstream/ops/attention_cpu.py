"""Paged attention as the CPU runs it on the PyTorch path: only what is asked for, in units of one fixed shape.

A unit is four rows of one sequence against one group of pages. Its shapes never change, so a row's bits do not depend
on the other rows; units are independent and run many at a time, which keeps the number of torch calls small.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.ops.attention import MASKED, PAGES_PER_GROUP, block_partials, clear_unseen, merge_blocks
from slipstream.ops.registry import implement

UNIT_ROWS = 4
UNITS_AT_ONCE = 32


def _bundles(sequence: list[int]) -> list[tuple[int, list[int]]]:
    """Rows of one sequence in bundles of at most four: (sequence, row indices)."""
    by_sequence: dict[int, list[int]] = {}
    for row, owner in enumerate(sequence):
        by_sequence.setdefault(owner, []).append(row)
    return [
        (owner, rows[i : i + UNIT_ROWS]) for owner, rows in by_sequence.items() for i in range(0, len(rows), UNIT_ROWS)
    ]


@implement("paged_attention", "CPU")
def paged_attention_cpu(
    query: Tensor, cache: Tensor, page_table: Tensor, sequence: Tensor, position: Tensor, scale: float, window: int
) -> Tensor:
    """See `slipstream.ops.attention.paged_attention`."""
    heads, width = query.shape[1:]
    groups, tokens = cache.shape[1], cache.shape[3]
    per_group = heads // groups
    table, owners, positions = page_table.numpy(), sequence.tolist(), position.tolist()
    span = PAGES_PER_GROUP * tokens

    bundles = _bundles(owners)
    padded = np.zeros((len(bundles), UNIT_ROWS), dtype=np.int64)
    unit_bundle: list[int] = []
    unit_start: list[int] = []
    unit_rank: list[int] = []
    unit_pages: list[np.ndarray] = []
    ranks = 1
    for index, (owner, rows) in enumerate(bundles):
        padded[index] = rows[0]
        padded[index, : len(rows)] = rows
        last = max(positions[row] for row in rows)
        first = max(0, min(positions[row] for row in rows) - window + 1) if window else 0
        for rank, group in enumerate(range(first // span, last // span + 1)):
            pages = np.zeros(PAGES_PER_GROUP, dtype=np.int64)
            held = table[owner, group * PAGES_PER_GROUP : (group + 1) * PAGES_PER_GROUP]
            pages[: len(held)] = held
            unit_bundle.append(index)
            unit_start.append(group * span)
            unit_rank.append(rank)
            unit_pages.append(pages)
            ranks = max(ranks, rank + 1)

    row_index = torch.from_numpy(padded)
    bundled = (query.float() * scale)[row_index.view(-1)].view(len(bundles), UNIT_ROWS, groups, per_group, width)
    bundled = bundled.transpose(1, 2).reshape(len(bundles), 1, groups, UNIT_ROWS * per_group, width)
    bundle_last = position[row_index.view(-1)].view(len(bundles), UNIT_ROWS, 1).expand(-1, -1, per_group)
    bundle_last = bundle_last.reshape(len(bundles), 1, 1, UNIT_ROWS * per_group, 1)

    # Every bundle gets a place for each rank; a bundle with fewer units has fully masked ones there, of weight zero.
    shape = (len(bundles), ranks, groups, UNIT_ROWS * per_group)
    maximum = torch.full((*shape, 1), MASKED)
    total, weighted = torch.zeros((*shape, 1)), torch.zeros((*shape, width))
    offsets = torch.arange(span).view(1, PAGES_PER_GROUP, 1, 1, tokens)
    for start in range(0, len(unit_bundle), UNITS_AT_ONCE):
        chosen = slice(start, start + UNITS_AT_ONCE)
        owner_index = torch.tensor(unit_bundle[chosen])
        rank_index = torch.tensor(unit_rank[chosen])
        count = len(owner_index)
        page_index = torch.from_numpy(np.concatenate(unit_pages[chosen]))
        kv = torch.index_select(cache, 0, page_index).float()
        where = offsets + torch.tensor(unit_start[chosen]).view(count, 1, 1, 1, 1)
        seen_to = bundle_last[owner_index]
        visible = where <= seen_to
        if window:
            visible &= where > seen_to - window
        asking = bundled[owner_index].expand(-1, PAGES_PER_GROUP, -1, -1, -1)
        merged = merge_blocks(*block_partials(asking, kv, visible))
        if not merged[2].sum().isfinite():
            merged = merge_blocks(*block_partials(asking, clear_unseen(kv, visible), visible))
        for target, part in zip((maximum, total, weighted), merged, strict=True):
            target[owner_index, rank_index] = part

    _, sum_total, sum_weighted = merge_blocks(maximum, total, weighted)
    result = (sum_weighted / sum_total).view(len(bundles), groups, UNIT_ROWS, per_group, width)
    result = result.transpose(1, 2).reshape(len(bundles) * UNIT_ROWS, heads, width)
    output = torch.empty_like(query)
    output[row_index.view(-1)] = result.to(query.dtype)
    return output
