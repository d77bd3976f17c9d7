"""What is shown besides results: everything here goes to stderr, so that stdout carries results only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Report = Callable[[str, int, int], None]
"""Takes a stage's name, what is done of it and its total; a total of 0 is not known."""

_FILE_WIDTH = 200
"""Columns where output is no terminal: nothing is folded there."""

_BYTES = 1 << 16
"""A total above this counts bytes, not tensors."""


def stderr_console() -> Console:
    """A console on stderr; colours only on a terminal."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def stdout_console() -> Console:
    """A console for tables that are a command's result."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)


def facts(pairs: Iterable[tuple[str, str]]) -> Table:
    """Names and values in two columns; long values are folded, not cut."""
    from rich.markup import escape
    from rich.table import Table

    grid = Table.grid(padding=(0, 3, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(name, escape(value))
    return grid


def fail(message: str) -> None:
    """One sentence of what went wrong."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)


@contextmanager
def progress_bars() -> Iterator[Report]:
    """A callback that shows a bar for each stage, on a terminal; elsewhere it shows nothing."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=stderr_console(), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for task in tasks.values():
                    bars.update(task, visible=False)
                tasks[stage] = bars.add_task(stage, total=total or None, amount="")
            bars.update(tasks[stage], completed=done, total=total or None, amount=_amount(done, total))

        yield report


def _amount(done: int, total: int) -> str:
    if total <= 0:
        return ""
    return f"{size(done)} of {size(total)}" if total > _BYTES else f"{done} of {total}"


def size(count: float) -> str:
    """Bytes for people, in the decimal units of file sizes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.1f} {unit}"
