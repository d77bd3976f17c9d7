"""The states of a server: loading, ready, full, failing, stalled, dead, draining; and what clients see in each."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from doubles.engines import check_idle
from doubles.raw_clients import CHAT, COMPLETIONS, Client, fetch, texts, until
from doubles.served import ServedModel, Serving, serving
from slipstream.core.config import EngineConfig, ServerConfig
from slipstream.core.errors import LoadError
from slipstream.engine.async_engine import AsyncEngine
from slipstream.server.run import HttpServer, listen, url_of
from slipstream.server.service import Service

BODY = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True}
STREAM = {**BODY, "stream": True}


@contextmanager
def http_server(make_engine: Callable[[], AsyncEngine], **settings: Any) -> Iterator[SimpleNamespace]:
    """What `slipstream serve` runs, over any engine, in a thread. `signal` stands for the process' signal handler."""
    config = ServerConfig(port=0, **settings)
    service = Service(config, EngineConfig(model="double"), make_engine)
    sockets = listen(config)
    url = url_of(config, sockets[0])
    server = HttpServer(service, None, url)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            server.run_on(sockets)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: server.started)
    running = SimpleNamespace(url=url, service=service, thread=thread, raised=raised)
    running.signal = lambda: server.handle_exit(signal.SIGTERM, None)
    try:
        yield running
    finally:
        server.should_exit = server.force_exit = True
        thread.join(20)
        assert not thread.is_alive()


def over(served: ServedModel, models: list[Any]) -> Callable[[], AsyncEngine]:
    """Makes an engine over a double, and puts the double into `models`."""

    def load() -> Any:
        loaded = served.engine()
        models.append(loaded.model)
        return loaded

    return lambda: AsyncEngine.over(load)


def refused(url: str, state: str) -> None:
    """It lives, is not ready and takes no request, and says that it may be tried again."""
    assert fetch(url, "/health/live").status == 200
    for answer in (fetch(url, "/health/ready"), fetch(url, "/health"), fetch(url, COMPLETIONS, BODY)):
        assert (answer.status, answer.json["error"]["code"]) == (503, state)
        assert int(answer.headers["retry-after"]) >= 1
        assert state in answer.json["error"]["message"]
    assert fetch(url, "/stats").json["state"] == state
    assert 'slipstream:ready{model_name="double"} 0.0' in fetch(url, "/metrics").body.decode()


def served_again(url: str) -> None:
    """It is ready, and serves."""
    until(lambda: fetch(url, "/health/ready").status == 200)
    assert fetch(url, COMPLETIONS, BODY).json["usage"]["completion_tokens"] == 40


def error_of(client: Client) -> dict[str, Any]:
    """The error event that ends a stream."""
    *_, last = client.events()
    error: dict[str, Any] = json.loads(last)["error"]
    return error


def test_loading_then_ready() -> None:
    go, models = threading.Event(), []  # type: ignore[var-annotated]
    make = over(ServedModel(), models)

    def slowly() -> AsyncEngine:
        assert go.wait(30)
        return make()

    with http_server(slowly) as server:
        refused(server.url, "loading")
        assert fetch(server.url, "/v1/models").status == 200
        go.set()
        served_again(server.url)


def test_a_signal_while_it_loads_ends_it_at_once() -> None:
    go = threading.Event()

    def never() -> AsyncEngine:
        go.wait()
        raise LoadError("too late")

    with http_server(never) as server:
        server.signal()
        server.thread.join(5)
        assert not server.thread.is_alive()
        assert server.raised == []
        go.set()


def test_what_loading_raises_ends_the_server() -> None:
    def fails() -> AsyncEngine:
        raise LoadError("the file is damaged")

    with http_server(fails) as server:
        server.thread.join(10)
        assert [str(error) for error in server.raised] == ["the file is damaged"]
        with pytest.raises(ConnectionRefusedError):
            fetch(server.url, "/health/live")


def test_draining_lets_open_requests_end_and_takes_no_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    models: list[Any] = []
    with http_server(over(ServedModel(step_ms=10), models)) as server:
        served_again(server.url)
        alone = fetch(server.url, COMPLETIONS, {**BODY, "seed": 1}).json["choices"][0]["text"]
        stream = Client(server.url, COMPLETIONS, {**STREAM, "seed": 1})
        whole = Client(server.url, COMPLETIONS, {**BODY, "seed": 1})
        first = next(stream.events())
        server.signal()
        until(lambda: server.service.draining)
        refused(server.url, "draining")
        assert json.loads(first)["choices"][0]["text"] + texts(stream.events()) == alone
        assert json.loads(whole.response().read())["choices"][0]["text"] == alone
        server.thread.join(10)
        assert not server.thread.is_alive()
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def test_a_drain_that_takes_too_long_ends_requests_with_an_error() -> None:
    models: list[Any] = []
    with http_server(over(ServedModel(step_ms=20), models), drain_seconds=0.2) as server:
        until(lambda: fetch(server.url, "/health/ready").status == 200)
        stream = Client(server.url, COMPLETIONS, {**STREAM, "max_tokens": 400})
        whole = Client(server.url, COMPLETIONS, {**BODY, "max_tokens": 400})
        next(stream.events())
        server.signal()
        error = error_of(stream)
        assert (error["type"], error["code"]) == ("service_unavailable_error", "draining")
        assert whole.response().status == 503
        server.thread.join(10)
        assert not server.thread.is_alive()


def test_a_second_signal_ends_it_at_once() -> None:
    models: list[Any] = []
    with http_server(over(ServedModel(step_ms=1), models)) as server:
        until(lambda: fetch(server.url, "/health/ready").status == 200)
        stream = Client(server.url, COMPLETIONS, {**STREAM, "max_tokens": 400})
        next(stream.events())
        models[0].go.clear()  # not even a step that never ends may hold it up
        server.signal()
        until(lambda: server.service.draining)
        server.signal()
        server.thread.join(6)
        assert not server.thread.is_alive()
        models[0].go.set()
        stream.close()


def test_a_full_queue_is_refused_and_recovers() -> None:
    served = ServedModel(step_ms=2, max_sequences=1, config=EngineConfig(model="double", max_queue=2))
    with serving(served) as server:
        body = {**BODY, "max_tokens": 100}
        waiting = [Client(server.url, COMPLETIONS, body)]
        until(lambda: server.engine.scheduler.running)
        waiting += [Client(server.url, COMPLETIONS, body) for _ in range(2)]
        until(lambda: len(server.engine.scheduler.waiting) == 2)
        refusal = fetch(server.url, COMPLETIONS, BODY)
        assert refusal.status == 503
        assert "retry-after" in refusal.headers
        assert "x-should-retry" not in refusal.headers
        assert "queue is full (2 requests)" in refusal.json["error"]["message"]
        assert fetch(server.url, COMPLETIONS, STREAM).status == 503  # before the stream begins, not in it
        assert fetch(server.url, "/health/ready").status == 200  # a queue is no reason to be restarted
        for client in waiting:
            assert json.loads(client.response().read())["usage"]["completion_tokens"] == 100
        served_again(server.url)


def test_a_step_that_fails_ends_the_requests_in_it(caplog: pytest.LogCaptureFixture) -> None:
    with serving(ServedModel(step_ms=2)) as server:
        stream = Client(server.url, COMPLETIONS, {**STREAM, "max_tokens": 400})
        events = stream.events()
        whole = Client(server.url, CHAT, {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True})
        next(events)
        until(lambda: len(server.engine.scheduler.running) == 2)
        assert server.model is not None
        server.model.fails = RuntimeError("boom")
        *_, last = events
        assert "boom" in json.loads(last)["error"]["message"]
        assert json.loads(last)["error"]["type"] == "server_error"
        answer = whole.response()
        assert answer.status == 500
        assert "boom" in json.loads(answer.read())["error"]["message"]
        assert any(record.exc_info for record in caplog.records)  # the log has what clients do not get
        served_again(server.url)
        server.service.loaded.worker.call(lambda: check_idle(server.engine))  # type: ignore[union-attr]
        assert server.engine.stats.failed_steps == 1


def test_an_engine_that_stalls(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(ServedModel(step_ms=1, max_sequences=2), stall_seconds=1) as server:
        assert server.model is not None
        streams = [Client(server.url, COMPLETIONS, {**STREAM, "max_tokens": 400}) for _ in range(2)]
        for stream in streams:
            next(stream.events())
        server.model.go.clear()
        waiting = Client(server.url, COMPLETIONS, BODY)
        assert fetch(server.url, "/health/ready").status == 200
        until(lambda: server.service.state == "stalled", seconds=5)
        refused(server.url, "stalled")
        for stream in streams:
            assert "has not answered" in error_of(stream)["message"]
        assert waiting.response().status == 500
        stacks = capfd.readouterr().err
        assert "most recent call first" in stacks
        assert "in forward" in stacks  # where it hangs
        server.model.go.set()
        served_again(server.url)
        server.service.loaded.worker.call(lambda: check_idle(server.engine))  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_thread_ends_is_not_ready(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(ServedModel(step_ms=1)) as server:
        stream = Client(server.url, COMPLETIONS, {**STREAM, "max_tokens": 400})
        next(stream.events())
        end_engine_thread(server)
        until(lambda: server.service.state == "dead")
        refused(server.url, "dead")
        assert "has ended" in error_of(stream)["message"]
        assert "most recent call first" in capfd.readouterr().err


def end_engine_thread(server: Serving) -> None:
    """Let the engine's thread meet what no handler catches."""

    def end() -> None:
        raise SystemExit

    worker: Any = server.service.loaded.worker  # type: ignore[union-attr]
    with worker._wake:
        worker._inbox.append(end)
        worker._wake.notify()
    worker._thread.join(10)
