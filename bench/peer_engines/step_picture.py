"""The picture of a step's time over its rows: an SVG that can be read on light and dark pages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "step_rows.svg"
_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 56, 56
_STYLE = """
    text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }
    .title { font-size: 16px; font-weight: 600; }
    .small { font-size: 12px; fill: #59636e; }
    .grid { stroke: #d1d9e0; stroke-width: 1; }
    .ours { stroke: #0969da; fill: #0969da; }
    .peer { stroke: #bc4c00; fill: #bc4c00; }
    .limit { stroke: #59636e; fill: #59636e; }
    path { fill: none !important; stroke-width: 2.5; stroke-linejoin: round; }
    path.limit { stroke-width: 1.5; stroke-dasharray: 6 4; }
    text.ours, text.peer, text.limit { stroke: none; font-weight: 600; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc; }
      .small { fill: #9198a1; }
      .grid { stroke: #3d444d; }
      .ours { stroke: #58a6ff; fill: #58a6ff; }
      .peer { stroke: #f0883e; fill: #f0883e; }
      .limit { stroke: #9198a1; fill: #9198a1; }
    }
"""


def picture(result: dict[str, Any], kind: str) -> str:
    """The SVG of one format of a result of bench/step_rows.py, at the context where llama.cpp was timed."""
    found, context = result["formats"][kind], str(result["compared_at"])
    ours = {int(rows): one["ms"]["median"] for rows, one in found["ours"][context].items()}
    theirs = {int(rows): one["ms"]["median"] for rows, one in found["llama_cpp"].items()}
    limit = found["limit_ms"][context]
    widest = max(ours)
    ticks = _ticks(max(*ours.values(), *theirs.values()))

    def x(rows: float) -> float:
        return _LEFT + rows / widest * (_WIDTH - _LEFT - _RIGHT)

    def y(ms: float) -> float:
        return _HEIGHT - _BOTTOM - ms / ticks[-1] * (_HEIGHT - _TOP - _BOTTOM)

    title = f"Milliseconds of a step over its rows ({kind}, context {context}, {result['threads']} threads)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">',
        f"  <title>{title}</title>",
        f"  <style>{_STYLE}  </style>",
        f'  <text class="title" x="{_LEFT - 40}" y="28">{title}</text>',
    ]
    for tick in ticks:
        parts.append(
            f'  <line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        )
        parts.append(
            f'  <text class="small" x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g} ms</text>'
        )
    for rows in ours:
        parts.append(
            f'  <text class="small" x="{x(rows):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{rows}</text>'
        )
    parts.append(
        f'  <text class="small" x="{x(widest / 2):.1f}" y="{_HEIGHT - 12}" text-anchor="middle">'
        "rows of one sequence, all with logits</text>"
    )
    ends = _apart([y(limit), y(ours[widest]), y(theirs[widest])])
    parts.append(f'  <path class="limit" d="M{x(0):.1f} {y(limit):.1f} H{x(widest):.1f}"/>')
    for name, times in (("peer", theirs), ("ours", ours)):
        points = " L".join(f"{x(rows):.1f} {y(ms):.1f}" for rows, ms in times.items())
        parts.append(f'  <path class="{name}" d="M{points}"/>')
        parts += [f'  <circle class="{name}" cx="{x(r):.1f}" cy="{y(ms):.1f}" r="3"/>' for r, ms in times.items()]
    labels = (("limit", "memory limit"), ("ours", "Slipstream"), ("peer", "llama.cpp"))
    for (name, label), end in zip(labels, ends, strict=True):
        parts.append(f'  <text class="{name}" x="{x(widest) + 10:.1f}" y="{end + 5:.1f}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _ticks(highest: float) -> list[float]:
    """Round numbers from 0 to just above the highest value, at most eight."""
    step = 10 ** math.floor(math.log10(highest))
    for part in (0.2, 0.5, 1.0, 2.0):
        count = math.ceil(highest / (step * part))
        if count <= 7:
            return [round(step * part * i, 6) for i in range(count + 1)]
    raise AssertionError


def _apart(heights: Sequence[float], least: float = 18.0) -> list[float]:
    """Heights of labels, moved up where they would touch the one below."""
    order = sorted(range(len(heights)), key=lambda i: -heights[i])
    placed = list(heights)
    for lower, upper in itertools.pairwise(order):
        placed[upper] = min(placed[upper], placed[lower] - least)
    return placed
