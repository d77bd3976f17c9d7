"""What HTTP costs, measured with the default model: `python bench/http_cost.py`.

1. Time per token of a stream read by `curl -N`, against the same engine read without HTTP (interleaved pairs).
2. Times between the tokens of a stream while prompts of 100,000 characters are tokenized, p99 against median.
3. The CPU that an idle server takes.

The server runs in this process, clients in others. Results go to bench/results/http_cost.json.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import http.client
import itertools
import json
import random
import resource
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from contextlib import aclosing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvicorn
from pairs import Pair, ratio

from slipstream.cli.percentiles import distribution
from slipstream.core.config import EngineConfig, ServerConfig
from slipstream.core.sampling_params import SamplingParams
from slipstream.devices.bandwidth import ReadProbe
from slipstream.devices.foreign_load import ForeignLoad
from slipstream.devices.host import cpu_name
from slipstream.server.run import listen, make_engine, set_up_process, uvicorn_config
from slipstream.server.service import Service

PROMPT = "Once upon a time"
LONG = 100_000
RESULTS = Path(__file__).parent / "results" / "http_cost.json"


class Served:
    """The default model behind HTTP, on a free port, in a thread of this process."""

    def __init__(self) -> None:
        set_up_process()
        server, engine = ServerConfig(port=0), EngineConfig()
        self._sockets = listen(server)
        self.port = self._sockets[0].getsockname()[1]
        self.service = Service(server, engine, lambda: make_engine(server, engine, lambda *_: None))
        self.loop = asyncio.new_event_loop()
        self._server = uvicorn.Server(uvicorn_config(self.service))
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: self.loop.run_until_complete(self._main()), daemon=True)
        self._thread.start()
        self._ready.wait()
        while not self._server.started:
            time.sleep(0.01)

    async def _main(self) -> None:
        await self.service.start()
        self._ready.set()
        await self._server.serve(self._sockets)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.service.close()


async def direct(service: Service, tokens: int) -> float:
    """Seconds per token between the first and the last one, without HTTP."""
    engine = service.engine()
    request = engine.inputs.request(PROMPT, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    times = []
    async with aclosing(engine.updates(request)) as updates:
        async for _ in updates:
            times.append(time.perf_counter())
    return (times[-1] - times[0]) / (tokens - 1)


def body(tokens: int) -> str:
    return json.dumps({"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True})


def through_curl(port: int, tokens: int) -> float:
    """The same, read by `curl -N`."""
    command = ["curl", "-sN", "-o", "/dev/null", "-w", "%{time_starttransfer} %{time_total}", "-d", body(tokens)]
    command += ["-H", "Content-Type: application/json", f"http://127.0.0.1:{port}/v1/completions"]
    first, last = map(float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    return (last - first) / (tokens - 1)


def cost(served: Served, probe: ReadProbe, pairs: int, tokens: int) -> dict[str, Any]:
    """Pairs of curl and direct reading."""
    served.run(direct(served.service, tokens))
    through_curl(served.port, tokens)
    found, probes = [], [probe.measure()]
    for _ in range(pairs):
        first = through_curl(served.port, tokens)
        probes.append(probe.measure())
        second = served.run(direct(served.service, tokens))
        probes.append(probe.measure())
        found.append(Pair(first, second, probes[-3:]))
    return {
        "curl_ms_per_token": statistics.median(pair.first for pair in found) * 1e3,
        "direct_ms_per_token": statistics.median(pair.second for pair in found) * 1e3,
        "ratio": ratio(found),
        "tokens": tokens,
    }


def read_stream(port: int, tokens: int) -> None:
    """In a process of its own: print the times at which a stream's events came, as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/completions", body(tokens), {"Content-Type": "application/json"})
    response, times = connection.getresponse(), []
    while line := response.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    print(json.dumps(times))


def send_long_prompts(port: int, pause: float) -> None:
    """In a process of its own: send prompts of 100,000 characters until killed."""
    chooser = random.Random(1)
    words = ["".join(chooser.choices("etaoinshrdlu", k=chooser.randint(2, 9))) for _ in range(5000)]
    while True:
        text = " ".join(chooser.choices(words, k=20_000))[:LONG]
        connection = http.client.HTTPConnection("127.0.0.1", port)
        data = json.dumps({"prompt": text})
        connection.request("POST", "/tokenize", data, {"Content-Type": "application/json"})
        answer = json.loads(connection.getresponse().read())
        assert answer["count"] > LONG / 10, answer
        time.sleep(pause)


def gaps(port: int, tokens: int, *, long_prompts: bool, pause: float) -> list[float]:
    """Times in ms between the tokens of one stream."""
    own = [sys.executable, __file__, "--port", str(port)]
    sender = subprocess.Popen([*own, "--role", "send", "--pause", str(pause)]) if long_prompts else None
    try:
        reader = [*own, "--role", "read", "--tokens", str(tokens)]
        times = json.loads(subprocess.run(reader, capture_output=True, text=True, check=True).stdout)
    finally:
        if sender is not None:
            assert sender.poll() is None, "the sender of long prompts has stopped"
            sender.kill()
            sender.wait()
    return [(late - early) * 1e3 for early, late in itertools.pairwise(times)]


def long_prompts(served: Served, tokens: int) -> dict[str, Any]:
    """The stream's gaps alone, and while long prompts are tokenized one after the other."""
    shown: dict[str, Any] = {"characters": LONG, "pause_s": 0.5, "tokens": tokens}
    for name, sends in (("alone", False), ("beside_long_prompts", True)):
        values = gaps(served.port, tokens, long_prompts=sends, pause=0.5)
        shown[name] = {**distribution(values), "max": max(values)}
    beside = shown["beside_long_prompts"]
    shown["p99_over_median"] = beside["p99"] / beside["p50"]
    return shown


def idle(seconds: float) -> float:
    """Share of one core that this process, with its server, takes while nobody asks."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    before = used()
    time.sleep(seconds)
    return (used() - before) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=400, help="tokens of the stream beside long prompts")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--role", choices=("all", "read", "send"), default="all", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--pause", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "read":
        read_stream(options.port, options.tokens)
        return
    if options.role == "send":
        send_long_prompts(options.port, options.pause)
        return
    served = Served()
    load = ForeignLoad()
    result = {
        "http": cost(served, ReadProbe(), options.pairs, 48),
        "long_prompts": long_prompts(served, options.tokens),
        "idle_share_of_a_core": idle(20),
        "conditions": {
            "cpu": cpu_name(),
            "torch": version("torch"),
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        },
    }
    served.stop()
    # The clients are other processes too: the load counts them.
    result["load_of_other_processes_and_clients"] = load.share()
    options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
