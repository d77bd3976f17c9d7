"""Time of one step over its rows, ours and llama.cpp's: `python bench/step_rows.py`. Two to three minutes.

The rows belong to one sequence and all want logits, as when a draft is checked. Ours is one call of the native program
(`ms`: as the engine calls it; `raw_ms`: the library's part), llama.cpp's one `llama_decode`. In each round every format
is timed for all rows and contexts in turns, ours and llama.cpp's one after the other, a memory probe before, between
and after. `over_one_row` is the ratio to a step of one row in the same round; `limit_ms` is what reading the weights
and the context's keys and values would take at the probed bandwidth.

Results go to bench/results/step_rows.json, the picture of one format to docs/pictures/step_rows.svg.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conditions import RESULTS, conditions, finish
from pairs import Pair, interval, ratio, undisturbed
from peer_engines.comparison import say
from peer_engines.step_picture import PICTURE, picture
from peer_engines.subjects import FORMATS, PEERS, SLIPSTREAM
from peer_engines.worker import Worker

from slipstream.devices.bandwidth import ReadProbe
from slipstream.devices.foreign_load import ForeignLoad
from slipstream.devices.host import allowed_cpus
from slipstream.loading import catalog

ROWS = (1, 2, 4, 8, 12, 16, 32)
CONTEXTS = (16, 256, 2048)
COMPARED = 256
"""The context at which llama.cpp is timed too."""
CALLS = 5
"""Steps of each kind in a turn, of which the median counts."""
RESULT = RESULTS / "step_rows.json"


def turn(worker: Worker, contexts: Sequence[int]) -> dict[str, Any]:
    """One turn of a subject. -> kind of time -> context -> rows -> ms"""
    worker.resume()
    worker.call("generate", prompt=list(range(100, 116)), count=4)
    found: dict[str, Any] = {}
    for context in contexts:
        for kind, times in worker.call("steps", rows=ROWS, context=context, repeats=CALLS).items():
            medians = {rows: statistics.median(values) for rows, values in times.items()}
            found.setdefault(kind, {})[str(context)] = medians
    worker.pause()
    return found


def measure(rounds: int, threads: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All rounds, and what the subjects say of themselves."""
    model = catalog.resolve(None, fetch_missing=True)
    peers = {peer.file: peer for peer in PEERS if peer.engine == "llama.cpp"}
    workers: dict[str, Worker] = {}
    described: dict[str, Any] = {}
    measured: list[dict[str, Any]] = []
    try:
        for subject in (*SLIPSTREAM, *peers.values()):
            say(f"starting {subject.name}")
            worker = workers[subject.name] = subject.start(model, threads)
            worker.wait_loaded()
            described[subject.name] = worker.call("describe", shapes=[(context, 0) for context in CONTEXTS])
            worker.pause()
        probe = ReadProbe(threads)
        before = probe.measure()
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}")
            for ours in SLIPSTREAM:
                mine = turn(workers[ours.name], CONTEXTS)
                between = probe.measure()
                theirs = turn(workers[peers[ours.file].name], [COMPARED])
                after = probe.measure()
                measured.append(
                    {"format": ours.file, "ours": mine, "llama_cpp": theirs, "probes": [before, between, after]}
                )
                before = after
    finally:
        for worker in workers.values():
            worker.close()
    return measured, described


def figures(rounds: Sequence[dict[str, Any]], bytes_per_step: Sequence[float]) -> dict[str, Any]:
    """Of one format: for each context and number of rows, ours; llama.cpp's at one context; and the memory's limit."""
    found: dict[str, Any] = {"ours": {}, "llama_cpp": {}, "limit_ms": {}}
    disturbed = [Pair(1, 1, one["probes"]).disturbed for one in rounds]
    for context, size in zip(map(str, CONTEXTS), bytes_per_step, strict=True):
        limits = [size / statistics.mean(one["probes"][:2]) * 1e3 for one in rounds]
        found["limit_ms"][context] = statistics.median(limits)
        found["ours"][context] = {}
        for rows in map(str, ROWS):
            times = {kind: [one["ours"][kind][context][rows] for one in rounds] for kind in ("ms", "raw_ms")}
            ones = [one["ours"]["raw_ms"][context]["1"] for one in rounds]
            found["ours"][context][rows] = {
                **{kind: interval(values) for kind, values in times.items()},
                "over_one_row": _over(times["raw_ms"], ones, disturbed),
                "over_limit": _over(times["raw_ms"], limits, disturbed),
            }
    for rows in map(str, ROWS):
        times_of_theirs = [one["llama_cpp"]["ms"][str(COMPARED)][rows] for one in rounds]
        ones = [one["llama_cpp"]["ms"][str(COMPARED)]["1"] for one in rounds]
        found["llama_cpp"][rows] = {
            "ms": interval(times_of_theirs),
            "over_one_row": _over(times_of_theirs, ones, disturbed),
            "over_ours": ratio(
                [
                    Pair(theirs, one["ours"]["ms"][str(COMPARED)][rows], one["probes"])
                    for theirs, one in zip(times_of_theirs, rounds, strict=True)
                ]
            ),
        }
    return found


def _over(times: Sequence[float], base: Sequence[float], disturbed: Sequence[bool]) -> dict[str, float | None]:
    return undisturbed((time / one, spoilt) for time, one, spoilt in zip(times, base, disturbed, strict=True))


def show(result: dict[str, Any]) -> str:
    """The result in Markdown: ratios to one row, and llama.cpp's time over ours."""
    lines = [
        "| format | context | limit, ms | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |",
        "|---|---:|---:|" + "---:|" * len(ROWS),
    ]
    for kind, found in result["formats"].items():
        for context, by_rows in found["ours"].items():
            cells = [_cell(by_rows[str(rows)]["raw_ms"], by_rows[str(rows)]["over_one_row"]) for rows in ROWS]
            lines.append(f"| {kind} | {context} | {found['limit_ms'][context]:.2f} | " + " | ".join(cells) + " |")
        cells = [
            _cell(found["llama_cpp"][str(rows)]["ms"], found["llama_cpp"][str(rows)]["over_one_row"]) for rows in ROWS
        ]
        lines.append(f"| {kind}, llama.cpp | {COMPARED} | | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(times: dict[str, Any], over: dict[str, Any]) -> str:
    if over["median"] is None:
        return f"{times['median']:.2f} ms"
    return f"{times['median']:.2f} ms, {over['median']:.2f} ({over['low']:.2f} to {over['high']:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=allowed_cpus())
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--only-picture", action="store_true", help="draw the stored result again")
    options = parser.parse_args()
    if options.only_picture:
        result = json.loads(options.json.read_text(encoding="utf-8"))
    else:
        load = ForeignLoad()
        measured, described = measure(options.rounds, options.threads)
        result = {
            "what": "milliseconds of one step over its rows, all with logits, one sequence; ours and llama.cpp's",
            **conditions(load, options.threads),
            "calls_per_turn": CALLS,
            "compared_at": COMPARED,
            "formats": {
                kind: figures(
                    [one for one in measured if one["format"] == kind],
                    described[f"slipstream {kind}"]["bytes_per_step"],
                )
                for kind in FORMATS
            },
            "subjects": described,
            "rounds": measured,
        }
        print(show(result))
    options.picture.write_text(picture(result, "Q4_0"), encoding="utf-8")
    return 0 if options.only_picture else finish(result, options.json)


if __name__ == "__main__":
    sys.exit(main())
