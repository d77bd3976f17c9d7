"""Takes docs/pictures/page_*.png from a running `slipstream serve` with a conversation in its page.

    python docs/pictures/capture_page.py

It needs chromium. Two questions are asked by keyboard, then the page is shown as on a laptop, dark, and as on a phone,
light.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from doubles.browser import Browser  # noqa: E402
from doubles.chat_page import IDLE, fill, open_page, say  # noqa: E402

QUESTIONS = ("What is the capital of France?", "Write a Python function that adds two numbers.")
LAPTOP, PHONE = (1280, 800), (390, 844)


class Server:
    """`slipstream serve` on a free port."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "slipstream", "serve", "--port", "0", "--log-level", "warning"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = next(found[1] for line in self._process.stdout if (found := re.match(r"page\s+(http\S+)", line)))

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


async def capture(server: Server, folder: Path) -> list[Path]:
    """Hold the conversation and take the pictures."""
    taken = []
    async with Browser() as browser:
        await browser.show(*LAPTOP)
        await open_page(browser, server)
        await fill(browser, "temperature", "0")
        await fill(browser, "max_tokens", "120")
        for question in QUESTIONS:
            await say(browser, question)
            await browser.wait_for(IDLE, 120)
        for name, size, dark in (("laptop_dark", LAPTOP, True), ("phone_light", PHONE, False)):
            taken.append(folder / f"page_{name}.png")
            await browser.screenshot(taken[-1], *size, dark)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the pictures")
    server = Server()
    try:
        for path in asyncio.run(capture(server, parser.parse_args().out)):
            print(path)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
