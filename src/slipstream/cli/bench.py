"""`slipstream bench`: measurements that anyone can repeat."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream import __version__
from slipstream.cli.bench_latency import Shape, measure
from slipstream.cli.console import stderr_console, stdout_console
from slipstream.cli.flags import ENGINE_NAMES
from slipstream.cli.options import takes_flags
from slipstream.cli.session import open_llm
from slipstream.cli.settings import Settings
from slipstream.core.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

DISTURBED = 0.10
"""A run is marked disturbed if other processes used more than this of the CPUs."""

app = typer.Typer(no_args_is_help=True, help="Measure this machine with a model.")


@app.callback()
def _group() -> None:
    """Makes the group stay one while it has a single command."""


@app.command("latency")
@takes_flags(name for name in ENGINE_NAMES if name != "prefix_caching")
def latency(
    input_len: Annotated[int, typer.Option("--input-len", help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option("--output-len", help="Tokens to generate for each.")] = 64,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Prompts that run together.")] = 1,
    repeats: Annotated[int, typer.Option("--repeats", help="Counted runs.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", help="Runs before those.")] = 1,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout.")
    ] = None,
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
        foreign = load.share()
        result = {
            **measured.summary(),
            "foreign_load": foreign,
            "disturbed": foreign is not None and foreign > DISTURBED,
            "preemptions": llm.loaded.engine.stats.preemptions,
            "conditions": _conditions(llm, shape, warmup, repeats),
        }
    _show(result, to_stdout=json_file != "-")
    if json_file == "-":
        print(json.dumps(result, indent=2))
    elif json_file is not None:
        Path(json_file).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _conditions(llm: LLM, shape: Shape, warmup: int, repeats: int) -> dict[str, Any]:
    """What one has to know to repeat a run."""
    import torch

    from slipstream.devices.host import cpu_name

    config, device = llm.loaded.config, llm.loaded.device
    return {
        "model": llm.loaded.checkpoint.path.name,
        "numerics": config.numerics,
        "dtype": str(device.dtype).removeprefix("torch."),
        "device": device.name,
        "threads": device.threads,
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "slipstream": __version__,
        "input_len": shape.input_len,
        "output_len": shape.output_len,
        "batch_size": shape.batch_size,
        "warmup": warmup,
        "repeats": repeats,
        "command": shlex.join(["slipstream", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


_ROWS = (
    ("decode_tokens_per_s", "decode, tokens/s", 1.0),
    ("prefill_tokens_per_s", "prefill, tokens/s", 1.0),
    ("ttft_ms", "time to first token, ms", 1.0),
    ("inter_token_ms", "between tokens, ms", 1.0),
    ("bandwidth_share", "share of memory bandwidth, %", 100.0),
)


def _show(result: dict[str, Any], *, to_stdout: bool) -> None:
    from rich.table import Table

    console = stdout_console() if to_stdout else stderr_console()
    conditions, share = result["conditions"], result["bandwidth_share"]
    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column("")
    for title in ("median", "min", "max", "p95"):
        table.add_column(title, justify="right")
    rows = [(label, result[name], scale) for name, label, scale in _ROWS]
    rows.append(("probed bandwidth, GB/s", share["probed_gb_per_s"], 1.0))
    for label, values, scale in rows:
        shown = [
            "-" if values[key] is None else f"{values[key] * scale:.1f}" for key in ("median", "min", "max", "p95")
        ]
        table.add_row(label, *shown)
    console.print(
        f"{conditions['batch_size']} x ({conditions['input_len']} in, {conditions['output_len']} out), "
        f"{conditions['repeats']} runs, {conditions['cpu']}, {conditions['threads']} threads, {conditions['dtype']}",
        style="dim",
    )
    console.print(table)
    if share["runs_dropped"]:
        console.print(
            f"{share['runs_dropped']} of {conditions['repeats']} runs left out of the share: "
            "the probes around them differ by more than 15 %",
            style="yellow",
        )
    foreign = result["foreign_load"]
    text = (
        "other processes' load is not known" if foreign is None else f"other processes used {foreign:.0%} of the CPUs"
    )
    if result["disturbed"]:
        console.print(f"disturbed: {text}", style="bold red")
    else:
        console.print(text, style="dim")
