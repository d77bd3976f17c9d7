"""Requests that are made to mislead: the log, the connection, the limits."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from doubles.engines import check_idle
from doubles.raw_clients import COMPLETIONS, Client, fetch, until
from doubles.served import ServedModel, Serving, serving
from slipstream.core.config import EngineConfig
from slipstream.server import app, logs, middleware
from slipstream.server.fields import fields_of
from slipstream.server.openapi import BODIES

LONG = b'{"prompt": "hello", "max_tokens": 400, "ignore_eos": true%s}'


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    config = EngineConfig(model="double", max_queue=20)
    with serving(ServedModel(step_ms=5, config=config), max_body_size=2**20) as running:
        yield running
        check_idle(running.engine)


def connect(server: Serving) -> socket.socket:
    address = httpx.URL(server.url)
    return socket.create_connection((address.host, address.port))


def post(body: bytes) -> bytes:
    lines = (
        f"POST {COMPLETIONS} HTTP/1.1",
        "Host: a",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.parametrize("more", [b"", b', "stream": true'])
@pytest.mark.parametrize("behind", [b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n", post(LONG % b"")])
def test_a_client_that_leaves_with_requests_waiting_behind_is_noticed(
    server: Serving, more: bytes, behind: bytes
) -> None:
    aborted = server.engine.stats.finished["abort"]
    connection = connect(server)
    connection.sendall(post(LONG % more))
    until(lambda: len(server.engine.scheduler.running) == 1)
    connection.sendall(behind)
    time.sleep(0.05)
    connection.close()
    until(lambda: server.engine.stats.finished["abort"] == aborted + 1, seconds=1.5)
    assert not server.engine.has_work


def test_requests_in_one_piece_are_answered_in_order(server: Serving) -> None:
    with connect(server) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n" * 5 + b"GET /nope HTTP/1.1\r\nHost: a\r\n\r\n")
        seen = b""
        while seen.count(b"HTTP/1.1 ") < 6 or not seen.endswith(b"}"):
            seen += connection.recv(65536)
        assert seen.count(b"HTTP/1.1 200") == 5
        assert seen.rindex(b"HTTP/1.1 404") > seen.rindex(b"HTTP/1.1 200")


def test_too_many_requests_behind_one_close_the_connection(server: Serving) -> None:
    with connect(server) as connection:
        connection.sendall(post(LONG % b""))
        until(lambda: len(server.engine.scheduler.running) == 1)
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n" * 50)
        while connection.recv(65536):
            pass
    until(lambda: not server.engine.has_work)


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_path_cannot_write_lines_into_the_log(server: Serving, caplog: pytest.LogCaptureFixture, form: str) -> None:
    caplog.set_level(logging.INFO)
    fetch(server.url, "/x%0A22:00:00%20INFO%20forged%1b[31m%C2%9Bx%E2%80%A8y", **{"x-forwarded-for": "1.2.3.4\tforged"})
    formatter = logs._Json() if form == "json" else logs._Text()
    until(lambda: any("forged" in record.getMessage() for record in caplog.records))
    for record in caplog.records:
        line = formatter.format(record)
        assert "\n" not in line
        assert "\x1b" not in line
        assert "\x9b" not in line
        assert "1.2.3.4" not in line


def test_names_of_page_files_are_looked_up_in_a_list(server: Serving) -> None:
    for name in ("a" * 300, "..%2Fapp.py", "%2E%2E", ".hidden", "index.html%00", "__init__.py"):
        assert fetch(server.url, f"/page/{name}").status == 404
    assert fetch(server.url, "/page/main.js").status == 200


def test_an_exception_nobody_foresaw_is_a_500_in_the_usual_shape(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(app.text_routes, "tokenizer_info", fails)
    answer = fetch(server.url, "/tokenizer_info")
    assert answer.status == 500
    assert answer.json["error"]["type"] == "server_error"
    assert answer.headers["x-request-id"]
    until(lambda: server.service.requests_by_status.get(("/tokenizer_info", 500)) == 1)
    assert fetch(server.url, "/version").status == 200


def test_a_slash_too_many_is_not_redirected_to_a_foreign_host(server: Serving) -> None:
    answer = fetch(server.url, "/health/", host="evil.example")
    assert (answer.status, "location" in answer.headers) == (404, False)


def test_a_body_that_pauses_is_given_up(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.2)
    with connect(server) as connection:
        connection.sendall(post(LONG % b"")[:-3])
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body_too_slow" in answer


def test_small_requests_pass_while_large_bodies_are_held(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "HELD_BODIES", 1)
    large = LONG % b"" + b" " * 900_000
    holding = [connect(server) for _ in range(3)]
    for connection in holding:
        connection.sendall(post(large)[:-1])
    time.sleep(0.2)
    assert fetch(server.url, COMPLETIONS, {"prompt": "a", "max_tokens": 1}).status == 200
    for connection in holding:
        connection.close()


def test_more_prompts_than_can_ever_wait_are_a_mistake_and_not_a_busy_server(server: Serving) -> None:
    answer = fetch(server.url, COMPLETIONS, {"prompt": ["a"] * 21, "max_tokens": 1})
    assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")


def test_the_error_for_an_unknown_model_names_those_there_are(server: Serving) -> None:
    answer = fetch(server.url, COMPLETIONS, {"prompt": "a", "model": "gpt"})
    assert answer.status == 404
    assert "double" in answer.json["error"]["message"]


def test_the_docs_page_names_every_field_and_loads_nothing(server: Serving) -> None:
    page = fetch(server.url, "/docs").body.decode()
    for path, body in BODIES.items():
        assert path in page
        for name in fields_of(body):
            assert f"<code>{name}</code>" in page
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page


def test_head_of_the_page(server: Serving) -> None:
    response = httpx.head(server.url + "/")
    assert (response.status_code, response.content) == (200, b"")


def test_the_log_says_that_a_stream_ended_with_an_error(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """Its status is 200, since it had begun."""
    caplog.set_level(logging.INFO)
    stream = Client(server.url, COMPLETIONS, {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True})
    events = stream.events()
    next(events)
    assert server.model is not None
    server.model.fails = RuntimeError("planted")
    assert '"error"' in list(events)[-1]
    until(lambda: any(getattr(r, "facts", {}).get("finish") == "error" for r in caplog.records))
    stream.close()
