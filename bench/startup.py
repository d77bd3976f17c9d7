"""What starting costs: `python bench/startup.py`. About two minutes.

- `warm_s`: from the start of `slipstream generate --max-tokens 1` until its first token is printed, with program and
  packed weights in the cache. One uncounted start comes first.
- `first_s`: the same with a cache folder that holds nothing but the model's file, which the system has read before.
- `imports_s`: what that command imports, timed in fresh processes: `torch`, and all that comes on top of it.
- `memory`: resident bytes once the model is loaded and after an answer, against the packed weights.
- `idle_share_of_a_core`: CPU time of the loaded engine over ten seconds without a request.

Results go to bench/results/startup.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from conditions import RESULTS, conditions, finish
from pairs import interval

from slipstream.core.config import cache_dir
from slipstream.devices.foreign_load import ForeignLoad
from slipstream.devices.host import allowed_cpus
from slipstream.loading import catalog

RESULT = RESULTS / "startup.json"
ARGUMENTS = ["generate", "--max-tokens", "1", "--numerics", "native", "--temperature", "0", "Once upon a time"]
ALLOWED_RATIO, ALLOWED_EXTRA = 1.15, 250e6
"""Resident memory may be so many times the packed weights, and so many bytes more."""

MODULES = """
import json, sys
from slipstream.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
names = [name for name in sys.modules if getattr(sys.modules[name], "__spec__", None) is not None]
print(json.dumps(names), file=sys.stderr)
"""
"""Runs the command and prints what it has imported, in the order in which the imports began."""

IMPORTS = """
import importlib, json, sys, time
names = json.load(sys.stdin)
begin = time.perf_counter()
import torch
between = time.perf_counter()
for name in names:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
print(json.dumps([between - begin, time.perf_counter() - between]))
"""

LOADED = """
import json, resource, sys, time
from slipstream import LLM, SamplingParams
from slipstream.devices.host import resident_memory
def used():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
with LLM(numerics="native") as llm:
    found = {"packed": llm.loaded.device.prepared.weights.size, "loaded": resident_memory()}
    llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=64))
    found["after_an_answer"] = resident_memory()
    time.sleep(1)
    before = used()
    time.sleep(float(sys.argv[1]))
    found["idle"] = (used() - before) / float(sys.argv[1])
print(json.dumps(found))
"""


def start(cache: Path | None = None) -> float:
    """Seconds until the command has printed its first token, with its own cache folder if one is given."""
    command = [str(Path(sys.executable).with_name("slipstream")), *ARGUMENTS]
    environment = {**os.environ, **({} if cache is None else {"SLIPSTREAM_CACHE_DIR": str(cache)})}
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, bufsize=0)
    assert process.stdout is not None
    first = process.stdout.read(1)
    seconds = time.perf_counter() - begin
    _, errors = process.communicate()
    if process.returncode != 0 or not first:
        raise RuntimeError(f"slipstream generate failed: {errors.decode(errors='replace')[-500:]}")
    return seconds


def first_start(model: Path) -> float:
    """`start` with nothing in the cache but the model's file."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / model.relative_to(cache_dir())
        place.parent.mkdir(parents=True)
        place.symlink_to(model)
        for beside in model.parent.iterdir():
            if beside != model:
                (place.parent / beside.name).symlink_to(beside)
        return start(Path(folder))


def python(code: str, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True)


def imports(repeats: int) -> dict[str, Any]:
    """Seconds of `import torch` and of all other imports of the command, each time in a new process."""
    listed = python(MODULES, *ARGUMENTS).stderr.splitlines()[-1]
    times = [json.loads(python(IMPORTS, given=listed).stdout) for _ in range(repeats + 1)][1:]
    names: list[str] = json.loads(listed)
    return {
        "torch": interval([torch for torch, _ in times]),
        "beyond_torch": interval([beyond for _, beyond in times]),
        "modules": len(names),
        "of_slipstream": sum(name.partition(".")[0] == "slipstream" for name in names),
    }


def memory(idle_seconds: float) -> dict[str, Any]:
    """Of a process that has loaded the model: its memory, and its CPU time while nobody asks."""
    found = json.loads(python(LOADED, str(idle_seconds)).stdout)
    idle = found.pop("idle")
    allowed = ALLOWED_RATIO * found["packed"] + ALLOWED_EXTRA
    return {"memory": {**found, "allowed": allowed, "holds": found["loaded"] <= allowed}, "idle_share_of_a_core": idle}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm", type=int, default=9, help="warm starts")
    parser.add_argument("--first", type=int, default=3, help="first starts")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.warm < 1 or options.first < 1:
        parser.error("--warm and --first must be 1 or more")
    load = ForeignLoad()
    model = catalog.resolve(None, fetch_missing=True)
    model.read_bytes()
    start()
    warm = [start() for _ in range(options.warm)]
    first = [first_start(model) for _ in range(options.first)]
    imported = imports(options.warm)
    rest = memory(options.idle_seconds)
    result = {
        "what": "seconds from the command to its first token, imports, memory of a loaded engine, CPU while idle",
        **conditions(load, allowed_cpus()),
        "model": model.name,
        "started": ["slipstream", *ARGUMENTS],
        "warm_s": {**interval(warm), "max": max(warm)},
        "first_s": {**interval(first), "max": max(first)},
        "imports_s": imported,
        **rest,
    }
    sizes = rest["memory"]
    print(f"warm {result['warm_s']['median']:.2f} s, first ever {result['first_s']['median']:.2f} s to the first token")
    print(
        f"imports: torch {imported['torch']['median']:.2f} s, beyond it {imported['beyond_torch']['median']:.2f} s "
        f"({imported['modules']} modules)"
    )
    print(
        f"memory: {sizes['loaded'] / 1e6:.0f} MB loaded, {sizes['after_an_answer'] / 1e6:.0f} MB after an answer; "
        f"allowed {sizes['allowed'] / 1e6:.0f} MB ({sizes['packed'] / 1e6:.0f} MB packed)"
    )
    print(f"idle: {rest['idle_share_of_a_core']:.2%} of a core")
    return finish(result, options.json)


if __name__ == "__main__":
    sys.exit(main())
