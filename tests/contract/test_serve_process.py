"""`slipstream serve` as a process: what it prints, how signals end it, and what is left when it is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from doubles.raw_clients import COMPLETIONS, Client, fetch, texts, until
from doubles.served_files import write_servable

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "slipstream", "serve"]
FLAGS = ["--port", "0", "--threads", "1"]
STREAM = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A quote and a space, since the banner's line goes through a shell.
    return write_servable(tmp_path_factory.mktemp("files") / "a model's file.gguf")


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SLIPSTREAM_")}


class Process:
    """A running command. `url` waits until it is ready."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.popen = subprocess.Popen(
                [*COMMAND, *arguments], stdout=out, stderr=err, env=environment(), start_new_session=True
            )

    def url(self) -> str:
        assert until(lambda: self.popen.poll() is not None or "Try it:" in self.out.read_text(), seconds=60, pause=0.05)
        found = re.search(r"API +(http://127\.0\.0\.1:\d+)/v1", self.out.read_text())
        assert found, self.err.read_text()
        return found[1]

    def children(self) -> list[int]:
        pid = self.popen.pid
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        return [int(child) for text in lists for child in text.split()]

    def end(self) -> int:
        """Wait for its end. -> exit code."""
        return self.popen.wait(30)


@contextmanager
def serve(folder: Path, *arguments: str) -> Iterator[Process]:
    process = Process(folder, *arguments)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait()


def gone(pid: int) -> bool:
    """A process that has ended; one that nobody has waited for yet counts too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def closed(url: str) -> bool:
    try:
        fetch(url, "/health/live")
    except ConnectionRefusedError:
        return True
    return False


def test_the_banner_and_its_line_work(model: Path, tmp_path: Path) -> None:
    with serve(tmp_path, str(model), *FLAGS) as process:
        url = process.url()
        banner = process.out.read_text()
        assert f"page         {url}\n" in re.sub(" +\n", "\n", banner)
        line = next(line for line in banner.splitlines() if line.startswith("curl "))
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
        answer = json.loads(done.stdout)
        assert answer["choices"][0]["message"]["role"] == "assistant"
        assert fetch(url, "/v1/models").json["data"][0]["id"] == str(model)
        metrics = fetch(url, "/metrics").body.decode()
        assert "sglang:startup_time_seconds{" in metrics
        assert "sglang:weight_load_duration_seconds{" in metrics


@pytest.mark.parametrize("isolate", [False, True], ids=["thread", "isolated"])
def test_sigterm_lets_requests_end(model: Path, tmp_path: Path, isolate: bool) -> None:
    with serve(tmp_path, str(model), *FLAGS, *(["--isolate"] if isolate else [])) as process:
        url = process.url()
        stream = Client(url, COMPLETIONS, STREAM, timeout=120)
        events = stream.events()
        first = json.loads(next(events))["choices"][0]["text"]
        children = process.children()
        assert len(children) == isolate
        process.popen.send_signal(signal.SIGTERM)
        assert len(first + texts(events)) > 0
        assert process.end() == 0
        until(lambda: all(map(gone, children)))
        assert closed(url)
        errors = process.err.read_text()
        assert "Traceback" not in errors
        assert "SIGTERM: no more requests are taken" in errors


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once(model: Path, tmp_path: Path, name: signal.Signals) -> None:
    with serve(tmp_path, str(model), *FLAGS) as process:
        url = process.url()
        stream = Client(url, COMPLETIONS, STREAM)
        next(stream.events())
        process.popen.send_signal(name)
        until(lambda: fetch(url, "/health/ready").status == 503)
        process.popen.send_signal(name)
        began = time.monotonic()
        process.end()
        assert time.monotonic() - began < 5
        assert "Traceback" not in process.err.read_text()


def test_a_signal_while_it_loads_ends_it_at_once(model: Path, tmp_path: Path) -> None:
    for arguments in ([], ["--isolate"]):
        with serve(tmp_path, str(model), *FLAGS, "--log-level", "debug", *arguments) as process:
            until(lambda process=process: listens(process.popen.pid), seconds=60)
            process.popen.send_signal(signal.SIGTERM)
            began = time.monotonic()
            process.end()
            assert time.monotonic() - began < 5
            assert "Traceback" not in process.err.read_text()


def test_ctrl_c_reaches_the_server_alone(model: Path, tmp_path: Path) -> None:
    """A terminal signals the whole group; the engine's process must not die of it while requests go on."""
    with serve(tmp_path, str(model), *FLAGS, "--isolate") as process:
        until(process.children, seconds=60)
        time.sleep(0.5)  # the engine's process imports what it needs
        os.killpg(process.popen.pid, signal.SIGINT)
        process.end()
        assert "Traceback" not in process.err.read_text()
    with serve(tmp_path, str(model), *FLAGS, "--isolate") as process:
        url = process.url()
        events = Client(url, COMPLETIONS, STREAM, timeout=120).events()
        next(events)
        os.killpg(process.popen.pid, signal.SIGINT)
        texts(events)
        assert process.end() == 0


def listens(pid: int) -> bool:
    """A process has a listening TCP socket."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
        except OSError:
            continue
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return any(row[3] == "0A" and row[9] in inodes for row in rows)


def test_a_port_in_use_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with serve(tmp_path, "no-such-model", "--port", str(port)) as process:
            assert process.end() == 2
            (line,) = process.err.read_text().splitlines()
            assert line.startswith(f"error: --port: 127.0.0.1:{port} cannot be used")
            assert "--port" in line.partition("choose another")[2]


@pytest.mark.parametrize("isolate", [False, True], ids=["thread", "isolated"])
def test_a_model_that_cannot_be_loaded_ends_it(tmp_path: Path, isolate: bool) -> None:
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in (str(tmp_path / "damaged.gguf"), str(tmp_path / "missing.gguf")):
        arguments = [name, "--port", str(port), *(["--isolate"] if isolate else [])]
        with serve(tmp_path, *arguments) as process:
            assert process.end() == 1
            *_, last = process.err.read_text().splitlines()
            assert last.startswith("error: ")
            assert name in last
            assert "Traceback" not in process.err.read_text()
            assert closed(f"http://127.0.0.1:{port}")


def test_json_logs_are_one_object_a_line(model: Path, tmp_path: Path) -> None:
    with serve(tmp_path, str(model), *FLAGS, "--isolate", "--log-format", "json") as process:
        url = process.url()
        assert fetch(url, COMPLETIONS, {**STREAM, "stream": False}, **{"x-request-id": "mine"}).status == 200
        assert fetch(url, COMPLETIONS, b"{").status == 400
        (child,) = process.children()
        os.kill(child, signal.SIGKILL)
        until(lambda: process.children() not in ([], [child]) and fetch(url, "/health/ready").status == 200, seconds=60)
        process.popen.send_signal(signal.SIGTERM)
        assert process.end() == 0
        lines = [json.loads(line) for line in process.err.read_text().splitlines()]
        assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
        (served,) = [line for line in lines if line.get("id") == "mine"]
        assert (served["status"], served["output_tokens"], served["finish"]) == (200, 200, "length")
        assert [line["level"] for line in lines if "engine's process ended" in line["message"]] == ["error"]


def test_an_isolated_engine_ends_with_its_server(model: Path, tmp_path: Path) -> None:
    """Whatever kills the server, and whatever its engine is doing then."""
    with serve(tmp_path, str(model), *FLAGS, "--isolate") as process:
        until(process.children, seconds=60)  # it loads
        (child,) = process.children()
        process.popen.kill()
        until(lambda: gone(child))
    with serve(tmp_path, str(model), *FLAGS, "--isolate") as process:
        url = process.url()
        next(Client(url, COMPLETIONS, STREAM).events())  # it computes
        (child,) = process.children()
        process.popen.kill()
        until(lambda: gone(child))
