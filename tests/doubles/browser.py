"""A headless chromium of a test's own, driven over the DevTools protocol.

Needs chromium or Chrome on the machine, and aiohttp for the WebSocket.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ctypes
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# fmt: off
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--no-default-browser-check", "--disable-background-networking", "--disable-component-update",
    "--disable-extensions", "--disable-sync", "--mute-audio", "--hide-scrollbars", "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)
# fmt: on
_START_SECONDS = 60.0
_ANSWER_SECONDS = 60.0
_KEYS = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    "ArrowUp": (38, ""),
    "ArrowDown": (40, ""),
    "Backspace": (8, ""),
    "Home": (36, ""),
    "End": (35, ""),
    "PageUp": (33, ""),
}
_SHIFT = 8


def find_chromium() -> str | None:
    """The path of a chromium or Chrome on this machine, None if there is none."""
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    return None


class ScriptError(Exception):
    """A script that `evaluate` ran threw."""


class Browser:
    """One page in a headless browser with an empty profile. `async with Browser() as browser: ...`

    `problems` holds what a user would find in the console: errors and warnings logged, exceptions nobody caught,
    requests that failed or were answered with an error status, breaches of the Content-Security-Policy.
    """

    def __init__(self, chromium: str | None = None) -> None:
        found = chromium or find_chromium()
        if found is None:
            raise FileNotFoundError(f"no browser found; looked for {', '.join(_NAMES)}")
        self._chromium = found
        self._stack = contextlib.AsyncExitStack()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._socket: aiohttp.ClientWebSocketResponse
        self.problems: list[str] = []

    async def __aenter__(self) -> Browser:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        # Chromium may still write into its profile while it is being removed.
        folder = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        profile = self._stack.enter_context(folder)
        process = await asyncio.create_subprocess_exec(
            self._chromium,
            *_FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            # A group of its own, so that the helper processes end with it.
            start_new_session=True,
            preexec_fn=_end_with_parent(),
        )
        self._stack.push_async_callback(_end, process)
        port = await _debugging_port(Path(profile), process)
        session = await self._stack.enter_async_context(aiohttp.ClientSession())
        async with session.get(f"http://127.0.0.1:{port}/json") as response:
            targets = await response.json()
        address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
        self._socket = await self._stack.enter_async_context(session.ws_connect(address, max_msg_size=0))
        reader = asyncio.create_task(self._read())
        self._stack.push_async_callback(_cancel, reader)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.command(f"{domain}.enable")

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one DevTools command and return its result."""
        number = next(self._ids)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(future, _ANSWER_SECONDS)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    async def _read(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                future = self._waiting.pop(data["id"])
                if not future.done():
                    future.set_result(data)
            else:
                self._event(data["method"], data["params"])
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError("the browser is gone"))

    def _event(self, method: str, params: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            values = [str(value.get("value", value.get("description", ""))) for value in params["args"]]
            self.problems.append(" ".join(values))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            entry = params["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url', '')}".strip())

    async def goto(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self._loaded.clear()
        result = await self.command("Page.navigate", url=url)
        if text := result.get("errorText"):
            raise ConnectionError(f"{url}: {text}")
        await asyncio.wait_for(self._loaded.wait(), _ANSWER_SECONDS)

    async def reload(self) -> None:
        """Load the page again and wait until it is there."""
        self._loaded.clear()
        await self.command("Page.reload")
        await asyncio.wait_for(self._loaded.wait(), _ANSWER_SECONDS)

    async def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited. Raises `ScriptError` if it throws."""
        result = await self.command(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in result:
            details = result["exceptionDetails"]
            raise ScriptError(details.get("exception", {}).get("description") or details["text"])
        return result["result"].get("value")

    async def wait_for(self, script: str, seconds: float = 30.0) -> Any:
        """The value of an expression as soon as it is true. Raises `TimeoutError` naming it if it never is."""
        end = time.monotonic() + seconds
        while not (value := await self.evaluate(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"not true after {seconds:g} s: {script}")
            await asyncio.sleep(0.03)
        return value

    async def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key: one of the named ones, or a character."""
        code, text = _KEYS.get(key, (ord(key[0].upper()), key))
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": _SHIFT if shift else 0}
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        await self.command("Input.dispatchKeyEvent", **common, **down)
        await self.command("Input.dispatchKeyEvent", **common, type="keyUp")

    async def type(self, text: str) -> None:
        """Put text in where the focus is, as an input method does."""
        await self.command("Input.insertText", text=text)

    async def show(
        self, width: int, height: int, *, dark: bool = False, reduced_motion: bool = False, touch: bool = False
    ) -> None:
        """Set the size of the window in CSS pixels, and what the system asks of pages."""
        await self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch
        )
        await self.command("Emulation.setTouchEmulationEnabled", enabled=touch)
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if reduced_motion else "no-preference",
        }
        await self.command(
            "Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in features.items()]
        )

    async def screenshot(self, path: str | Path, width: int, height: int, dark: bool = False) -> None:
        """Write a PNG of the page as it looks in a window of that size."""
        await self.show(width, height, dark=dark)
        # Two frames: one takes in the new size, the next one is drawn with it.
        await self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        result = await self.command("Page.captureScreenshot", format="png")
        await asyncio.to_thread(Path(path).write_bytes, base64.b64decode(result["data"]))


def _end_with_parent() -> Callable[[], object] | None:
    """What the new process calls so that it ends when the test's process is killed: prctl(PR_SET_PDEATHSIG)."""
    return partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM) if sys.platform == "linux" else None


async def _debugging_port(profile: Path, process: asyncio.subprocess.Process) -> int:
    """Chromium writes the port that it took into a file of its profile."""
    file = profile / "DevToolsActivePort"
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if process.returncode is not None:
            raise RuntimeError(f"the browser ended at once with status {process.returncode}")
        with contextlib.suppress(FileNotFoundError):
            lines = (await asyncio.to_thread(file.read_text)).splitlines()
            if len(lines) >= 2:
                return int(lines[0])
        await asyncio.sleep(0.05)
    raise TimeoutError(f"the browser was not ready after {_START_SECONDS:g} s")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the browser and its helper processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), 5.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
