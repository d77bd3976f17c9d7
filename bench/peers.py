"""Slipstream beside other engines on this CPU, in pairs that take turns: see docs/benchmarks.md.

python bench/peers.py install            # llama.cpp, transformers and vLLM, an environment each
python bench/peers.py run                # under 12 minutes; the machine must be left alone
python bench/peers.py batch              # 8 and 32 requests at once, beside vLLM; the same holds
python bench/peers.py run --peers vllm --merge    # one peer anew, the others stay in bench/results/peers.json
python bench/peers.py table              # the table once more, from the stored result
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conditions import RESULTS, conditions
from peer_engines import environments
from peer_engines.batches import Batches, BatchPlan, batch_table
from peer_engines.comparison import PROMPTS, Comparison
from peer_engines.merge import merged
from peer_engines.plan import Plan
from peer_engines.report import rows, table
from peer_engines.subjects import PEERS, SLIPSTREAM, Subject, chosen

from slipstream.devices.foreign_load import ForeignLoad
from slipstream.devices.host import allowed_cpus
from slipstream.loading import catalog

RESULT = RESULTS / "peers.json"
BATCH_RESULT = RESULT.with_name("batch_throughput.json")
BATCH_OURS = ("slipstream Q4_1", "slipstream Q4_0")
BATCH_PEER = "vllm bfloat16"
QUICK_PAIRS = 2


def install(names: list[str]) -> int:
    """Make environments. One that fails does not stop the others. -> how many failed"""
    failed = []
    for name in names or list(environments.RECIPES):
        try:
            made = environments.install(name)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
        else:
            print(f"{name}: {made['bytes'] / 1e6:.0f} MB in {made['seconds']} s, {environments.folder(name)}")
            for variable, value in made["variables"].items():
                print(f"  {variable}={value}")
    return len(failed)


def run(peers: list[Subject], plan: Plan, threads: int, *, quick: bool) -> dict[str, Any]:
    """The whole comparison. Raises PeerError if slipstream itself fails."""
    load = ForeignLoad()
    comparison = Comparison(catalog.resolve(None, fetch_missing=True), peers, plan, threads)
    try:
        comparison.start()
        comparison.measure()
    finally:
        comparison.close()
    now = conditions(load, threads)  # a worker's time counts as this process's own once it has ended
    subjects = [entry.report() for entry in comparison.entries]
    return {
        "what": "one stream, greedy, slipstream and a peer in turns; a ratio is slipstream's speed over the peer's",
        **now,
        "model": comparison.model.name,
        "quick": quick,
        "plan": asdict(plan),
        "rows": rows(subjects, comparison.pairs, plan),
        "subjects": subjects,
        "prompt": f"the first tokens of {PROMPTS.name}, without a chat template",
        "pairs": comparison.pairs,
    }


def batch(plan: BatchPlan, threads: int, *, quick: bool) -> dict[str, Any]:
    """Many requests at once. Raises PeerError if a subject fails."""
    load = ForeignLoad()
    known = {subject.name: subject for subject in (*SLIPSTREAM, *PEERS)}
    model = catalog.resolve(None, fetch_missing=True)
    batches = Batches(model, [known[name] for name in BATCH_OURS], known[BATCH_PEER], plan, threads)
    try:
        batches.run()
    finally:
        batches.close()
    now = conditions(load, threads)
    return {
        "what": "all requests at once, greedy; tokens made over the seconds until the last one is done",
        **now,
        "model": model.name,
        "quick": quick,
        "plan": asdict(plan),
        "rows": batches.rows(),
        "subjects": batches.descriptions,
        "rounds": batches.rounds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="do", required=True)
    one = commands.add_parser("install", help="make the peers' environments anew")
    one.add_argument("names", nargs="*", help=f"of {', '.join(environments.RECIPES)}; without names all")
    two = commands.add_parser("run", help="measure")
    two.add_argument("--peers", help="engines or subjects, such as llama.cpp,'vllm bfloat16'; without it all")
    two.add_argument("--pairs", type=int, help=f"pairs for each peer; {Plan.pairs} without it")
    two.add_argument("--long-pairs", type=int, default=Plan.long_pairs, help="pairs that prefill 4,096 tokens too")
    two.add_argument("--merge", action="store_true", help="keep the other peers of the stored result")
    two.add_argument("--threads", type=int, default=allowed_cpus(), help="of every engine")
    two.add_argument("--json", type=Path, help=f"where to write the result; {RESULT.name} in bench/results without it")
    two.add_argument("--quick", action="store_true", help=f"{QUICK_PAIRS} pairs, written only where --json says")
    four = commands.add_parser("batch", help="measure many requests at once, beside vLLM")
    four.add_argument("--threads", type=int, default=allowed_cpus(), help="of every engine")
    four.add_argument(
        "--json", type=Path, help=f"where to write the result; {BATCH_RESULT.name} in bench/results without it"
    )
    four.add_argument("--quick", action="store_true", help="one round, written only where --json says")
    three = commands.add_parser("table", help="print the table of a stored result")
    three.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.do == "install":
        for name in options.names:
            if name not in environments.RECIPES:
                parser.error(f"names: {name!r} is not one of {', '.join(environments.RECIPES)}")
        return install(options.names)
    if options.do == "table":
        if not options.json.is_file():
            parser.error(f"--json: there is no file {options.json}; `run` makes one")
        print(table(json.loads(options.json.read_text(encoding="utf-8"))))
        return 0
    if not 1 <= options.threads <= allowed_cpus():
        parser.error(f"--threads must be 1 to {allowed_cpus()}")
    if options.do == "batch":
        plan = BatchPlan(rounds=1) if options.quick else BatchPlan()
        return _finish(batch(plan, options.threads, quick=options.quick), options, BATCH_RESULT, batch_table)
    pairs = options.pairs if options.pairs is not None else QUICK_PAIRS if options.quick else Plan.pairs
    if pairs < 1 or options.long_pairs < 0:
        parser.error("--pairs must be 1 or more, and --long-pairs 0 or more")
    try:
        peers = chosen(options.peers)
    except ValueError as error:
        parser.error(str(error))
    plan = Plan(pairs=pairs, long_pairs=options.long_pairs)
    result = run(peers, plan, options.threads, quick=options.quick)
    stored = options.json or RESULT
    if options.merge and stored.is_file():
        try:
            result = merged(json.loads(stored.read_text(encoding="utf-8")), result)
        except (KeyError, TypeError, ValueError) as error:
            print(f"not merged: {error}", file=sys.stderr)
    return _finish(result, options, RESULT, table)


def _finish(
    result: dict[str, Any], options: argparse.Namespace, usual: Path, show: Callable[[dict[str, Any]], str]
) -> int:
    """Write the result and print it. -> the exit status"""
    path = options.json or (None if options.quick else usual)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(show(result))
    return 1 if result["disturbed"] else 0


if __name__ == "__main__":
    sys.exit(main())
