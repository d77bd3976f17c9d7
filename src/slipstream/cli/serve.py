"""`slipstream serve`: the HTTP server."""

from __future__ import annotations

import json
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.console import facts, progress_bars, stdout_console
from slipstream.cli.flags import SERVE_NAMES
from slipstream.cli.options import takes_flags
from slipstream.cli.settings import Settings
from slipstream.core.config import EngineConfig, ServerConfig

if TYPE_CHECKING:
    from slipstream.server.service import Service


@takes_flags(SERVE_NAMES)
def serve(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A model, if not the default.")] = None,
    *,
    settings: Settings,
) -> None:
    """Serve a model over HTTP, in OpenAI's shapes, with a page to chat in.

    Ctrl-C or SIGTERM lets open requests end (--drain-seconds) and takes no more; a second one stops at once.
    """
    if model is not None:
        settings.name_model(model)
    server = ServerConfig(**settings.server)
    engine = EngineConfig.from_mapping(settings.engine)
    from slipstream.server import logs, run

    logs.set_up(server.log_level, server.log_format)
    with ExitStack() as loading:
        progress = loading.enter_context(progress_bars())
        progress("starting", 0, 0)

        def ready(service: Service, url: str) -> None:
            loading.close()
            print_banner(service, url)

        run.serve(server, engine, ready, progress)


def print_banner(service: Service, url: str) -> None:
    """Where it can be reached, and a line to try."""
    engine = service.loaded
    assert engine is not None
    report = {name: text.replace(f"{Path.home()}/", "~/") for name, text in engine.report.items()}
    shown = [(name, report[name]) for name in ("model", "device", "context", "cache", "start") if name in report]
    console = stdout_console()
    console.print(facts([*shown, ("page", url), ("API", f"{url}/v1"), ("API's docs", f"{url}/docs")]))
    body: dict[str, Any] = {
        "model": service.names[0],
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    body["max_tokens"] = 100
    key = " -H 'Authorization: Bearer KEY'" if service.config.api_key else ""
    console.print("\nTry it:", style="bold")
    data = shlex.quote(json.dumps(body))
    print(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {data}\n", flush=True)
