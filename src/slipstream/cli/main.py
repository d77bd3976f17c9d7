"""The command's entry point: which commands there are, and how errors become exit codes."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from slipstream.cli import bench, chat, doctor, generate, models, serve
from slipstream.cli.console import fail
from slipstream.cli.flags import BY_NAME
from slipstream.cli.version import print_version, version
from slipstream.core.config import env_value
from slipstream.core.errors import ConfigError, InvalidRequestError, SlipstreamError

INTERRUPTED = 130

_EPILOG = (
    "Each flag of the groups above has an environment twin (--max-model-len is SLIPSTREAM_MAX_MODEL_LEN), can stand in "
    "the file of --config, and is also accepted in vLLM's and SGLang's spelling; docs/flags.md lists all."
)

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serves large language models at the lowest latency a chip allows.",
)
app.command("generate", epilog=_EPILOG)(generate.generate)
app.command("serve", epilog=_EPILOG)(serve.serve)
app.command("chat", epilog=_EPILOG)(chat.chat)
app.add_typer(models.app, name="models")
app.add_typer(bench.app, name="bench")
app.command("doctor", epilog=_EPILOG)(doctor.doctor)
app.command("version")(version)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if show_version:
        print_version()
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. -> exit code: 0, 1 (it failed), 2 (bad input or setting), 130 (interrupted)."""
    debug = env_value("debug") == "1"
    logger = logging.getLogger("slipstream")
    level = logger.level
    if not debug:
        # The engine logs what it also raises; one sentence is enough.
        logger.setLevel(logging.CRITICAL + 1)
    try:
        code = app(list(sys.argv[1:] if arguments is None else arguments), standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; nothing is left to say, also not while Python shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        return _explain(error)
    finally:
        logger.setLevel(level)


def _explain(error: Exception) -> int:
    if isinstance(error, ConfigError | InvalidRequestError):
        flag = BY_NAME.get(error.param or "")
        # Settings name themselves; on a command line they are flags.
        known = flag is not None and error.message.startswith(flag.name)
        fail(error.message.replace(flag.name, flag.option, 1) if flag is not None and known else error.message)
        return 2
    if isinstance(error, SlipstreamError):
        fail(error.message)
        return 1
    # A wrong command line: typer brings its own copy of click or uses the installed one, by version.
    usage = getattr(error, "format_message", None)
    if usage is not None:
        if type(error).__name__ != "NoArgsIsHelpError":
            fail(usage())
        elif usage():  # a group without a command: some versions show the help themselves, some leave it to us
            print(usage(), file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    if isinstance(error, OSError):
        fail(str(error))
        return 1
    fail(f"unexpected {type(error).__name__}: {error} (SLIPSTREAM_DEBUG=1 shows where)")
    return 1
