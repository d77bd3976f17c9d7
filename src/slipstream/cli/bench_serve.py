"""`slipstream bench serve`: load on a server with an OpenAI-compatible interface, and how it answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import platform
import random
from enum import StrEnum
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.bench_report import (
    JsonFile,
    bench_console,
    host_conditions,
    show_figures,
    write_json,
)
from slipstream.cli.bench_workload import (
    Dataset,
    InputLen,
    NumPrompts,
    OutputLen,
    RangeRatio,
    Workload,
    make_workload,
    random_words,
)
from slipstream.cli.percentiles import COLUMNS
from slipstream.cli.serve_summary import Goals, parse_goals, summarise
from slipstream.core.config import env_name, env_value
from slipstream.core.errors import ConfigError, SlipstreamError

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.cli.serve_client import Arrivals, Client


class Endpoint(StrEnum):
    """Where requests go."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


_SERVER, _LOAD, _REQUESTS, _RESULTS = "Server", "Load", "Requests", "Results"


def serve(
    base_url: Annotated[
        str, typer.Option("--base-url", metavar="URL", help="The server.", rich_help_panel=_SERVER)
    ] = "http://127.0.0.1:8000",
    endpoint: Annotated[
        Endpoint,
        typer.Option(
            "--endpoint", metavar="PATH", help="/v1/completions or /v1/chat/completions.", rich_help_panel=_SERVER
        ),
    ] = Endpoint.COMPLETIONS,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Default: the server's first model.", rich_help_panel=_SERVER),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", metavar="KEY", help=f"Or in {env_name('api_key')}; results omit it.", rich_help_panel=_SERVER
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Seconds that a request may take.", rich_help_panel=_SERVER)
    ] = 600.0,
    num_prompts: NumPrompts = 100,
    input_len: InputLen = None,
    output_len: OutputLen = 64,
    range_ratio: RangeRatio = 0.0,
    dataset: Dataset = None,
    request_rate: Annotated[
        list[float] | None,
        typer.Option(
            "--request-rate",
            metavar="X",
            help="Requests a second; inf sends all at once (default). May be repeated: a run for each.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    burstiness: Annotated[
        float,
        typer.Option(
            "--burstiness",
            metavar="X",
            help="1: Poisson arrivals; less: in bursts; more: more even (gamma distribution).",
            rich_help_panel=_LOAD,
        ),
    ] = 1.0,
    max_concurrency: Annotated[
        list[int] | None,
        typer.Option(
            "--max-concurrency",
            metavar="N",
            help="Requests in flight at most (default: no limit). May be repeated: a run for each.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    warmup: Annotated[
        int,
        typer.Option("--warmup", metavar="N", help="Requests before each run, not counted.", rich_help_panel=_LOAD),
    ] = 1,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Of prompts and arrivals.", rich_help_panel=_LOAD)
    ] = 0,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Ask for tokens after the model's end of text.", rich_help_panel=_REQUESTS),
    ] = False,
    temperature: Annotated[
        float, typer.Option("--temperature", metavar="X", help="0 is greedy.", rich_help_panel=_REQUESTS)
    ] = 0.0,
    extra_body: Annotated[
        str | None,
        typer.Option(
            "--extra-body", metavar="JSON", help="An object of further request fields.", rich_help_panel=_REQUESTS
        ),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput",
            metavar="NAME:MS",
            help="Count requests that keep this limit; NAME is ttft, itl (each), tpot or e2el. May be repeated.",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Send requests to any OpenAI-compatible server and measure how the answers stream in.

    Prompts are random words, other ones in every run, or those of --dataset. Several values of
    --request-rate or --max-concurrency give a run for each pair. A request is timed from the
    moment when it is sent; one that --max-concurrency holds back is not sent yet.
    """
    workload = make_workload(num_prompts, input_len, output_len, range_ratio, dataset)
    goals = parse_goals(goodput or [])
    extra = _extra(extra_body)
    _check(base_url, timeout, request_rate, burstiness, max_concurrency, warmup, temperature)
    try:
        from slipstream.cli.serve_client import Arrivals, Client
    except ImportError as error:
        if error.name != "aiohttp":
            raise
        raise SlipstreamError('bench serve needs aiohttp: pip install "slipstream-llm[bench]"') from None

    limits: list[int | None] = [*max_concurrency] if max_concurrency else [None]
    loads = [
        Arrivals(None if rate == float("inf") else rate, burstiness, limit)
        for rate, limit in itertools.product(request_rate or [float("inf")], limits)
    ]
    fixed = {"temperature": temperature, "stream": True, "stream_options": {"include_usage": True}}
    if ignore_eos:
        fixed["ignore_eos"] = True
    console = bench_console(json_file)
    client = Client(
        base_url.rstrip("/").removesuffix("/v1"),
        endpoint.value,
        api_key=api_key or env_value("api_key"),
        timeout=timeout,
    )
    run = Sweep(client, workload, loads, {**fixed, **extra}, goals, warmup=warmup, seed=seed, model=model)
    result = asyncio.run(run.measure(console))
    result["conditions"].update(
        {
            "endpoint": endpoint.value,
            "base_url": base_url,
            **workload.conditions(),
            "dataset": None if dataset is None else dataset.name,
            "request": {**fixed, **extra},
            "warmup": warmup,
            "seed": seed,
            "timeout_s": timeout,
            "aiohttp": version("aiohttp"),
            "python": platform.python_version(),
            **host_conditions(),
        }
    )
    write_json(result, json_file)
    if not any(row["completed"] for row in result["rows"]):
        raise SlipstreamError(f"no request was answered ({result['rows'][0]['failures'][0]['reason']})")


def _check(
    base_url: str,
    timeout: float,
    rates: list[float] | None,
    burstiness: float,
    limits: list[int] | None,
    warmup: int,
    temperature: float,
) -> None:
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url must begin with http:// or https://, not {base_url!r}", param="base_url")
    for name, values in (("timeout", [timeout]), ("request-rate", rates or []), ("burstiness", [burstiness])):
        if not all(value > 0 for value in values):
            raise ConfigError(f"--{name} must be greater than 0", param=name.replace("-", "_"))
    if not all(limit > 0 for limit in limits or []):
        raise ConfigError("--max-concurrency must be 1 or more", param="max_concurrency")
    if warmup < 0:
        raise ConfigError("--warmup must be 0 or more", param="warmup")
    if not temperature >= 0:
        raise ConfigError("--temperature must be 0 or more", param="temperature")


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON ({error})", param="extra_body") from None
    if not isinstance(value, dict):
        raise ConfigError("--extra-body must be a JSON object", param="extra_body")
    if value.get("stream", True) is not True:
        raise ConfigError("--extra-body: stream must stay true, since pieces are timed", param="extra_body")
    return value


class Sweep:
    """A run for each load, one after the other. `fields` are what all requests have in common."""

    def __init__(
        self,
        client: Client,
        workload: Workload,
        loads: list[Arrivals],
        fields: dict[str, Any],
        goals: Goals,
        *,
        warmup: int,
        seed: int,
        model: str | None,
    ) -> None:
        self.client = client
        self.workload = workload
        self.loads = loads
        self.fields = fields
        self.goals = goals
        self.warmup = warmup
        self.seed = seed
        self.model = model

    async def measure(self, console: Console) -> dict[str, Any]:
        """Measure; each run is shown when it is done. -> rows, and the server's part of the conditions."""
        rows = []
        async with self.client:
            server = await self.client.describe()
            model = self.model or server.first_model
            if model is None:
                raise SlipstreamError(f"{self.client.base_url}/v1/models names no model; give --model")
            console.print(f"{self.workload.describe()}, {model} at {self.client.base_url}", style="dim", markup=False)
            for number, load in enumerate(self.loads):
                row = await self._row(number, load, model)
                _show(row, console)
                rows.append(row)
        return {
            "rows": rows,
            "conditions": {"model": model, "server": {"version": server.version, "models": server.models}},
        }

    async def _row(self, number: int, load: Arrivals, model: str) -> dict[str, Any]:
        """One run. Its random prompts differ from those of the others, so that no cache has them."""
        from slipstream.cli.serve_client import Arrivals

        chooser = random.Random(f"{self.seed} {number}")
        bodies = self.bodies(model, chooser)
        if self.warmup:
            first = self.bodies(model, random.Random(f"{self.seed} {number} warmup"))
            await self.client.fly(
                list(itertools.islice(itertools.cycle(first), self.warmup)), Arrivals(limit=load.limit), chooser
            )
        flight = await self.client.fly(bodies, load, chooser)
        return {
            "request_rate": load.rate,
            "burstiness": load.burstiness,
            "max_concurrency": load.limit,
            "peak_concurrency": flight.peak,
            **summarise(flight.answers, flight.seconds, self.goals),
        }

    def bodies(self, model: str, chooser: random.Random) -> list[bytes]:
        """The requests as JSON, made before anything is timed."""
        workload = self.workload
        if workload.texts is None:
            asked = [(random_words(words, chooser), tokens) for words, tokens in workload.lengths(chooser)]
        else:
            asked = [(text, workload.output_len) for text in workload.repeated_texts()]
        bodies = []
        for text, tokens in asked:
            chat = self.client.endpoint == Endpoint.CHAT.value
            prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
            bodies.append(json.dumps({"model": model, **prompt, "max_tokens": tokens, **self.fields}).encode())
        return bodies


_ROWS = (
    ("ttft_ms", "time to first token, ms"),
    ("itl_ms", "between tokens, ms"),
    ("tpot_ms", "per output token, ms"),
    ("e2el_ms", "whole request, ms"),
)


def _show(row: dict[str, Any], console: Console) -> None:
    rate = "all at once" if row["request_rate"] is None else f"{row['request_rate']:g} requests/s"
    limit = "no limit" if row["max_concurrency"] is None else f"at most {row['max_concurrency']}"
    console.print()
    console.print(
        f"[bold]{rate}, {limit} in flight[/]: {row['completed']} of {row['requests']} answered "
        f"in {row['seconds']:.2f} s, up to {row['peak_concurrency']} in flight",
        soft_wrap=True,
    )
    console.print(
        f"{row['requests_per_s']:.2f} requests/s, {row['output_tokens_per_s']:.1f} output tokens/s", soft_wrap=True
    )
    if row["goodput"] is not None:
        good = row["goodput"]
        goals = ", ".join(f"{name} {limit:g} ms" for name, limit in good["goals_ms"].items())
        console.print(f"{good['requests_per_s']:.2f} good requests/s ({good['share']:.0%} within {goals})")
    figures = [(label, row[name], 1.0) for name, label in _ROWS]
    if row["tokens_per_chunk"] is not None and row["tokens_per_chunk"] > 1.05:
        figures.insert(2, (f"between chunks of {row['tokens_per_chunk']:.1f} tokens, ms", row["chunk_gap_ms"], 1.0))
    show_figures(console, COLUMNS, figures)
    if row["without_usage"]:
        console.print(
            f"the server counted no tokens for {row['without_usage']} requests: their chunks were counted",
            style="yellow",
        )
    for failure in row["failures"]:
        first = f": {failure['first']}" if failure["first"] else ""
        console.print(f"{failure['count']} x {failure['reason']}{first}", style="red", markup=False)
