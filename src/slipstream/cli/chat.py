"""`slipstream chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.console import facts, stderr_console
from slipstream.cli.flags import CHAT_NAMES, ENGINE_NAMES
from slipstream.cli.options import takes_flags
from slipstream.cli.session import open_llm, sampling_params
from slipstream.cli.settings import Settings
from slipstream.cli.wrap import shown_on_stdout
from slipstream.core.errors import ConfigError, InvalidRequestError
from slipstream.core.outputs import RequestMetrics
from slipstream.core.request import Request, RequestUpdate
from slipstream.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from slipstream.engine.llm import LLM

HELP = """\
/system TEXT  set what the model is told before the conversation, and start anew
/clear        start anew
/help         show this
/exit         leave, as does Ctrl-D
Ctrl-C stops an answer."""


@takes_flags((*ENGINE_NAMES, *CHAT_NAMES))
def chat(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A model, if not the default.")] = None,
    system: Annotated[
        str | None, typer.Option("--system", help="What the model is told before the conversation.")
    ] = None,
    *,
    settings: Settings,
) -> None:
    """Talk with a model.

    Answers go to stdout and all else to stderr. Without a terminal each line of the input is a turn.
    """
    if model is not None:
        settings.name_model(model)
    with open_llm(settings.engine) as llm:
        if llm.loaded.inputs.template is None:
            raise ConfigError("this model has no chat template; give one with --chat-template", param="chat_template")
        conversation = Conversation(llm, sampling_params(llm, settings.sampling), stderr_console(), system)
        conversation.banner()
        conversation.run()


class Conversation:
    """The turns so far, and the loop that adds to them. `screen` shows everything but the answers."""

    def __init__(self, llm: LLM, params: SamplingParams, screen: Console, system: str | None = None) -> None:
        self.llm = llm
        self.params = params
        self.screen = screen
        self.system = system
        self.messages: list[dict[str, str]] = []

    def banner(self) -> None:
        """What is running, and how to get help."""
        from rich.panel import Panel

        report = {name: text.replace(f"{Path.home()}/", "~/") for name, text in self.llm.loaded.report.items()}
        table = facts([(name, report[name]) for name in ("model", "device", "context", "cache") if name in report])
        self.screen.print(
            Panel(table, title="[bold cyan]slipstream chat[/]", title_align="left", border_style="cyan", expand=False)
        )
        self.screen.print("[dim]/help shows the commands, Ctrl-C stops an answer, Ctrl-D leaves[/]\n")

    def run(self) -> None:
        """Read turns until the input ends."""
        interrupted = False
        while True:
            try:
                line = read_line()
            except EOFError:
                return
            except KeyboardInterrupt:
                if interrupted or not sys.stdin.isatty():
                    raise
                interrupted = True
                self.screen.print("\n[dim]Ctrl-C again or Ctrl-D leaves[/]")
                continue
            interrupted = False
            line = line.strip()
            if line.startswith("/"):
                if not self.command(line):
                    return
            elif line:
                self.answer(line)

    def command(self, line: str) -> bool:
        """Do what a line with a slash asks for. -> whether to go on."""
        name, _, rest = line.partition(" ")
        if name == "/exit":
            return False
        if name == "/help":
            self.screen.print(HELP, style="dim", markup=False)
        elif name == "/clear":
            self.messages.clear()
            self.note("a new conversation")
        elif name == "/system":
            self.system = rest.strip() or None
            self.messages.clear()
            self.note("a new conversation, " + ("with that system text" if self.system else "without a system text"))
        else:
            self.note(f"there is no command {name}; /help shows those there are")
        return True

    def answer(self, turn: str) -> None:
        """Ask the model and show the answer as it comes. A turn that cannot be asked leaves no trace."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages: list[dict[str, Any]] = [*system, *self.messages, {"role": "user", "content": turn}]
        heard = _Heard()
        try:
            outputs = self.llm.chat(messages, self.params, on_update=heard.take)
            cached = outputs[0].num_cached_tokens
        except KeyboardInterrupt:
            self._end_line()
            self.note("stopped")
            cached = heard.cached
        except InvalidRequestError as error:
            self.screen.print(error.message, style="red", markup=False)
            return
        else:
            self._end_line()
        if heard.request is not None:
            self.messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": heard.text}]
            self.note(statistics(heard.request.metrics, heard.tokens, len(heard.request.prompt_ids), cached) + "\n")

    def note(self, text: str) -> None:
        self.screen.print(text, style="dim", markup=False)

    def _end_line(self) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()


class _Heard:
    """What has come of an answer; kept while it comes, for it may be stopped."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens = 0
        self.cached = 0
        self.request: Request | None = None
        self.show = shown_on_stdout()

    def take(self, update: RequestUpdate) -> None:
        self.request = update.request
        self.cached = max(self.cached, update.num_cached_tokens)
        for delta in update.deltas:
            self.tokens += len(delta.token_ids)
            self.text += delta.text
            self.show(delta.text)


def statistics(metrics: RequestMetrics, tokens: int, prompt_tokens: int, cached: int) -> str:
    """How fast an answer came."""
    parts = [f"{tokens} tokens" if tokens != 1 else "1 token"]
    first, last = metrics.first_token_time, metrics.last_token_time
    if first is not None and last is not None and tokens > 1 and last > first:
        parts.append(f"{(tokens - 1) / (last - first):.1f} tokens/s")
    if first is not None:
        parts.append(f"first after {(first - metrics.arrival_time) * 1e3:.0f} ms")
    parts.append(f"{prompt_tokens} prompt tokens" + (f", {cached} of them cached" if cached else ""))
    return " · ".join(parts)


def read_line() -> str:
    """The next line of input, with a prompt on a terminal. Raises EOFError at the end."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        import readline  # noqa: F401  (gives `input` line editing and its own history)

        # The markers tell readline which characters take no room.
        return input("\001\x1b[1;36m\002you ›\001\x1b[0m\002 ")
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
