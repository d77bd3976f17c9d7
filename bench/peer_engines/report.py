"""From raw times to figures, and from figures to the table for a README."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from pairs import Pair, ratio, undisturbed

from peer_engines.plan import Plan
from slipstream.cli.bench_latency import spread

EQUAL_TOKENS = 8
"""Of a subject's first 16 greedy tokens, so many must be slipstream's."""
LOST_LOGPROB = 2.0
"""They may be this much less likely than slipstream's, in nats a token. Those of a broken model lose 5 and more."""


def rows(subjects: Sequence[dict[str, Any]], pairs: Sequence[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    """One row for each subject, in their order. A ratio is slipstream's speed over the peer's, on the same pairs."""
    known = {subject["name"]: subject for subject in subjects}
    return [_row(subject, known.get(subject["against"]), pairs, plan) for subject in subjects]


def _row(
    subject: dict[str, Any], ours: dict[str, Any] | None, pairs: Sequence[dict[str, Any]], plan: Plan
) -> dict[str, Any]:
    """`ours`: the slipstream that a peer is set against, None for slipstream itself."""
    described = subject["description"]
    row = {
        "name": subject["name"],
        "engine": subject["engine"],
        "against": subject["against"],
        "version": described.get("version"),
        "format": subject["format"],
        "error": subject["error"],
        "flags": [] if ours is None or subject["logprob"] is None else flags(subject, ours),
    }
    is_ours = ours is None
    turns = [pair for pair in pairs if pair["against" if is_ours else "peer"] == subject["name"]]
    if not turns:
        return row
    side = "slipstream" if is_ours else "other"
    for name, tokens in plan.tokens.items():
        row[f"{name}_tokens_per_s"] = spread(tokens / pair[side][name] for pair in turns if name in pair[side])
    row["ttft_ms"] = spread(pair[side]["ttft"] * 1e3 for pair in turns)
    for name, step_bytes in zip(plan.decodes, described["bytes_per_step"], strict=True):
        # A turn of slipstream's lies between the first two probes of its pair, a peer's between the last two.
        row[f"{name}_bandwidth_share"] = undisturbed(
            (
                step_bytes
                * plan.tokens[name]
                / pair[side][name]
                / statistics.mean(pair["probes"][:2] if is_ours else pair["probes"][1:]),
                Pair(1, 1, pair["probes"]).disturbed,
            )
            for pair in turns
        )
    if not is_ours:
        for name in (*plan.tokens, "ttft"):
            both = [pair for pair in turns if name in pair["other"] and name in pair["slipstream"]]
            if both:
                row[f"{name}_ratio"] = ratio(
                    [Pair(pair["other"][name], pair["slipstream"][name], pair["probes"]) for pair in both]
                )
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
    plan, foreign = Plan(**result["plan"]), result["foreign_load"]
    decoded, filled = f"{plan.short_len} / {plan.input_len}", f"{plan.input_len:,} / {plan.long_len:,}"
    lines = [
        f"| engine | format | decode after {decoded}, tok/s | of the memory limit (95 %) | prefill of {filled}, tok/s "
        "| Slipstream's speed over this one's: decode (95 %) | prefill (95 %) |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    lines += [_line(row, plan) for row in result["rows"]]
    load = "is not known" if foreign is None else f"used {foreign:.0%} of the CPUs"
    probes = spread(probe / 1e9 for pair in result["pairs"] for probe in pair["probes"])
    versions = dict.fromkeys(f"{row['engine']} {row['version']}" for row in result["rows"] if row["version"])
    lines += [
        "",
        f"{result['model']} (Q4_1) and the same rounded again, one stream, greedy, {plan.output_len} tokens. "
        f"{result['cpu']}, {result['threads']} threads, {result['date'][:10]}. Medians of up to {plan.pairs} pairs, "
        f"{min(plan.long_pairs, plan.pairs)} for {plan.long_len:,} tokens, {min(plan.slow_pairs, plan.pairs)} beside "
        "transformers; llama.cpp beside Slipstream on the same file, the others beside Slipstream on the Q4_1 file. "
        f"The load of other processes {load}.",
    ]
    if probes["median"] is not None:
        lines[-1] += f" Memory read at {probes['median']:.1f} GB/s ({probes['min']:.1f} to {probes['max']:.1f})."
    if versions:
        lines[-1] += f" Versions: {', '.join(versions)}."
    if any(row["flags"] for row in result["rows"]):
        lines += [
            "",
            f"Other tokens: fewer than {EQUAL_TOKENS} of the first greedy tokens are Slipstream's. Unlikely tokens: "
            f"they are over {LOST_LOGPROB:.0f} nats a token less likely; the model is not run as it should.",
        ]
    lines += ["", f"Command: `{result['command']}`"]
    lines += [
        f"{', '.join(part['peers'])}: `{part['command']}`, {part['date'][:10]}" for part in result.get("parts", ())
    ]
    if result["quick"]:
        lines += ["", "**A quick run: it shows that the harness works, not how fast anything is.**"]
    if result["disturbed"]:
        lines += ["", "**Not valid: other processes disturbed the run.**"]
    return "\n".join(lines)


def _line(row: dict[str, Any], plan: Plan) -> str:
    name = row["engine"] + "".join(f" ({flag})" for flag in row["flags"])
    cells = [name, row["format"]]
    if "ttft_ms" not in row:
        return _cells([*cells, f"not measured: {row['error'] or 'no pair'}", "-", "-", "-", "-"])
    cells += [
        " / ".join(_figure(row[f"{name}_tokens_per_s"], ".1f") for name in plan.decodes),
        " / ".join(_share(row[f"{name}_bandwidth_share"]) for name in plan.decodes),
        " / ".join(_figure(row[f"{name}_tokens_per_s"], ".0f") for name in plan.prefills),
        *(_ratios(row, names) for names in (plan.decodes, plan.prefills)),
    ]
    if row["error"]:
        cells[-1] += f"; ended early: {row['error']}"
    return _cells(cells)


def _figure(figures: dict[str, Any], form: str) -> str:
    return "-" if figures["median"] is None else format(figures["median"], form)


def _share(found: dict[str, Any]) -> str:
    """`81% (79 to 83)`."""
    if found["median"] is None:
        return "-"
    return f"{found['median']:.0%} ({found['low'] * 100:.0f} to {found['high'] * 100:.0f})"


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _ratios(row: dict[str, Any], names: Sequence[str]) -> str:
    """`0.42 (0.40 to 0.44) / 0.50 (0.49 to 0.51), 1 dropped`; nothing for slipstream itself."""
    found = [row[f"{name}_ratio"] for name in names if f"{name}_ratio" in row]
    texts = [
        "no pair left" if one["median"] is None else f"{one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
        for one in found
    ]
    dropped = max((one["dropped"] for one in found), default=0)
    return " / ".join(texts) + (f", {dropped} dropped" if dropped else "")
