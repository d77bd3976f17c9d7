"""From the answers of `bench serve` to figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.cli.percentiles import distribution
from slipstream.cli.serve_stream import REJECTED, Answer
from slipstream.core.errors import ConfigError

Goals = Mapping[str, float]
"""Limits in ms that a good request keeps, by vLLM's names."""

_MEASURES: dict[str, Callable[[Answer], float]] = {
    "ttft": lambda answer: answer.ttft,
    "itl": lambda answer: max(answer.inter_token(), default=0.0),
    "tpot": lambda answer: answer.tpot or 0.0,
    "e2el": lambda answer: answer.e2e,
}


def parse_goals(texts: Sequence[str]) -> Goals:
    """Limits from texts such as `ttft:500`. Raises ConfigError."""
    goals: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            value = float(limit)
        except ValueError:
            value = 0.0
        if name not in _MEASURES or not value > 0:
            raise ConfigError(
                f"--goodput: {text!r} is not a limit; write {', '.join(_MEASURES)} and milliseconds, such as ttft:500",
                param="goodput",
            )
        if name in goals:
            raise ConfigError(f"--goodput: {name} is given twice", param="goodput")
        goals[name] = value
    return goals


def summarise(answers: Sequence[Answer], seconds: float, goals: Goals) -> dict[str, Any]:
    """Counts and rates over `seconds`, and percentiles over the requests that were answered in full."""
    good = [answer for answer in answers if answer.failure is None]
    rejected = sum(answer.failure == REJECTED for answer in answers)
    pieces = sum(len(answer.times) for answer in good)
    output = sum(answer.tokens for answer in good)
    prompt = _total(answer.prompt_tokens for answer in good)
    return {
        "seconds": seconds,
        "requests": len(answers),
        "completed": len(good),
        "rejected": rejected,
        "failed": len(answers) - len(good) - rejected,
        "failures": _failures(answers),
        "requests_per_s": len(good) / seconds,
        "prompt_tokens": prompt,
        "cached_prompt_tokens": _total(answer.cached_tokens for answer in good),
        "output_tokens": output,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": None if prompt is None else (prompt + output) / seconds,
        "without_usage": sum(answer.output_tokens is None for answer in good),
        "tokens_per_chunk": output / pieces if pieces else None,
        "ttft_ms": distribution((answer.ttft for answer in good), scale=1e3),
        "itl_ms": distribution((gap for answer in good for gap in answer.inter_token()), scale=1e3),
        "chunk_gap_ms": distribution((gap for answer in good for gap in answer.gaps), scale=1e3),
        "tpot_ms": distribution((a.tpot for a in good if a.tpot is not None), scale=1e3),
        "e2el_ms": distribution((answer.e2e for answer in good), scale=1e3),
        "mean_concurrency": sum(answer.e2e for answer in good) / seconds,
        "goodput": _goodput(good, len(answers), seconds, goals) if goals else None,
    }


def _total(counts: Any) -> int | None:
    """The sum; None unless every request has a count."""
    known = list(counts)
    return None if not known or None in known else sum(known)


def _failures(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Reasons by how often they came, each with the first message."""
    counts = Counter(answer.failure for answer in answers if answer.failure is not None)
    first: dict[str | None, str] = {}
    for answer in answers:
        if answer.detail:
            first.setdefault(answer.failure, answer.detail)
    return [
        {"reason": reason, "count": count, "first": first.get(reason, "")} for reason, count in counts.most_common()
    ]


def _goodput(good: Sequence[Answer], asked: int, seconds: float, goals: Goals) -> dict[str, Any]:
    kept = sum(all(_MEASURES[name](answer) * 1e3 <= limit for name, limit in goals.items()) for answer in good)
    return {"goals_ms": dict(goals), "requests_per_s": kept / seconds, "share": kept / asked}
