"""Paged attention as the CPU runs it on the PyTorch path: only what is asked for, in units of one fixed shape.

A unit is four rows of one sequence against one group of pages. Its shapes never change, so a row's bits do not depend
on the other rows; units are independent and run many at a time, which keeps the number of torch calls small.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slipstream.ops.attention import MASKED, PAGES_PER_GROUP, block_partials, clear_unseen, merge_blocks
from slipstream.ops.fixed import exp
from slipstream.ops.registry import implement

UNIT_ROWS = 4
UNITS_AT_ONCE = 8
"""Enough to keep torch calls few, and few enough for what they gather to stay in the processor's cache."""


def _bundles(sequence: list[int]) -> list[tuple[int, list[int]]]:
    """Rows of one sequence in bundles of at most four: (sequence, row indices)."""
    by_sequence: dict[int, list[int]] = {}
    for row, owner in enumerate(sequence):
        by_sequence.setdefault(owner, []).append(row)
    return [
        (owner, rows[i : i + UNIT_ROWS]) for owner, rows in by_sequence.items() for i in range(0, len(rows), UNIT_ROWS)
    ]


@dataclass(slots=True)
class _Units:
    """Which bundle meets which group of pages: one entry per unit, in the order of the groups of each bundle."""

    bundle: list[int] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    pages: list[np.ndarray] = field(default_factory=list)
    masked: list[bool] = field(default_factory=list)


def _units(
    bundles: list[tuple[int, list[int]]], position: list[int], table: np.ndarray, span: int, window: int
) -> _Units:
    units = _Units()
    for index, (owner, rows) in enumerate(bundles):
        first_row, last_row = position[rows[0]], position[rows[0]]
        for row in rows:
            first_row, last_row = min(first_row, position[row]), max(last_row, position[row])
        first = max(0, first_row - window + 1) if window else 0
        for rank, group in enumerate(range(first // span, last_row // span + 1)):
            pages = table[owner, group * PAGES_PER_GROUP : (group + 1) * PAGES_PER_GROUP]
            if len(pages) < PAGES_PER_GROUP:
                pages = np.pad(pages, (0, PAGES_PER_GROUP - len(pages)))
            units.bundle.append(index)
            units.rank.append(rank)
            units.start.append(group * span)
            units.pages.append(pages)
            units.masked.append(
                (group + 1) * span > first_row + 1 or (window > 0 and group * span <= last_row - window)
            )
    return units


def _merge_group(maximum: Tensor, total: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `merge_blocks` for the fixed number of blocks in a group, adding halves: fewer calls, still one order."""
    highest = maximum.amax(1)
    share = exp(maximum - highest[:, None])
    total, weighted = total * share, weighted * share
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total, weighted = total[:, :half] + total[:, half:], weighted[:, :half] + weighted[:, half:]
    return highest, total[:, 0], weighted[:, 0]


@implement("paged_attention", "CPU")
def paged_attention_cpu(
    query: Tensor, cache: Tensor, page_table: Tensor, sequence: Tensor, position: Tensor, scale: float, window: int
) -> Tensor:
    """See `slipstream.ops.attention.paged_attention`."""
    heads, width = query.shape[1:]
    groups, tokens = cache.shape[1], cache.shape[3]
    per_group = heads // groups
    span = PAGES_PER_GROUP * tokens
    bundles = _bundles(sequence.tolist())
    units = _units(bundles, position.tolist(), page_table.numpy(), span, window)

    row_index = torch.tensor([(rows + rows[:1] * UNIT_ROWS)[:UNIT_ROWS] for _, rows in bundles]).view(-1)
    bundled = (query.float() * scale)[row_index].view(len(bundles), UNIT_ROWS, groups, per_group, width)
    bundled = bundled.transpose(1, 2).reshape(len(bundles), 1, groups, UNIT_ROWS * per_group, width)
    seen_to = position[row_index].view(len(bundles), UNIT_ROWS, 1).expand(-1, -1, per_group)
    seen_to = seen_to.reshape(len(bundles), 1, 1, UNIT_ROWS * per_group, 1)

    # Every bundle gets a place for each rank; a bundle with fewer units has fully masked ones there, of weight zero.
    shape = (len(bundles), max(units.rank) + 1, groups, UNIT_ROWS * per_group)
    maximum = torch.full((*shape, 1), MASKED)
    total, weighted = torch.zeros((*shape, 1)), torch.zeros((*shape, width))
    offsets = torch.arange(span).view(1, PAGES_PER_GROUP, 1, 1, tokens)
    for begin in range(0, len(units.bundle), UNITS_AT_ONCE):
        chosen = slice(begin, begin + UNITS_AT_ONCE)
        bundle, rank = torch.tensor(units.bundle[chosen]), torch.tensor(units.rank[chosen])
        kv = torch.index_select(cache, 0, torch.from_numpy(np.concatenate(units.pages[chosen]))).float()
        visible = None
        if any(units.masked[chosen]):
            where = offsets + torch.tensor(units.start[chosen]).view(-1, 1, 1, 1, 1)
            visible = where <= seen_to[bundle]
            if window:
                visible &= where > seen_to[bundle] - window
        asking = bundled[bundle].expand(-1, PAGES_PER_GROUP, -1, -1, -1)
        merged = _merge_group(*block_partials(asking, kv, visible))
        if visible is not None and not merged[2].sum().isfinite():
            merged = _merge_group(*block_partials(asking, clear_unseen(kv, visible), visible))
        for target, part in zip((maximum, total, weighted), merged, strict=True):
            target[bundle, rank] = part

    _, sum_total, sum_weighted = merge_blocks(maximum, total, weighted)
    result = (sum_weighted / sum_total).view(len(bundles), groups, UNIT_ROWS, per_group, width)
    result = result.transpose(1, 2).reshape(len(bundles) * UNIT_ROWS, heads, width)
    output = torch.empty_like(query)
    output[row_index] = result.to(query.dtype)
    return output
