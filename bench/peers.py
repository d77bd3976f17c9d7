"""Slipstream beside other engines on this CPU, in pairs that take turns: see docs/benchmarks.md.

python bench/peers.py install            # llama.cpp, transformers and vLLM, an environment each
python bench/peers.py run                # about ten minutes; the machine must be left alone
python bench/peers.py table              # the table once more, from the stored result
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peer_engines import environments
from peer_engines.comparison import PROMPTS, Comparison, Plan
from peer_engines.report import rows, table
from peer_engines.subjects import chosen

from slipstream.cli.bench_report import load_of_others
from slipstream.devices.foreign_load import ForeignLoad
from slipstream.devices.host import allowed_cpus, cpu_name
from slipstream.loading import catalog

RESULT = Path(__file__).parent / "results" / "peers.json"
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


def run(peers: str | None, plan: Plan, threads: int, *, quick: bool) -> dict[str, Any]:
    """The whole comparison. Raises PeerError if slipstream itself fails."""
    load = ForeignLoad()
    comparison = Comparison(catalog.resolve(None, fetch_missing=True), chosen(peers), plan, threads)
    try:
        comparison.start()
        comparison.measure()
    finally:
        comparison.close()
    others = load_of_others(load)  # now: a worker's time counts as this process's own once it has ended
    subjects = [entry.report() for entry in (comparison.ours, *comparison.peers)]
    return {
        "what": "one stream, greedy, slipstream and a peer in turns; a ratio is slipstream's speed over the peer's",
        "command": shlex.join(["python", "bench/peers.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": comparison.model.name,
        "cpu": cpu_name(),
        "threads": threads,
        "versions": {
            "python": platform.python_version(),
            **{n: version(n) for n in ("slipstream-llm", "torch", "gguf")},
        },
        "plan": asdict(plan),
        "quick": quick,
        **others,
        "rows": rows(subjects, comparison.pairs, asdict(plan)),
        "subjects": subjects,
        "prompt": f"the first tokens of {PROMPTS.name}, without a chat template",
        "pairs": comparison.pairs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="do", required=True)
    one = commands.add_parser("install", help="make the peers' environments anew")
    one.add_argument("names", nargs="*", help=f"of {', '.join(environments.RECIPES)}; without names all")
    two = commands.add_parser("run", help="measure")
    two.add_argument("--peers", help="engines or subjects, such as llama.cpp,'vllm bfloat16'; without it all")
    two.add_argument("--pairs", type=int, help=f"pairs for each peer; {Plan.pairs} without it")
    two.add_argument("--threads", type=int, default=allowed_cpus(), help="of every engine")
    two.add_argument("--json", type=Path, help=f"where to write the result; {RESULT.name} in bench/results without it")
    two.add_argument("--quick", action="store_true", help=f"{QUICK_PAIRS} pairs, written only where --json says")
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
    pairs = options.pairs if options.pairs is not None else QUICK_PAIRS if options.quick else Plan.pairs
    if pairs < 1 or not 1 <= options.threads <= allowed_cpus():
        parser.error(f"--pairs must be 1 or more, and --threads 1 to {allowed_cpus()}")
    try:
        chosen(options.peers)
    except ValueError as error:
        parser.error(str(error))
    result = run(options.peers, Plan(pairs=pairs), options.threads, quick=options.quick)
    path = options.json or (None if options.quick else RESULT)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(table(result))
    return 1 if result["disturbed"] else 0


if __name__ == "__main__":
    sys.exit(main())
