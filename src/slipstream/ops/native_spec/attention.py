"""Attention of one row over its sequence's pages, in segments of 128 positions."""

from __future__ import annotations

import numpy as np

from slipstream.ops.native_spec.arithmetic import F32, I32, exp, fma, lanes_sum, largest
from slipstream.ops.native_spec.cache import Pages

SEGMENT = 128


def attend(
    query: F32, pages: Pages, page_table: I32, sequence: I32, position: I32, heads: int, scale: float, window: int = 0
) -> F32:
    """query [R, H * D], page_table [S, pages of a sequence], sequence and position [R] -> [R, H * D].

    A row sees positions (position - window, position] of its sequence, all up to its own if window is 0. Segments
    [128 * i, 128 * (i + 1)) that it sees anything of are folded in their order.
    """
    out = np.zeros_like(query)
    for row in range(len(query)):
        last = int(position[row])
        first = max(0, last - window + 1) if window else 0
        with np.errstate(all="ignore"):
            scaled = query[row].reshape(pages.heads, heads // pages.heads, -1) * np.float32(scale)
        state = None
        for start in range(first // SEGMENT * SEGMENT, last + 1, SEGMENT):
            where = np.arange(max(start, first), min(start + SEGMENT, last + 1), dtype=np.int32)
            table = page_table[sequence[row], where // pages.tokens]
            part = _segment(scaled, pages, table * pages.tokens + where % pages.tokens, where - start)
            state = part if state is None else _fold(state, part)
        assert state is not None
        with np.errstate(all="ignore"):
            out[row] = (state[2] * (np.float32(1) / state[1])[..., None]).reshape(-1)
    return out


Partial = tuple[F32, F32, F32]


def _segment(query: F32, pages: Pages, slot: I32, place: I32) -> Partial:
    """Maximum and sum [G, M] and weighted values [G, M, D] of the visible tokens of a segment.

    query [G, M, D] (scaled), slot and place in the segment [n]. Score: fma over the width ascending, then the key's
    scale. e = exp(score - maximum), summed over the segment's 128 places as `lanes_sum`; values by fma, places
    ascending, with weight e (times the value's scale).
    """
    keys, values, key_scales, value_scales = pages.read(slot)
    keys, values = keys.transpose(1, 2, 0), values.transpose(1, 0, 2)
    score = np.zeros((*query.shape[:2], len(slot)), np.float32)
    for d in range(query.shape[-1]):
        score = fma(query[..., d, None], keys[:, None, d], score)
    with np.errstate(all="ignore"):
        if pages.kind == "int8":
            score = score * key_scales.T[:, None]
        top = largest(score)
        e = exp(score - top[..., None])
        places = np.zeros((*e.shape[:2], SEGMENT), np.float32)
        places[..., place] = e
        weight = e * value_scales.T[:, None] if pages.kind == "int8" else e
    weighted = np.zeros(query.shape, np.float32)
    for t in range(len(slot)):
        weighted = fma(weight[..., t, None], values[:, None, t], weighted)
    return top, lanes_sum(places), weighted


def _fold(state: Partial, part: Partial) -> Partial:
    """Two neighbouring parts in one: each share is exp(its maximum - the larger of both)."""
    with np.errstate(all="ignore"):
        top = np.fmax(state[0], part[0])
        a, b = exp(state[0] - top), exp(part[0] - top)
        total = fma(state[1], a, part[1] * b)
        return top, total, fma(state[2], a[..., None], part[2] * b[..., None])
