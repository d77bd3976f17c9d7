"""The client of `bench serve`: sends requests when they are due and records how the answers stream in.

It needs aiohttp, so only the command imports it, when it runs.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from slipstream.cli.serve_stream import Answer, AnswerStream, error_message
from slipstream.core.errors import SlipstreamError

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]

_INFO_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Arrivals:
    """When requests are sent: `rate` a second, or all at once if it is None; never more than `limit` in flight.

    Intervals follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is
    more even.
    """

    rate: float | None = None
    burstiness: float = 1.0
    limit: int | None = None

    def times(self, count: int, chooser: random.Random) -> list[float]:
        """Seconds from the start at which each request is due."""
        if self.rate is None:
            return [0.0] * count
        due, times = 0.0, []
        for _ in range(count):
            due += chooser.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
            times.append(due)
        return times


@dataclass
class Flight:
    """What came of a batch of requests. `seconds` is from the start to the end of the last one."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    peak: int = 0


@dataclass(frozen=True)
class Server:
    """What a server says about itself; `version` is None if it does not."""

    models: dict[str, Any]
    version: Any

    @property
    def first_model(self) -> str | None:
        data = self.models.get("data")
        found = data[0].get("id") if isinstance(data, list) and data and isinstance(data[0], dict) else None
        return found if isinstance(found, str) else None


class Client:
    """One server. Use as an asynchronous context manager. `clock` and `sleep` are those of the event loop's world."""

    def __init__(
        self,
        base_url: str,
        endpoint: str,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        clock: Clock = time.perf_counter,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.endpoint = endpoint
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._clock = clock
        self._sleep = sleep

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout),
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def describe(self) -> Server:
        """Ask for the models and the version. Raises SlipstreamError if the server cannot be reached."""
        status, models = await self._get("/v1/models")
        if status != 200 or not isinstance(models, dict):
            raise SlipstreamError(f"{self.base_url}/v1/models answered {status}: {error_message(models)[:200]}")
        status, version = await self._get("/version")
        return Server(models, version if status == 200 else None)

    async def fly(self, bodies: Sequence[bytes], arrivals: Arrivals, chooser: random.Random) -> Flight:
        """Send all `bodies` and wait for their answers."""
        flight = Flight()
        slots = asyncio.Semaphore(arrivals.limit or len(bodies) or 1)
        in_flight = 0

        async def one(body: bytes) -> Answer:
            nonlocal in_flight
            async with slots:
                in_flight += 1
                flight.peak = max(flight.peak, in_flight)
                try:
                    return await self.ask(body)
                finally:
                    in_flight -= 1

        due = arrivals.times(len(bodies), chooser)
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # a collection would stop all clocks at once
        try:
            async with asyncio.TaskGroup() as group:
                begin = self._clock()
                tasks = []
                for body, moment in zip(bodies, due, strict=True):
                    wait = begin + moment - self._clock()
                    if wait > 0:
                        await self._sleep(wait)
                    tasks.append(group.create_task(one(body)))
            flight.seconds = self._clock() - begin
        finally:
            if collecting:
                gc.enable()
        flight.answers = [task.result() for task in tasks]
        return flight

    async def ask(self, body: bytes) -> Answer:
        """Send one request and read its stream. Whatever goes wrong becomes the answer's failure."""
        stream = AnswerStream(self._clock())
        try:
            async with self._session.post(self.base_url + self.endpoint, data=body) as response:
                if response.status != 200:
                    stream.answer.fail(f"HTTP {response.status}", error_message(_parsed(await response.read())))
                async for data in response.content.iter_any():
                    stream.feed(data, self._clock())
        except TimeoutError:
            stream.answer.fail("timeout", f"no end within {self._timeout:g} s")
        except aiohttp.ClientError as error:
            stream.answer.fail(_kind(error), str(error))
        return stream.finish(self._clock())

    async def _get(self, path: str) -> tuple[int, Any]:
        url = self.base_url + path
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=_INFO_TIMEOUT_S)) as response:
                return response.status, _parsed(await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise SlipstreamError(f"{url} cannot be reached: {reason}") from None


def _kind(error: aiohttp.ClientError) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return "no connection"
    if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientPayloadError):
        return "the connection broke off"
    return type(error).__name__


def _parsed(data: bytes) -> Any:
    text = data.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except ValueError:
        return text
