"""`slipstream bench`: measurements that anyone can repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.bench_latency import Shape, measure
from slipstream.cli.bench_report import (
    JsonFile,
    bench_console,
    engine_conditions,
    host_conditions,
    load_of_others,
    show_figures,
    show_load_of_others,
    write_json,
)
from slipstream.cli.bench_serve import serve
from slipstream.cli.bench_throughput import throughput
from slipstream.cli.flags import ENGINE_NAMES
from slipstream.cli.options import takes_flags
from slipstream.cli.session import open_llm
from slipstream.cli.settings import Settings
from slipstream.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(no_args_is_help=True, help="Measure this machine with a model, or a server.")


@app.command("latency")
@takes_flags(name for name in ENGINE_NAMES if name != "prefix_caching")
def latency(
    input_len: Annotated[int, typer.Option("--input-len", help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option("--output-len", help="Tokens to generate for each.")] = 64,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts that run together.")] = 1,
    repeats: Annotated[int, typer.Option("--repeats", help="Counted runs.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", help="Runs before those.")] = 1,
    json_file: JsonFile = None,
    *,
    settings: Settings,
) -> None:
    """Time prompts and decoding, and compare decoding with what the memory allows.

    The prompts are random but fixed tokens, generation is greedy, and nothing is taken from a cache. bandwidth_share is
    the bytes that a decoding step has to read, over its time, over the read bandwidth probed around each run.
    """
    shape = Shape(input_len, output_len, batch_size)
    shape.check()
    if repeats < 1 or warmup < 0:
        raise ConfigError("--repeats must be 1 or more and --warmup 0 or more", param="repeats")
    with open_llm({**settings.engine, "prefix_caching": False}) as llm:
        from slipstream.devices.foreign_load import ForeignLoad

        if batch_size > llm.loaded.config.max_num_seqs:
            raise ConfigError(
                f"--batch-size {batch_size} is more than --max-num-seqs {llm.loaded.config.max_num_seqs}",
                param="batch_size",
            )
        load = ForeignLoad()
        measured = measure(llm, shape, warmup=warmup, repeats=repeats)
        result = {
            **measured.summary(),
            **load_of_others(load),
            "preemptions": llm.loaded.engine.stats.preemptions,
            "conditions": {
                **engine_conditions(llm),
                "input_len": input_len,
                "output_len": output_len,
                "batch_size": batch_size,
                "warmup": warmup,
                "repeats": repeats,
                **host_conditions(),
            },
        }
    _show(result, bench_console(json_file))
    write_json(result, json_file)


app.command("throughput")(throughput)
app.command("serve")(serve)


_ROWS = (
    ("decode_tokens_per_s", "decode, tokens/s", 1.0),
    ("prefill_tokens_per_s", "prefill, tokens/s", 1.0),
    ("ttft_ms", "time to first token, ms", 1.0),
    ("inter_token_ms", "between tokens, ms", 1.0),
    ("bandwidth_share", "share of memory bandwidth, %", 100.0),
)


def _show(result: dict[str, Any], console: Console) -> None:
    conditions, share = result["conditions"], result["bandwidth_share"]
    console.print(
        f"{conditions['batch_size']} x ({conditions['input_len']} in, {conditions['output_len']} out), "
        f"{conditions['repeats']} runs, {conditions['cpu']}, {conditions['threads']} threads, {conditions['dtype']}",
        style="dim",
    )
    rows = [(label, result[name], scale) for name, label, scale in _ROWS]
    rows.append(("probed bandwidth, GB/s", share["probed_gb_per_s"], 1.0))
    show_figures(console, ("median", "min", "max", "p95"), rows)
    if share["runs_dropped"]:
        console.print(
            f"{share['runs_dropped']} of {conditions['repeats']} runs left out of the share: "
            "the probes around them differ by more than 15 %",
            style="yellow",
        )
    show_load_of_others(console, result)
