"""A client that goes away ends its requests at once, and nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from doubles.engines import check_idle
from doubles.raw_clients import CHAT, COMPLETIONS, GENERATE, Client, fetch, open_socket, request_bytes, until
from doubles.served import ServedModel, Serving, serving
from slipstream.server import responses

LONG = {"max_tokens": 400, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "hello"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, **LONG}),
    "chat with n": (CHAT, {"messages": MESSAGES, "n": 3, **LONG}),
    "completion": (COMPLETIONS, {"prompt": "hello", **LONG}),
    "several prompts": (COMPLETIONS, {"prompt": ["hello", "world", "again"], "n": 2, **LONG}),
    "generate": (GENERATE, {"text": "hello", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(ServedModel(step_ms=1)) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left(server: Serving, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Every test ends with an idle engine and a log without complaints."""
    caplog.set_level(logging.INFO)
    assert server.model is not None
    yield
    server.model.go.set()
    until(lambda: not server.engine.has_work)
    server.service.loaded.worker.call(lambda: check_idle(server.engine))  # type: ignore[union-attr]
    stats = fetch(server.url, "/stats").json
    assert (stats["running"], stats["waiting"], stats["cache_usage"]) == (0, 0, 0)
    until(lambda: server.service.idle.is_set())
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


def hold(server: Serving) -> int:
    """Stop the engine inside of a step. -> the steps that are done."""
    assert server.model is not None
    server.model.go.clear()
    until(lambda: server.service.loaded.worker.busy_for > 0.15)  # type: ignore[union-attr]
    return server.engine.stats.steps


def go_on(server: Serving) -> None:
    """Let it go on, and wait until it has nothing to do."""
    assert server.model is not None
    server.model.go.set()
    until(lambda: not server.engine.has_work)


def leave(server: Serving, *clients: Client) -> None:
    """Close connections, and wait until the server has noticed."""
    before = server.service.disconnects
    for client in clients:
        client.close()
    until(lambda: server.service.disconnects == before + len(clients))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_client_that_leaves_while_tokens_come(server, caplog, name, stream):
    path, body = REQUESTS[name]
    aborted = server.engine.stats.finished["abort"]
    made = server.engine.stats.output_tokens
    client = Client(server.url, path, {**body, "stream": stream})
    if stream:
        next(client.events())
    until(lambda: server.engine.stats.output_tokens >= made + 8)
    steps = hold(server)
    leave(server, client)
    go_on(server)
    assert server.engine.stats.steps <= steps + 1  # the step that it was in
    requests = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    assert server.engine.stats.finished["abort"] == aborted + requests
    (line,) = [record.facts for record in caplog.records if getattr(record, "facts", {}).get("disconnected")]
    assert line["status"] == (200 if stream else 499)
    assert line["path"] == path


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_while_its_prompt_is_computed(server, stream):
    made = server.engine.stats.output_tokens
    server.model.go.clear()
    client = Client(server.url, COMPLETIONS, {"prompt": "x" * 400, **LONG, "max_tokens": 9, "stream": stream})
    steps = hold(server)
    leave(server, client)
    go_on(server)
    assert server.engine.stats.steps <= steps + 1
    assert server.engine.stats.output_tokens == made


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_clients_that_leave_while_they_wait_for_a_place(stream):
    with serving(ServedModel(step_ms=1, max_sequences=1)) as server:
        body = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True}
        first = Client(server.url, COMPLETIONS, body)
        until(lambda: server.engine.stats.output_tokens > 0)
        hold(server)
        queued = [Client(server.url, COMPLETIONS, {**body, "n": 2, "stream": stream}) for _ in range(3)]
        worker = server.service.loaded.worker
        until(lambda: len(worker._inbox) == 3)
        leave(server, *queued)
        server.model.go.set()
        assert json.loads(first.response().read())["usage"]["completion_tokens"] == 40
        go_on(server)
        assert server.engine.stats.output_tokens == 40
        worker.call(lambda: check_idle(server.engine))


def test_a_client_with_a_large_body_that_leaves(server):
    """The server stops reading while a large body waits to be taken; it must read again to see the end."""
    made = server.engine.stats.output_tokens
    client = Client(server.url, COMPLETIONS, json.dumps({"prompt": "hello", **LONG}).encode() + b" " * 900_000)
    until(lambda: server.engine.stats.output_tokens > made)
    steps = hold(server)
    leave(server, client)
    go_on(server)
    assert server.engine.stats.steps <= steps + 1


def test_a_client_that_leaves_in_its_second_request(server):
    body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
    client = Client(server.url, COMPLETIONS, body)
    assert client.response().read()
    made = server.engine.stats.output_tokens
    client.connection.request("POST", CHAT, json.dumps(REQUESTS["chat"][1]), {"content-type": "application/json"})
    until(lambda: server.engine.stats.output_tokens > made)
    steps = hold(server)
    leave(server, client)
    go_on(server)
    assert server.engine.stats.steps <= steps + 1


@pytest.mark.parametrize("sent", [0, 1, 900_000])
@pytest.mark.parametrize("how", ["length", "chunked"])
def test_a_client_that_leaves_while_it_sends(server, caplog, sent, how):
    before = server.service.disconnects
    raw = b'{"prompt": "' + b"x" * sent
    connection = open_socket(server.url)
    if how == "length":
        connection.sendall(request_bytes(COMPLETIONS, raw, length=len(raw) + 100))
    else:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}transfer-encoding: chunked\r\n\r\n{len(raw):x}\r\n".encode() + raw + b"\r\n")
    connection.close()
    until(lambda: server.service.disconnects == before + 1)
    (line,) = [record.facts for record in caplog.records if getattr(record, "facts", {}).get("disconnected")]
    assert line["status"] == 499


def test_a_client_that_does_not_read_and_then_leaves(server):
    logprobs = {"logprobs": True, "top_logprobs": 20}
    body = {"messages": MESSAGES, **LONG, "n": 8, "stream": True, **logprobs}
    before, steps = server.service.disconnects, server.engine.stats.steps
    connection = open_socket(server.url, receive_buffer=2048)
    connection.sendall(request_bytes(CHAT, body))
    until(lambda: server.engine.stats.steps > steps + 60)
    assert server.service.disconnects == before
    # Data that nobody read makes the kernel reset the connection.
    connection.close()
    until(lambda: server.service.disconnects == before + 1)


def test_a_client_that_resets_its_connection(server):
    before, made = server.service.disconnects, server.engine.stats.output_tokens
    connection = open_socket(server.url)
    connection.sendall(request_bytes(CHAT, {"messages": MESSAGES, **LONG}))
    until(lambda: server.engine.stats.output_tokens > made)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    connection.close()
    until(lambda: server.service.disconnects == before + 1)


def test_a_client_that_leaves_after_its_answer_is_no_disconnect(server):
    before = server.service.disconnects
    body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
    for stream in (True, False):
        client = Client(server.url, COMPLETIONS, {**body, "stream": stream})
        client.response().read()
        client.close()
    assert fetch(server.url, COMPLETIONS, body).json["usage"]["completion_tokens"] == 3
    assert server.service.disconnects == before


def test_disconnects_are_counted_by_metrics(server):
    leave(server, Client(server.url, CHAT, REQUESTS["chat"][1]))
    shown = fetch(server.url, "/metrics").body.decode()
    assert f'slipstream:http_disconnects_total{{model_name="double"}} {server.service.disconnects}.0' in shown
    assert 'slipstream:http_requests_total{route="/v1/chat/completions",status="499"}' in shown


def test_others_do_not_notice(server):
    """The tokens of a request stay the same while its neighbours come and leave."""
    body = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True, "seed": 5}
    alone = fetch(server.url, COMPLETIONS, body).json["choices"][0]["text"]
    client = Client(server.url, COMPLETIONS, body)
    for name in REQUESTS:
        made = server.engine.stats.output_tokens
        neighbour = Client(server.url, REQUESTS[name][0], {**REQUESTS[name][1], "stream": True})
        until(lambda made=made: server.engine.stats.output_tokens > made)
        leave(server, neighbour)
    assert json.loads(client.response().read())["choices"][0]["text"] == alone


def test_a_stream_that_cannot_send_a_comment_is_closed(monkeypatch):
    """The generator behind the stream waits for its next event while a comment is stuck on the way to the client."""
    monkeypatch.setattr(responses, "KEEP_ALIVE", 0.01)
    log: list[str] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.sleep(60)
            yield b"never"
        finally:
            log.append("closed")

    async def main() -> None:
        stuck = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await stuck.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message.get("body"):
                stuck.set()
                await asyncio.sleep(60)

        scope: dict[str, Any] = {"type": "http"}
        await responses.EventStream(events)(scope, receive, send)
        assert scope["slipstream.disconnected"]

    asyncio.run(main())
    assert log == ["closed"]
