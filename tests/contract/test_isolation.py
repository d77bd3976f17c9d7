"""An engine in a process of its own: the same answers, and a server that outlives it."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from doubles.raw_clients import CHAT, COMPLETIONS, Client, fetch, texts, until
from doubles.served import ServedModel, Serving, serving
from slipstream.core.config import EngineConfig
from slipstream.core.errors import EngineDeadError, LoadError
from slipstream.engine import process
from slipstream.engine.async_engine import AsyncEngine
from slipstream.engine.process import EngineProcess

BODY = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True}
LONG = {**BODY, "max_tokens": 400}
STREAM = {**LONG, "stream": True}
CONFIG = EngineConfig(model="double")
ABORTS, ENDS_THREAD, FAILS = "!", "?", "%"


@dataclass(frozen=True)
class Crashing(ServedModel):
    """A prompt that begins with "!" aborts its process, one with "?" ends the engine's thread, "%" fails a step."""

    def engine(self, progress: Any = None) -> Any:
        loaded = super().engine(progress)
        forward = loaded.model.forward
        aborts, ends, fails = (loaded.inputs.tokenizer.encode(mark)[0] for mark in (ABORTS, ENDS_THREAD, FAILS))

        def crash(rows: Any, caches: Any) -> Any:
            begins = rows.token[(rows.position == 0) & (rows.sequence != 0)].tolist()
            if aborts in begins:
                os.abort()
            if ends in begins:
                raise SystemExit
            if fails in begins:
                raise RuntimeError("boom")
            return forward(rows, caches)

        loaded.model.forward = crash
        return loaded


@dataclass(frozen=True)
class Broken(ServedModel):
    """Cannot be loaded while a file exists; without a file its process dies while it loads."""

    file: str = ""

    def engine(self, progress: Any = None) -> Any:
        if not self.file:
            os._exit(3)
        if Path(self.file).exists():
            raise LoadError("the weights are damaged")
        return super().engine(progress)


@pytest.fixture(autouse=True, scope="module")
def importable() -> Iterator[None]:
    """The child imports the doubles, and this file."""
    here = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(here.parent), str(here)]))
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(Crashing(step_ms=2), isolate=True, stall_seconds=1) as running:
        yield running


def process_of(server: Serving) -> EngineProcess:
    worker = server.service.loaded.worker  # type: ignore[union-attr]
    assert isinstance(worker, EngineProcess)
    return worker


def ready(server: Serving) -> bool:
    return fetch(server.url, "/health/ready").status == 200


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def usage(client: Client) -> int:
    tokens: int = json.loads(client.response().read())["usage"]["completion_tokens"]
    return tokens


def test_the_same_tokens_isolated_or_not(server: Serving) -> None:
    until(lambda: ready(server))
    bodies = [
        {**BODY, "seed": 3},
        {**BODY, "temperature": 0, "logprobs": 2, "echo": True},
        {**BODY, "seed": 4, "n": 3, "presence_penalty": 0.5, "stop": ["a"], "ignore_eos": False},
        {**BODY, "seed": 5, "prompt": ["one", "two"]},
    ]
    with serving(ServedModel()) as inside:
        for body in bodies:
            ours, theirs = (fetch(url, COMPLETIONS, body).json for url in (server.url, inside.url))
            assert ours["choices"] == theirs["choices"]
            assert ours["usage"] == theirs["usage"]
            pieces = Client(server.url, COMPLETIONS, {**body, "stream": True})
            if body.get("n", 1) == 1 and isinstance(body["prompt"], str):
                assert texts(pieces.events()) == theirs["choices"][0]["text"]
            pieces.close()


def test_metrics_and_stats_are_those_of_the_child(server: Serving) -> None:
    until(lambda: ready(server))
    before = fetch(server.url, "/stats").json["output_tokens"]
    assert fetch(server.url, COMPLETIONS, BODY).json["usage"]["completion_tokens"] == 40
    # The child tells its counts twice a second.
    until(lambda: fetch(server.url, "/stats").json["output_tokens"] >= before + 40)
    until(lambda: fetch(server.url, "/stats").json["running"] == 0)
    stats = fetch(server.url, "/stats").json
    assert (stats["running"], stats["waiting"], stats["cache_usage"]) == (0, 0, 0)
    assert (stats["state"], stats["device"]) == ("ready", "a double")
    assert stats["steps"] > 0
    metrics = fetch(server.url, "/metrics").body.decode()
    assert f'vllm:generation_tokens_total{{model_name="double"}} {stats["output_tokens"]}.0' in metrics
    stream = Client(server.url, COMPLETIONS, STREAM)
    until(lambda: fetch(server.url, "/stats").json["running"] == 1)
    aborted = server.service.disconnects
    stream.close()
    until(lambda: server.service.disconnects == aborted + 1)
    until(lambda: fetch(server.url, "/stats").json["running"] == 0)
    assert 'finished_reason="abort"' in fetch(server.url, "/metrics").body.decode()


def check_restart(server: Serving, old: int, stream: Client, whole: Client) -> None:
    """Requests of the old process failed, another process serves, and what came meanwhile waited for it."""
    worker = process_of(server)
    *_, last = stream.events()
    error = json.loads(last)["error"]
    assert error["type"] == "server_error"
    assert "engine" in error["message"]
    assert whole.response().status == 500
    until(lambda: worker.state == "restarting" or (worker.state == "ready" and worker.pid != old))
    began = time.monotonic()
    meanwhile = Client(server.url, COMPLETIONS, BODY)
    if worker.state == "restarting":
        assert fetch(server.url, "/health/ready").json["error"]["code"] == "restarting"
        assert fetch(server.url, "/health/live").status == 200
    assert usage(meanwhile) == 40
    assert time.monotonic() - began < 15  # 3 s on an idle machine, nearly all of it Python's imports
    until(lambda: ready(server))
    assert worker.pid != old
    assert not runs(old)
    until(lambda: fetch(server.url, "/stats").json["running"] == 0)


def busy(server: Serving) -> tuple[int, Client, Client]:
    """The process, and a stream and a whole request that it works on."""
    until(lambda: ready(server))
    stream, whole = Client(server.url, COMPLETIONS, STREAM), Client(server.url, CHAT, CHATTING)
    next(stream.events())
    until(lambda: fetch(server.url, "/stats").json["running"] == 2)
    pid = process_of(server).pid
    assert pid is not None
    return pid, stream, whole


def test_what_the_process_logs_is_in_the_log_of_the_server(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    until(lambda: ready(server))
    pid = process_of(server).pid
    assert "boom" in fetch(server.url, COMPLETIONS, {**BODY, "prompt": FAILS}).json["error"]["message"]
    until(lambda: "engine process: " in caplog.text)
    assert 'RuntimeError("boom")' in caplog.text
    assert fetch(server.url, COMPLETIONS, BODY).status == 200
    assert process_of(server).pid == pid


CHATTING = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "ignore_eos": True}


def test_a_killed_process_is_started_again(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    pid, stream, whole = busy(server)
    os.kill(pid, signal.SIGKILL)
    check_restart(server, pid, stream, whole)
    assert "SIGKILL" in caplog.text


def test_any_signal_may_end_the_process(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """Real-time signals have no names."""
    pid, stream, whole = busy(server)
    os.kill(pid, signal.SIGRTMIN + 6)
    check_restart(server, pid, stream, whole)
    assert f"signal {signal.SIGRTMIN + 6}" in caplog.text


@pytest.mark.slow
def test_a_process_that_hangs_while_it_loads_is_replaced(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    pid, stream, whole = busy(server)
    monkeypatch.setattr(process, "START_SILENCE", 15.0)
    os.kill(pid, signal.SIGKILL)
    worker = server.service.loaded.worker  # type: ignore[union-attr]
    until(lambda: worker.pid != pid)
    os.kill(worker.pid, signal.SIGSTOP)
    stopped = worker.pid
    until(lambda: worker.pid != stopped, seconds=60)
    stream.close()
    whole.close()
    until(lambda: ready(server), seconds=60)
    assert fetch(server.url, COMPLETIONS, BODY).status == 200


@pytest.mark.slow
def test_a_process_that_hangs_is_replaced(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    pid, stream, whole = busy(server)
    os.kill(pid, signal.SIGSTOP)
    check_restart(server, pid, stream, whole)
    assert "the engine has not answered" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("mark", [ABORTS, ENDS_THREAD])
def test_a_request_that_kills_the_process_takes_nobody_else_for_long(server: Serving, mark: str) -> None:
    pid, stream, whole = busy(server)
    poison = Client(server.url, COMPLETIONS, {**BODY, "prompt": mark})
    assert poison.response().status == 500
    check_restart(server, pid, stream, whole)


@pytest.mark.slow
def test_clients_may_leave_while_it_restarts(server: Serving) -> None:
    pid, stream, whole = busy(server)
    os.kill(pid, signal.SIGKILL)
    until(lambda: process_of(server).state == "restarting")
    before = server.service.disconnects
    gone = [Client(server.url, COMPLETIONS, {**LONG, "stream": stream}) for stream in (True, False)]
    until(lambda: len(process_of(server)._open) == 2)
    for client in gone:
        client.close()
    until(lambda: server.service.disconnects == before + 2)
    assert process_of(server)._open == {}
    check_restart(server, pid, stream, whole)
    until(lambda: fetch(server.url, "/stats").json["output_tokens"] > 0)
    assert fetch(server.url, "/stats").json["output_tokens"] == 40  # nothing of those who left


@pytest.mark.slow
def test_a_full_queue_is_refused_while_it_restarts() -> None:
    with serving(ServedModel(config=EngineConfig(model="double", max_queue=2)), isolate=True) as server:
        worker = process_of(server)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        until(lambda: worker.state == "restarting")
        waiting = [Client(server.url, COMPLETIONS, BODY) for _ in range(2)]
        until(lambda: len(worker._open) == 2)
        refusal = fetch(server.url, COMPLETIONS, BODY)
        assert (refusal.status, "retry-after" in refusal.headers) == (503, True)
        assert [usage(client) for client in waiting] == [40, 40]


@pytest.mark.slow
def test_stopping_leaves_no_process_whenever_it_happens() -> None:
    for restarting in (False, True):
        with serving(ServedModel(), isolate=True) as server:
            worker = process_of(server)
            pid = worker.pid
            assert pid is not None
            if restarting:
                os.kill(pid, signal.SIGKILL)
                pid = until(lambda worker=worker, pid=pid: worker.pid if worker.pid != pid else None)
            assert runs(pid)
        assert not runs(pid)
        assert worker.state == "dead"


@pytest.mark.slow
def test_what_loading_raises_in_the_process_is_raised(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    (file := tmp_path / "file").touch()
    with pytest.raises(LoadError, match="the weights are damaged"):
        AsyncEngine.isolated(Broken(file=str(file)))  # type: ignore[arg-type]
    with pytest.raises(EngineDeadError, match="ended while it loaded"):
        AsyncEngine.isolated(Broken())  # type: ignore[arg-type]
    until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.slow
def test_a_process_that_cannot_be_started_again_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "file"
    with serving(Broken(step_ms=2, file=str(file)), isolate=True) as server:
        worker = process_of(server)
        file.touch()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        until(lambda: worker.state == "restarting")
        waiting = Client(server.url, COMPLETIONS, BODY, timeout=120)
        assert waiting.response().status == 500
        assert worker.state == "dead"
        until(lambda: fetch(server.url, "/health/ready").json["error"]["code"] == "dead")
        assert fetch(server.url, COMPLETIONS, BODY).status == 503
        assert caplog.text.count("the weights are damaged") == 3
