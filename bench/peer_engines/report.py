"""From raw times to figures, and from figures to the table for a README."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from pairs import Pair, ratio

from slipstream.cli.bench_latency import spread

EQUAL_TOKENS = 8
"""Of a subject's first 16 greedy tokens, so many must be slipstream's."""
LOST_LOGPROB = 2.0
"""They may be this much less likely than slipstream's, in nats a token. Those of a broken model lose 5 and more."""
MEASURES = {"decode": "decode_s", "prefill": "prefill_s", "ttft": "ttft_s"}


def rows(
    subjects: Sequence[dict[str, Any]], pairs: Sequence[dict[str, Any]], plan: dict[str, int]
) -> list[dict[str, Any]]:
    """One row for each subject, slipstream (the first) included. A ratio is slipstream's speed over the peer's."""
    ours = subjects[0]
    return [_row(subject, ours, pairs, plan) for subject in subjects]


def _row(
    subject: dict[str, Any], ours: dict[str, Any], pairs: Sequence[dict[str, Any]], plan: dict[str, int]
) -> dict[str, Any]:
    described = subject["description"]
    row = {
        "name": subject["name"],
        "engine": subject["engine"],
        "version": described.get("version"),
        "format": subject["format"] or described.get("format"),
        "error": subject["error"],
        "flags": [] if subject["logprob"] is None else flags(subject, ours),
    }
    is_ours = subject is ours
    turns = [pair for pair in pairs if is_ours or pair["peer"] == subject["name"]]
    pieces = [(pair["slipstream"] if is_ours else pair["other"], pair["probes"]) for pair in turns]
    if not pieces:
        return row
    steps = plan["output_len"] - 1
    step_bytes = described["bytes_per_step"]
    # A piece of slipstream's lies between the first two probes of its pair, a peer's between the last two.
    shares = [
        step_bytes * steps / piece["decode_s"] / statistics.mean(probes[:2] if is_ours else probes[1:])
        for piece, probes in pieces
        if not Pair(1, 1, probes).disturbed
    ]
    row |= {
        "decode_tokens_per_s": spread(steps / piece["decode_s"] for piece, _ in pieces),
        "prefill_tokens_per_s": spread(plan["prefill_len"] / piece["prefill_s"] for piece, _ in pieces),
        "ttft_ms": spread(piece["ttft_s"] * 1e3 for piece, _ in pieces),
        "bandwidth_share": spread(shares),
    }
    if not is_ours:
        for name, key in MEASURES.items():
            values = [Pair(pair["other"][key], pair["slipstream"][key], pair["probes"]) for pair in turns]
            row[f"{name}_ratio"] = ratio(values)
    return row


def flags(subject: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """What is to be said of a subject's first tokens, beside slipstream's."""
    found = []
    if subject["equal_tokens"] < EQUAL_TOKENS:
        found.append("other tokens")
    if subject["logprob"] < ours["logprob"] - LOST_LOGPROB:
        found.append("unlikely tokens")
    return found


def table(result: dict[str, Any]) -> str:
    """The result in Markdown: a table, and below it what one has to know to judge it."""
    lines = [
        "| engine | version | format | decode, tok/s | of probed bandwidth | prefill, tok/s | first token, ms "
        "| Slipstream's decode speed over this one's (95 %) |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    lines += [_line(row) for row in result["rows"]]
    plan, foreign = result["plan"], result["foreign_load"]
    load = "is not known" if foreign is None else f"used {foreign:.0%} of the CPUs"
    probes = spread(probe / 1e9 for pair in result["pairs"] for probe in pair["probes"])
    lines += [
        "",
        f"{result['model']}, one stream, greedy: {plan['output_len']} tokens after a prompt of {plan['input_len']}; "
        f"prefill of {plan['prefill_len']}. {result['cpu']}, {result['threads']} threads, {result['date'][:10]}. "
        f"Medians of {plan['pairs']} pairs; the load of other processes {load}.",
    ]
    if probes["median"] is not None:
        lines[-1] += f" Memory read at {probes['median']:.1f} GB/s ({probes['min']:.1f} to {probes['max']:.1f})."
    if any(row["flags"] for row in result["rows"]):
        lines += [
            "",
            f"Other tokens: fewer than {EQUAL_TOKENS} of the first greedy tokens are Slipstream's; weights that were "
            f"rounded again may do that. Unlikely tokens: they are over {LOST_LOGPROB:.0f} nats a token less likely; "
            "the model is not run as it should.",
        ]
    lines += ["", f"Command: `{result['command']}`"]
    if result["quick"]:
        lines += ["", "**A quick run: it shows that the harness works, not how fast anything is.**"]
    if result["disturbed"]:
        lines += ["", "**Not valid: other processes disturbed the run.**"]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    name = row["engine"] + "".join(f" ({flag})" for flag in row["flags"])
    cells = [name, row["version"] or "-", row["format"] or "-"]
    if "decode_tokens_per_s" not in row:
        return _cells([*cells, f"not measured: {row['error']}", "-", "-", "-", "-"])
    share = row["bandwidth_share"]["median"]
    cells += [
        f"{row['decode_tokens_per_s']['median']:.1f}",
        "-" if share is None else f"{share:.0%}",
        f"{row['prefill_tokens_per_s']['median']:.0f}",
        f"{row['ttft_ms']['median']:.0f}",
        _ratio(row.get("decode_ratio")),
    ]
    if row["error"]:
        cells[-1] += f"; ended early: {row['error']}"
    return _cells(cells)


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _ratio(found: dict[str, Any] | None) -> str:
    """`0.42 (0.40 to 0.44), 9 pairs, 1 dropped`."""
    if found is None:
        return ""
    dropped = f", {found['dropped']} dropped" if found["dropped"] else ""
    if found["median"] is None:
        return f"no pair left{dropped}"
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f}), {found['pairs']} pairs{dropped}"
