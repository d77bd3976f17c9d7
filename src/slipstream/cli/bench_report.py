"""What the bench commands share: the conditions of a run, the state of the machine, tables and the JSON file."""

from __future__ import annotations

import datetime
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream import __version__
from slipstream.cli.console import stderr_console, stdout_console

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.devices.foreign_load import ForeignLoad
    from slipstream.engine.llm import LLM

DISTURBED = 0.10
"""A run is marked disturbed if other processes used more than this of the CPUs."""

JsonFile = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout.")]


def host_conditions() -> dict[str, Any]:
    """The machine, the command and the time."""
    from slipstream.devices.host import cpu_name

    return {
        "cpu": cpu_name(),
        "slipstream": __version__,
        "command": shlex.join(["slipstream", *without_secrets(sys.argv[1:])]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def engine_conditions(llm: LLM) -> dict[str, Any]:
    """How the engine of this process computes."""
    import torch

    device = llm.loaded.device
    return {
        "model": llm.loaded.checkpoint.path.name,
        "numerics": llm.loaded.numerics,
        "dtype": str(device.dtype).removeprefix("torch."),
        "device": device.name,
        "threads": device.threads,
        "torch": torch.__version__,
    }


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """A command line that may be kept: the value of --api-key is left out."""
    kept: list[str] = []
    for argument in arguments:
        if kept and kept[-1] == "--api-key":
            argument = "***"
        elif argument.startswith("--api-key="):
            argument = "--api-key=***"
        kept.append(argument)
    return kept


def load_of_others(load: ForeignLoad) -> dict[str, Any]:
    """What other processes used since `load` was made, and whether that spoils the run."""
    share = load.share()
    return {"foreign_load": share, "disturbed": share is not None and share > DISTURBED}


def bench_console(json_file: str | None) -> Console:
    """Where tables go: to stdout, unless the JSON goes there."""
    return stderr_console() if json_file == "-" else stdout_console()


def show_figures(
    console: Console, columns: Sequence[str], rows: Iterable[tuple[str, Mapping[str, float | None], float]]
) -> None:
    """A table with one row for each (label, values by column, factor)."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column("")
    for title in columns:
        table.add_column(title, justify="right")
    for label, values, scale in rows:
        shown = [values[column] for column in columns]
        table.add_row(label, *("-" if value is None else f"{value * scale:.1f}" for value in shown))
    console.print(table)


def show_load_of_others(console: Console, result: Mapping[str, Any]) -> None:
    """One line about other processes, in red if they spoil the run."""
    foreign = result["foreign_load"]
    text = (
        "other processes' load is not known" if foreign is None else f"other processes used {foreign:.0%} of the CPUs"
    )
    if result["disturbed"]:
        console.print(f"disturbed: {text}", style="bold red")
    else:
        console.print(text, style="dim")


def write_json(result: Mapping[str, Any], json_file: str | None) -> None:
    """Write a result where --json says, if it was given."""
    text = json.dumps(result, indent=2, allow_nan=False)
    if json_file == "-":
        print(text)
    elif json_file is not None:
        Path(json_file).write_text(text + "\n", encoding="utf-8")
