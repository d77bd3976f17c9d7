"""Causal attention over paged keys and values: the reference that any chip can lower.

Each page of a row's context is one block: it gives the block's maximum, its sum of exponentials and its weighted
values; the blocks are then merged in their order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.ops.fixed import exp
from slipstream.ops.registry import define

MASKED = -1.0e30
"""Score of a position that a row may not see: its exponential against any real maximum is exactly zero."""

PAGES_PER_GROUP = 8
"""Blocks computed by one call. It bounds memory and fixes shapes; blocks are still merged one by one in order."""


def block_partials(query: Tensor, kv: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Each block's own maximum, sum of exponentials and weighted values.

    query [N, B, G, M, D] (already scaled; B blocks may share it by expansion), kv [N * B, G, 2, T, D] float32,
    visible [N, B, 1, M, T] bool (None: all)
    -> maximum [N, B, G, M, 1], sum [N, B, G, M, 1], weighted [N, B, G, M, D], all float32.
    """
    n, blocks, groups, rows, width = query.shape
    tokens = kv.shape[3]
    flat = (n * blocks * groups,)
    keys, values = kv.view(*flat, 2, tokens, width).unbind(1)
    scores = torch.bmm(query.reshape(*flat, rows, width), keys.transpose(1, 2))
    scores = scores.view(n, blocks, groups, rows, tokens)
    if visible is not None:
        scores = torch.where(visible, scores, MASKED)
    maximum = scores.amax(-1, keepdim=True)
    weights = exp(scores - maximum)
    total = weights.sum(-1, keepdim=True)
    weighted = torch.bmm(weights.view(*flat, rows, tokens), values)
    return maximum, total, weighted.view(n, blocks, groups, rows, width)


def clear_unseen(kv: Tensor, visible: Tensor) -> Tensor:
    """`kv` with zeros where no row looks; shapes as in `block_partials`.

    A page may still hold the NaN of a request that failed, and zero times NaN is NaN.
    """
    seen = visible.any(-2)
    return torch.where(seen.view(-1, 1, 1, seen.shape[-1], 1), kv, 0.0)


def merge_blocks(maximum: Tensor, total: Tensor, weighted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Merge partials along dimension 1 in its order -> the same three without that dimension.

    A wholly masked block has weight exactly zero, so that it changes no bit of the sums.
    """
    highest = maximum.amax(1)
    share = exp(maximum - highest[:, None])
    total, weighted = total * share, weighted * share
    sum_total, sum_weighted = total[:, 0], weighted[:, 0]
    for block in range(1, maximum.shape[1]):
        sum_total = sum_total + total[:, block]
        sum_weighted = sum_weighted + weighted[:, block]
    return highest, sum_total, sum_weighted


def _fake(
    query: Tensor,
    cache: Tensor,
    page_table: Tensor,
    sequence: Tensor,
    position: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    return torch.empty_like(query)


@define(
    "paged_attention(Tensor query, Tensor cache, Tensor page_table, Tensor sequence, Tensor position, float scale, "
    "int window) -> Tensor",
    fake=_fake,
)
def paged_attention(
    query: Tensor, cache: Tensor, page_table: Tensor, sequence: Tensor, position: Tensor, scale: float, window: int
) -> Tensor:
    """Softmax attention (Vaswani et al., 2017) with grouped heads: each row over its own sequence, up to its own place.

    query [R, H, D]; cache [P, G, 2, T, D]; page_table [S, pages] (page of each T tokens; 0 where there is none);
    sequence and position [R]. A row sees positions in (position - window, position], all up to its own when window is
    0. -> [R, H, D] in query's dtype; computed in float32.
    """
    rows, heads, width = query.shape
    groups, tokens = cache.shape[1], cache.shape[3]
    scaled = (query.float() * scale).view(rows, 1, groups, heads // groups, width)
    partials = []
    for start in range(0, page_table.shape[1], PAGES_PER_GROUP):
        pages = page_table[:, start : start + PAGES_PER_GROUP][sequence]
        blocks = pages.shape[1]
        kv = torch.index_select(cache, 0, pages.reshape(-1)).float()
        where = torch.arange(start * tokens, (start + blocks) * tokens, device=query.device)
        where = where.view(1, blocks, 1, 1, tokens)
        last = position.view(rows, 1, 1, 1, 1)
        visible = where <= last
        if window:
            visible = visible & (where > last - window)
        kv = clear_unseen(kv, visible)
        expanded = scaled.expand(rows, blocks, groups, heads // groups, width)
        partials.append(block_partials(expanded, kv, visible))
    maximum, total, weighted = (torch.cat(part, dim=1) for part in zip(*partials, strict=True))
    _, total, weighted = merge_blocks(maximum, total, weighted)
    return (weighted / total).view(rows, heads, width).to(query.dtype)
