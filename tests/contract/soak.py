"""Clients of every kind against a server over the double; then nothing may be left and nothing may have grown.

`python tests/contract/soak.py --seconds 300` starts the server in a process of its own and prints how its memory went.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))

from doubles.async_client import Connection, Left  # noqa: E402
from doubles.engines import check_idle  # noqa: E402
from doubles.raw_clients import CHAT, COMPLETIONS, GENERATE, fetch, until  # noqa: E402
from doubles.served import ServedModel, serving  # noqa: E402
from slipstream.core.config import EngineConfig  # noqa: E402

CLIENTS = 64
STUCK = 60.0
"""Seconds after which a client that waits counts as stuck."""

BAD = [
    (b'{"prompt": "x"', 400),
    (b"[1, 2]", 400),
    (b"\xff\xfe", 400),
    (b"", 400),
    (b'{"prompt": {"a": 1}}', 400),
    (b'{"prompt": "x", "max_tokens": "many"}', 400),
    (b'{"prompt": "x", "temperature": -1}', 400),
    (b'{"prompt": "x", "no_such_field": 1}', 400),
    (b'{"prompt": "x", "model": "gpt-0"}', 404),
    (b'{"prompt": "' + b"x" * 5000 + b'"}', 400),
    (b'{"prompt": [' + b"7, " * 3000 + b"7]}", 400),
    (b'{"prompt": [999999]}', 400),
]


@dataclass
class Found:
    """What the clients saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    closed_idle: int = 0


class Visitor:
    """One client: it does one thing after another, chosen at random, over a connection that it keeps while it can."""

    def __init__(self, url: str, number: int, found: Found) -> None:
        self.url = url
        self.random = random.Random(number)
        self.found = found
        self.connection = Connection(url)

    async def run(self, until: float) -> None:
        weights = {
            self.whole: 10,
            self.streamed: 10,
            self.leaves_in_stream: 10,
            self.leaves_while_waiting: 10,
            self.leaves_after_the_end: 4,
            self.leaves_while_sending: 6,
            self.bad: 10,
            self.slow_reader: 2,
            self.huge: 0.2,
            self.looks: 4,
            self.tokenizes: 3,
        }
        while time.monotonic() < until:
            (act,) = self.random.choices(list(weights), list(weights.values()))
            self.found.actions[act.__name__] += 1
            try:
                await asyncio.wait_for(act(), STUCK)
            except TimeoutError:
                self.wrong(f"{act.__name__} was stuck")
                await self.connection.leave()
            except (Left, ConnectionError) as error:
                # A server may close an idle connection at the moment when a request is on its way; clients try again.
                if self.connection.kept:
                    self.found.closed_idle += 1
                else:
                    self.wrong(f"{act.__name__}: the server left: {error}")
                await self.connection.leave()
        await self.connection.leave()

    def wrong(self, what: str) -> None:
        self.found.wrong.append(what)

    def body(self, **more: Any) -> tuple[str, dict[str, Any]]:
        """A route and a request for it."""
        pick = self.random
        prompt = pick.choice(["", "the same beginning " * 3]) + "word " * pick.randrange(1, 20) + str(pick.random())
        limit = pick.choice([1, 4, 20, 60])
        common = {"max_tokens": limit, "ignore_eos": pick.random() < 0.7, "seed": pick.randrange(1000), **more}
        if pick.random() < 0.3:
            common["n"] = pick.choice([2, 3])
        if pick.random() < 0.3:
            common["stop"] = pick.choice(["a", ["x", "the"]])
        path = pick.choice([CHAT, CHAT, COMPLETIONS, COMPLETIONS, GENERATE])
        if path == CHAT:
            return path, {"messages": [{"role": "user", "content": prompt}], **common}
        if path == COMPLETIONS:
            several = pick.random() < 0.2
            return path, {
                "prompt": [prompt, prompt[::-1]] if several else prompt,
                "logprobs": pick.choice([None, 3]),
                **common,
            }
        params = {"max_new_tokens": limit, "stop": common.get("stop"), "n": common.get("n", 1)}
        return path, {"text": prompt, "sampling_params": params, **({"stream": True} if "stream" in more else {})}

    async def begin(self, path: str, body: Any, **headers: str) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        name = str(self.random.random())
        await self.connection.send("POST", path, raw, {"x-request-id": name, **headers})

    async def status(self, *expected: int) -> int:
        status = await self.connection.head()
        self.found.statuses[status] += 1
        if status == 503:
            await asyncio.sleep(self.random.random())
        if status not in expected:
            self.wrong(f"status {status} where {expected} was expected: {await self.connection.rest()!r}")
            await self.connection.leave()
        return status

    async def whole(self) -> None:
        await self.begin(*self.body())
        status = await self.status(200, 503)
        answer = await self.connection.rest()
        if status == 200:
            json.loads(answer)

    async def streamed(self) -> None:
        await self.begin(*self.body(stream=True))
        status = await self.status(200, 503)
        answer = await self.connection.rest()
        if status == 200 and not answer.endswith(b"data: [DONE]\n\n"):
            self.wrong(f"a stream ended with {answer[-300:]!r}")
        self.found.tokens += answer.count(b"data: ")

    async def leaves_in_stream(self) -> None:
        await self.begin(*self.body(stream=True))
        if await self.status(200, 503) == 200:
            for _ in range(self.random.randrange(20)):
                if not await self.connection.some():
                    break
        await self.connection.leave(reset=self.random.random() < 0.5)

    async def leaves_while_waiting(self) -> None:
        """Before it has a place, while its prompt is computed, or while tokens come."""
        await self.begin(*self.body(**self.random.choice([{}, {"stream": True}])))
        await asyncio.sleep(self.random.choice([0, 0.001, 0.02, 0.3]))
        await self.connection.leave(reset=self.random.random() < 0.5)

    async def leaves_after_the_end(self) -> None:
        """When the last token is there and the end of the body is not read."""
        await self.begin(*self.body(stream=True))
        if await self.status(200, 503) == 200:
            while (piece := await self.connection.some()) and b"[DONE]" not in piece:
                pass
        await self.connection.leave()

    async def leaves_while_sending(self) -> None:
        path, body = self.body()
        raw = json.dumps(body).encode() + b" " * self.random.choice([0, 200_000])
        await self.connection.send("POST", path, raw[: self.random.randrange(len(raw))], {}, length=len(raw))
        await asyncio.sleep(self.random.choice([0, 0.01]))
        await self.connection.leave(reset=self.random.random() < 0.5)

    async def bad(self) -> None:
        raw, status = self.random.choice(BAD)
        await self.begin(COMPLETIONS, raw)
        await self.status(status, 503)
        error = json.loads(await self.connection.rest())["error"]
        if not error["message"]:
            self.wrong("an error without a message")

    async def slow_reader(self) -> None:
        await self.begin(*self.body(stream=True))
        await self.status(200, 503)
        for _ in range(self.random.randrange(5, 40)):
            await asyncio.sleep(0.1)
            if not await self.connection.some(1):
                return
        if self.random.random() < 0.5:
            await self.connection.rest()
        else:
            await self.connection.leave()

    async def huge(self) -> None:
        """Over the limit, or within it and far too long for the model."""
        size, status = self.random.choice([(17 * 2**20, 413), (300_000, 400)])
        try:
            await self.begin(COMPLETIONS, b'{"prompt": "' + b"long " * (size // 5) + b'"}')
            await self.status(status, 503)
            await self.connection.rest()
        except ConnectionError:  # a server may close instead of reading on
            if status != 413:
                raise
        await self.connection.leave()

    async def looks(self) -> None:
        path = self.random.choice(["/metrics", "/stats", "/health", "/v1/models", f"/{self.random.random()}"])
        await self.connection.send("GET", path, b"", {})
        await self.status(200, 404, 503)
        await self.connection.rest()

    async def tokenizes(self) -> None:
        await self.begin("/tokenize", {"prompt": chr(self.random.randrange(32, 0xD7FF)) * 50})
        await self.status(200, 503)
        await self.connection.rest()


def resident(pid: int) -> float:
    """A process' resident memory, MB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


async def visit(url: str, pid: int, seconds: float, found: Found) -> list[tuple[float, float]]:
    """All clients for `seconds`. -> time and the server's memory in MB, once a second."""
    began = time.monotonic()
    curve: list[tuple[float, float]] = []
    visitors = [asyncio.create_task(Visitor(url, number, found).run(began + seconds)) for number in range(CLIENTS)]
    while time.monotonic() < began + seconds:
        await asyncio.sleep(1)
        curve.append((time.monotonic() - began, resident(pid)))
    ended = await asyncio.wait(visitors, timeout=STUCK + 10)
    found.wrong += [f"{len(ended[1])} clients did not end"] if ended[1] else []
    for task in ended[0]:
        task.result()
    return curve


def soak(seconds: float) -> tuple[Found, list[tuple[float, float]]]:
    """Start the server, let the clients at it, and look that nothing is left. Raises AssertionError."""
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            url = server.stdout.readline().strip()
            found = Found()
            curve = asyncio.run(visit(url, server.pid, seconds, found))
            until(lambda: (s := fetch(url, "/stats").json)["running"] == s["waiting"] == s["cache_usage"] == 0)
            shown = fetch(url, "/metrics").body.decode()
            assert 'vllm:kv_cache_usage_perc{model_name="double"} 0.0' in shown
            assert len({line for line in shown.splitlines() if line.startswith("slipstream:http_requests")}) < 60
            server.stdin.write("check\n")
            server.stdin.flush()
            assert server.stdout.readline() == "nothing is left\n"
        finally:
            server.kill()
    return found, curve


def check(found: Found) -> None:
    """Every client got what it should. Raises AssertionError."""
    assert not found.wrong, found.wrong[:10]
    assert {status for status in found.statuses if status >= 500} <= {503}
    assert found.tokens > 0
    assert found.closed_idle <= sum(found.actions.values()) / 1000


def growth(curve: list[tuple[float, float]], seconds: float) -> float:
    """MB by which the memory grew in the last `seconds`: from the median of its first tenth to that of its last."""
    end = curve[-1][0]
    tail = [memory for at, memory in curve if at > end - seconds]
    tenth = max(1, len(tail) // 10)
    return statistics.median(tail[-tenth:]) - statistics.median(tail[:tenth])


def serve() -> None:
    """The server's process: print the address, and at a line from stdin whether anything is left."""
    logging.disable(logging.INFO)
    served = ServedModel(
        pages=500, max_model_len=256, max_sequences=12, config=EngineConfig(model="double", max_queue=40)
    )
    with serving(served) as server:
        print(server.url, flush=True)
        sys.stdin.readline()
        until(lambda: server.service.idle.is_set() and not server.engine.has_work)
        loaded = server.service.loaded
        assert loaded is not None
        loaded.worker.call(lambda: check_idle(server.engine))  # type: ignore[union-attr]
        assert loaded._queues == {}
        assert loaded.worker._open == {}  # type: ignore[union-attr]
        assert server.service._open == server.service._preparing == 0
        # The server's own loop, the connection that asked for the figures, and what ends in a moment.
        until(lambda: len(asyncio.all_tasks(server.loop)) <= 2)
        print("nothing is left", flush=True)
        sys.stdin.readline()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=300)
    options.add_argument("--serve", action="store_true", help="be the server's process")
    chosen = options.parse_args()
    if chosen.serve:
        serve()
        return
    found, curve = soak(chosen.seconds)
    for at, memory in curve[::10]:
        print(f"{at:6.0f} s  {memory:8.1f} MB")
    print("statuses", dict(sorted(found.statuses.items())))
    print("actions", dict(found.actions), "kept connections that were closed", found.closed_idle)
    span = min(180.0, chosen.seconds * 0.6)
    grown = growth(curve, span)
    print("wrong", found.wrong[:10])
    print(f"grew by {grown:.2f} MB in the last {span:.0f} s")
    check(found)
    if grown >= 2:
        sys.exit("the server's memory grows")


if __name__ == "__main__":
    main()
