"""`slipstream models`: the models known by name, and what a model on disk holds."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from slipstream.cli.console import facts, progress_bars, size, stdout_console
from slipstream.core.damage import reading

app = typer.Typer(no_args_is_help=True, help="List, fetch and look into models.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the models known by name, and whether they are on this machine."""
    from slipstream.loading import catalog

    rows = catalog.list_models()
    if as_json:
        shown = [
            {
                "name": row.name,
                "bytes": row.size,
                "licence": row.licence,
                "default": row.name == catalog.DEFAULT_MODEL,
                "path": None if row.path is None else str(row.path),
            }
            for row in rows
        ]
        print(json.dumps(shown, indent=2))
        return
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 3, 0, 0))
    for title in ("name", "size", "licence", "cached"):
        table.add_column(title, justify="right" if title == "size" else "left")
    for row in rows:
        name = f"{row.name} [dim](default)[/]" if row.name == catalog.DEFAULT_MODEL else row.name
        table.add_row(name, size(row.size), row.licence, "[green]yes[/]" if row.path else "no")
    stdout_console().print(table)


@app.command("fetch")
def fetch(name: Annotated[str | None, typer.Argument(help="A model, if not the default.")] = None) -> None:
    """Download a model, check it, and print where it is."""
    from slipstream.loading import catalog

    with progress_bars() as progress:
        path = catalog.resolve(name, fetch_missing=True, progress=progress)
    print(path)


@app.command("info")
def info(
    model: Annotated[str | None, typer.Argument(help="A model, if not the default; it must have been fetched.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a model's architecture, size, formats and context."""
    from slipstream.loading import catalog
    from slipstream.loading.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(catalog.resolve(model, fetch_missing=False))
    try:
        with reading(str(checkpoint.path)):
            found = checkpoint.describe() | {
                "vocab_size": (checkpoint.config.get("text_config") or checkpoint.config).get("vocab_size"),
                "chat_template": checkpoint.chat_template is not None,
                "eos_token_ids": list(checkpoint.eos_token_ids),
            }
    finally:
        checkpoint.close()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _print_info(found)


def _print_info(found: dict[str, Any]) -> None:
    pairs: list[tuple[str, str]] = []

    def row(name: str, value: str) -> None:
        pairs.append((name, value))

    row("path", found["path"])
    row("architecture", f"{found['architecture']} ({found['kind']})")
    row("parameters", f"{found['parameters']:,}")
    row("size", f"{size(found['bytes'])} in {found['tensors']} tensors")
    for name, nbytes in found["bytes_per_format"].items():
        row("", f"{name:<6} {size(nbytes):>9}")
    context = found["context_length"]
    row("context", "not said" if context is None else f"{context:,} tokens")
    row("vocabulary", "not said" if found["vocab_size"] is None else f"{found['vocab_size']:,} tokens")
    row("chat template", "yes" if found["chat_template"] else "no")
    stdout_console().print(facts(pairs))
