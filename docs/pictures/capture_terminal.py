"""Takes docs/pictures/chat.svg from a running `slipstream chat`.

    python docs/pictures/capture_terminal.py

It needs tmux. The program runs in a terminal of its own, is typed to, and what its screen shows at the end, colours
included, becomes the picture.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COLUMNS, LINES = 96, 30
TURNS = ("What is the capital of France?", "And what is it known for?")


def _colours(text: str) -> list[tuple[int, int, int]]:
    return [(code >> 16, code >> 8 & 255, code & 255) for code in (int(word, 16) for word in text.split())]


THEME = TerminalTheme(
    (22, 24, 29),
    (222, 225, 230),
    _colours("282a30 f07178 98cd79 ebcb8b 6ea6f0 c792ea 61c9d6 d0d4dc"),
    _colours("6e7480 ff8b92 b4e196 ffdca0 8cbeff dcaafa 82dce6 ffffff"),
)


class Terminal:
    """A detached tmux session on a server of its own, so that the user's configuration does not matter."""

    def __init__(self, command: list[str]) -> None:
        self._tmux = ["tmux", "-L", "slipstream-capture", "-f", "/dev/null"]
        size = ["-x", str(COLUMNS), "-y", str(LINES)]
        inside = f"stty -echoctl; exec {shlex.join(command)}"
        self._run("new-session", "-d", "-s", "picture", *size, "env TERM=xterm-256color sh -c " + shlex.quote(inside))

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([*self._tmux, *arguments], check=True, capture_output=True, text=True)
        return done.stdout

    def screen(self, *, colours: bool = False) -> str:
        return self._run("capture-pane", "-t", "picture", "-p", *(["-e"] if colours else []))

    def type(self, text: str) -> None:
        """Type like a person, so that the program's line editing is in the picture too."""
        for character in text:
            self._run("send-keys", "-t", "picture", "-l", character)
            time.sleep(0.02)
        self._run("send-keys", "-t", "picture", "Enter")

    def wait_for(self, pattern: str, count: int, seconds: float = 300.0) -> None:
        """Until the screen shows `pattern` so many times."""
        deadline = time.monotonic() + seconds
        while len(re.findall(pattern, self.screen(), re.MULTILINE)) < count:
            if time.monotonic() > deadline:
                raise SystemExit(f"the screen did not show {pattern!r} {count} times:\n{self.screen()}")
            time.sleep(0.3)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)


def capture(command: list[str]) -> str:
    """The screen, with its colour codes, after all turns."""
    terminal = Terminal(command)
    try:
        for number, turn in enumerate(TURNS, 1):
            terminal.wait_for(r"^you ›", number)
            terminal.type(turn)
        terminal.wait_for(r"^you ›", len(TURNS) + 1)
        return terminal.screen(colours=True)
    finally:
        terminal.close()


def picture(screen: str, title: str) -> str:
    """The screen as SVG, without anything that a viewer would have to fetch."""
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    text = Text.from_ansi(screen.rstrip())
    text.no_wrap = True
    console.print(text)
    form = re.sub(r"@font-face\s*{{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    form = form.replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    svg = console.export_svg(title=title, theme=THEME, code_format=form, unique_id="chat")
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("chat.svg"))
    out = parser.parse_args().out
    flags = ["--temperature", "0", "--max-tokens", "90"]
    screen = capture([sys.executable, "-m", "slipstream", "chat", *flags])
    out.write_text(picture(screen, "slipstream chat"), encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
