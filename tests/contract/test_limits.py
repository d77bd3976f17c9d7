"""What no client can make the server hold or compute, however large the request."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import httpx
import pytest

from doubles.engines import check_idle
from doubles.raw_clients import until
from doubles.served import ServedModel, Serving, serving
from slipstream.server import middleware, text_routes
from slipstream.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(ServedModel(max_model_len=128), max_body_size=2**20) as running:
        yield running
        check_idle(running.engine)


def error_of(response: httpx.Response) -> dict[str, str]:
    return dict(response.json()["error"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", lambda text: {"prompt": text}, "prompt"),
        ("/v1/completions", lambda text: {"prompt": ["short", text]}, "prompt"),
        ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}, "messages"),
        (
            "/v1/chat/completions",
            lambda text: {"messages": [{"role": "user", "content": text[:3000]}] * 300},
            "messages",
        ),
        ("/generate", lambda text: {"text": text}, "text"),
    ],
)
def test_a_hopelessly_long_prompt_is_refused_by_its_beginning(
    server: Serving, monkeypatch: pytest.MonkeyPatch, path: str, body: object, param: str
) -> None:
    seen = []
    encode = Tokenizer.encode

    def watched(self: Tokenizer, text: str, **options: object) -> list[int]:
        seen.append(len(text))
        return encode(self, text, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Tokenizer, "encode", watched)
    response = httpx.post(server.url + path, json=body("long words " * 80_000))  # type: ignore[operator]
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "128 tokens" in error["message"]
    assert max(seen) <= 16 * 128, "the whole text was tokenized"


def test_a_long_text_of_few_tokens_is_not_refused_by_its_beginning() -> None:
    """Tokens may be long; only their number counts."""
    with serving(ServedModel(max_model_len=512)) as running:
        # " the" is one token of four characters: 400 of them fit although the text is 1,600 characters long.
        response = httpx.post(running.url + "/v1/completions", json={"prompt": " the" * 400, "max_tokens": 1})
        assert response.status_code == 200
        assert response.json()["usage"]["prompt_tokens"] == 400


def test_tokenize_has_a_limit(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_routes, "MAX_CHARACTERS", 100)
    assert httpx.post(server.url + "/tokenize", json={"prompt": "a" * 100}).json()["count"] == 100
    error = error_of(httpx.post(server.url + "/tokenize", json={"prompt": "a" * 101}))
    assert error["param"] == "prompt"
    assert "at most 100" in error["message"]


def test_all_bodies_together_have_a_limit(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-sent bodies are held; one more large one is refused until they are gone."""
    monkeypatch.setattr(middleware, "HELD_BODIES", 2)
    large = json.dumps({"prompt": "a", "max_tokens": 1}).encode() + b" " * 700_000
    address = httpx.URL(server.url)
    lines = ("POST /v1/completions HTTP/1.1", "Host: a", "Content-Type: application/json")
    head = "\r\n".join([*lines, f"Content-Length: {len(large)}", "", ""])
    holding = [socket.create_connection((address.host, address.port)) for _ in range(2)]
    for connection in holding:
        connection.sendall(head.encode() + large[:-1])

    def send() -> int:
        headers = {"content-type": "application/json"}
        return httpx.post(server.url + "/v1/completions", content=large, headers=headers, timeout=60).status_code

    until(lambda: send() == 503)
    for connection in holding:
        connection.close()
    until(lambda: send() == 200)


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_probes_may_use_head(server: Serving, path: str) -> None:
    response = httpx.head(server.url + path)
    assert (response.status_code, response.content) == (200, b"")
