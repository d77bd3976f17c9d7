"""What every result of a bench says of the run: command, date, machine, versions, the load of others."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from slipstream.cli.bench_report import load_of_others
from slipstream.devices.foreign_load import ForeignLoad
from slipstream.devices.host import allowed_cpus, cpu_name
from slipstream.kernels.cpu.library import Missing, load_library

RESULTS = Path(__file__).parent / "results"


def conditions(load: ForeignLoad, threads: int | None = None) -> dict[str, Any]:
    """Of a run that ends now and began when `load` was made. Call it when all child processes have ended."""
    library = load_library()
    return {
        "command": shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "threads": threads or allowed_cpus(),
        "native": f"none: {library.reason}" if isinstance(library, Missing) else library.describe(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("slipstream-llm", "torch", "numpy", "gguf")},
        },
        **load_of_others(load),
    }


def finish(result: dict[str, Any], path: Path | None) -> int:
    """Write a result (unless `path` is None) and say what spoils it. -> the exit status"""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if result["disturbed"]:
        print(f"not valid: other processes used {result['foreign_load']:.0%} of the CPUs", file=sys.stderr)
    return 1 if result["disturbed"] else 0
