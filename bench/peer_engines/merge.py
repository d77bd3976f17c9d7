"""A result of some peers put into one of more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peer_engines.plan import Plan
from peer_engines.report import rows
from peer_engines.subjects import PEERS, SLIPSTREAM

SAME = ("model", "cpu", "threads")
_OF_A_PART = ("command", "date", "foreign_load", "disturbed", "quick")


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`new`, and from `old` the peers that `new` has not measured.

    `parts` says of these when and how they were measured. Raises ValueError if the two were not measured alike.
    """
    for name in SAME:
        if old[name] != new[name]:
            raise ValueError(f"the stored result has {name} {old[name]}, this one {new[name]}")
    plan, before = Plan(**new["plan"]), Plan(**old["plan"])
    if replace(before, pairs=plan.pairs, long_pairs=plan.long_pairs, slow_pairs=plan.slow_pairs) != plan:
        raise ValueError("the stored result has other lengths")
    measured = {subject["name"] for subject in new["subjects"] if subject["against"]}
    kept = [subject for subject in old["subjects"] if subject["against"] and subject["name"] not in measured]
    names = {subject["name"] for subject in kept}
    by_name = {subject["name"]: subject for subject in (*old["subjects"], *new["subjects"])}
    order = [
        subject.name
        for ours in SLIPSTREAM
        for subject in (ours, *(peer for peer in PEERS if peer.against == ours.name))
        if subject.name in by_name
    ]
    subjects = [by_name[name] for name in order]
    pairs = [*new["pairs"], *(pair for pair in old["pairs"] if pair["peer"] in names)]
    elder = {name for part in old.get("parts", ()) for name in part["peers"]}
    parts = [
        {**{name: part[name] for name in _OF_A_PART}, "peers": [name for name in part["peers"] if name in names]}
        for part in ({**old, "peers": sorted(names - elder)}, *old.get("parts", ()))
    ]
    parts = [part for part in parts if part["peers"]]
    return {
        **new,
        "parts": parts,
        "disturbed": new["disturbed"] or any(part["disturbed"] for part in parts),
        "quick": new["quick"] or any(part["quick"] for part in parts),
        "rows": rows(subjects, pairs, plan),
        "subjects": subjects,
        "pairs": pairs,
    }
