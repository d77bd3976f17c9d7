"""A server without requests leaves the CPU alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from soak import TESTS

from doubles.raw_clients import CHAT, COMPLETIONS, Client, fetch

SCRIPT = """
import sys
from doubles.served import ServedModel, serving
with serving(ServedModel(), isolate=sys.argv[1] == "isolated") as server:
    print(server.url, flush=True)
    sys.stdin.readline()
"""
SECONDS = 10.0


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and its children have used."""
    pids = [str(pid), *(p for path in Path(f"/proc/{pid}/task").glob("*/children") for p in path.read_text().split())]
    fields = [Path(f"/proc/{p}/stat").read_text().rpartition(")")[2].split() for p in pids]
    return sum(int(ticks) for field in fields for ticks in field[11:13]) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["thread", "isolated"])
def test_an_idle_server_needs_less_than_a_hundredth_of_a_core(kind: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", SCRIPT, kind]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            kept = Client(url, CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20})
            kept.response().read()
            for stream in (True, False):
                assert fetch(url, COMPLETIONS, {"prompt": "x", "max_tokens": 20, "stream": stream}).status == 200
            time.sleep(2)
            before = cpu_seconds(process.pid)
            time.sleep(SECONDS)
            assert cpu_seconds(process.pid) - before < SECONDS / 100
        finally:
            process.kill()
