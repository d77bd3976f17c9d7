"""HTTP clients of blocking sockets, for tests that must leave, wait or dawdle at a certain moment."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def fetch(url: str, path: str, body: Any = None, *, timeout: float = 30, **headers: str) -> Answer:
    """GET, or POST of `body` as JSON (bytes go as they are)."""
    client = Client(url, path, body, timeout=timeout, **headers)
    with closing(client):
        response = client.response()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


class Client:
    """One request on a connection of its own, which is sent when this is made."""

    def __init__(self, url: str, path: str, body: Any = None, *, timeout: float = 30, **headers: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        self.connection = HTTPConnection(address.hostname, address.port, timeout=timeout)
        self._response: HTTPResponse | None = None
        if body is None:
            self.connection.request("GET", path, headers=headers)
        else:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.connection.request("POST", path, raw, {"content-type": "application/json", **headers})

    def response(self) -> HTTPResponse:
        """The status and headers; waits for them."""
        if self._response is None:
            self._response = self.connection.getresponse()
        return self._response

    def events(self) -> Iterator[str]:
        """The data of server-sent events as they come; comments are left out."""
        response = self.response()
        assert response.status == 200, response.read()
        while line := response.readline():
            if line.startswith(b"data: "):
                yield line[6:].decode().rstrip("\n")

    def close(self) -> None:
        """Leave, whatever was sent or came."""
        if self._response is not None:
            self._response.close()
        self.connection.close()


def texts(events: Iterator[str]) -> str:
    """The joined text of a stream's first choice. Raises AssertionError for an error event or a missing end."""
    found, seen = "", ""
    for seen in events:
        if seen == "[DONE]":
            break
        chunk = json.loads(seen)
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            found += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
    assert seen == "[DONE]"
    return found


def open_socket(url: str, *, receive_buffer: int = 0) -> socket.socket:
    """A bare connection; `receive_buffer` bytes make the peer feel early that nobody reads."""
    address = urlsplit(url)
    connection = socket.socket()
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30)
    connection.connect((address.hostname, address.port))
    return connection


def request_bytes(path: str, body: Any, *, length: int | None = None) -> bytes:
    """A POST as it goes over the wire; `length` states another length than the body has."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(raw) if length is None else length}\r\n\r\n".encode() + raw


def until(condition: Callable[[], Any], *, seconds: float = 15, pause: float = 0.005) -> Any:
    """Wait until a condition holds, and return what it gave."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(pause)
    return found
