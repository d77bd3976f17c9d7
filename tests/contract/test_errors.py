"""Wrong requests: the status, the field and the code that each gets, and that nothing of them stays behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from doubles.contract_model import ContractModel, check_nothing_left
from doubles.served import Serving, serving
from slipstream.server.errors import MAX_SHOWN

TALK = [{"role": "user", "content": "hello"}]
CHAT, TEXT, GENERATE, TOKENIZE, DETOKENIZE = (
    *("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize"),
)
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TALK, "max_tokens": 4},
    TEXT: {"prompt": "hello", "max_tokens": 4},
    GENERATE: {"text": "hello", "sampling_params": {"max_new_tokens": 4}},
    TOKENIZE: {"prompt": "hello"},
    DETOKENIZE: {"tokens": [104]},
}
KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
LONG = "x" * 600
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]


def fields(**changed: Any) -> dict[str, Any]:
    return changed


def params(**changed: Any) -> dict[str, Any]:
    """Fields of /generate's sampling_params."""
    return {"sampling_params": {"max_new_tokens": 4, **changed}}


# What is changed in the plain request, and the field that must be named.
RANGES: list[tuple[dict[str, Any], str]] = [
    (fields(n=0), "n"),
    (fields(n=129), "n"),
    (fields(temperature=-1), "temperature"),
    (fields(top_p=0), "top_p"),
    (fields(top_p=1.5), "top_p"),
    (fields(top_k=-2), "top_k"),
    (fields(min_p=2), "min_p"),
    (fields(typical_p=0), "typical_p"),
    (fields(frequency_penalty=3), "frequency_penalty"),
    (fields(presence_penalty=-3), "presence_penalty"),
    (fields(repetition_penalty=0), "repetition_penalty"),
    (fields(seed=2**64), "seed"),
    (fields(stop=[str(i) for i in range(17)]), "stop"),
    (fields(stop=[""]), "stop"),
    (fields(stop="a" * 1025), "stop"),
    (fields(stop=["b", "a" * 1025]), "stop"),
    (fields(stop_token_ids=[9999]), "stop_token_ids"),
    (fields(logit_bias={"9999": 1}), "logit_bias"),
    (fields(logit_bias={"1": 101}), "logit_bias"),
    (fields(logit_bias={"one": 1}), "logit_bias"),
    (fields(allowed_token_ids=[]), "allowed_token_ids"),
    (fields(allowed_token_ids=[-1]), "allowed_token_ids"),
    (fields(bad_words=[" "]), "bad_words"),
    (fields(bad_words=["a"] * 1025), "bad_words"),
    (fields(bad_words=["a" * 1025] * 16), "bad_words"),
    (fields(stop_token_ids=[1] * 1025), "stop_token_ids"),
    (fields(allowed_token_ids=[1] * 1025), "allowed_token_ids"),
    (fields(min_tokens=5), "min_tokens"),
    (fields(min_tokens=-1), "min_tokens"),
    (fields(max_tokens=-1), "max_tokens"),
    (fields(prompt_logprobs=21), "prompt_logprobs"),
    (fields(cache_salt=""), "cache_salt"),
    (fields(request_id="x" * 129), "request_id"),
    (fields(request_id=""), "request_id"),
    (fields(stream_options={"include_usage": True}), "stream_options"),
    (fields(stream=True, stream_options={"include_usag": True}), "stream_options.include_usag"),
    (fields(allowed_token_ids=[97], bad_words=["a"]), "allowed_token_ids"),
    (fields(allowed_token_ids=[97], bad_words=["a"], stream=True), "allowed_token_ids"),
    (fields(no_such=1), "no_such"),
    (fields(best_of=2), "best_of"),
]
WRONG: list[tuple[str, dict[str, Any], str]] = [
    *((route, changed, name) for route in (CHAT, TEXT) for changed, name in RANGES),
    (CHAT, fields(messages=None), "messages"),
    (CHAT, fields(messages=[]), "messages"),
    (CHAT, fields(messages=["hello"]), "messages[0]"),
    (CHAT, fields(messages=[{"role": "nobody", "content": "x"}]), "messages[0].role"),
    (CHAT, fields(messages=[{"role": "user"}]), "messages[0].content"),
    (CHAT, fields(messages=[{"content": "x"}]), "messages[0].role"),
    (CHAT, fields(messages=[{"role": "user", "content": 1}]), "messages[0].content"),
    (CHAT, fields(messages=IMAGE), "messages[0].content[0].type"),
    (CHAT, fields(messages=[{"role": "user", "content": "refuse me"}]), "messages"),
    (CHAT, fields(chat_template_kwargs={"tools": []}), "chat_template_kwargs"),
    (CHAT, fields(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
    (CHAT, fields(chat_template_kwargs={"bos_token": "x"}), "chat_template_kwargs"),
    (CHAT, fields(chat_template_kwargs={"style": "dry", "stile": 1}), "chat_template_kwargs"),
    (CHAT, fields(chat_template_kwargs={"message": 1}), "chat_template_kwargs"),
    (CHAT, fields(top_logprobs=2), "top_logprobs"),
    (CHAT, fields(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, fields(max_completion_tokens=5), "max_tokens"),
    (CHAT, fields(max_tokens=None, max_completion_tokens=-1), "max_completion_tokens"),
    (CHAT, fields(cache_salt="a", prompt_cache_key="b"), "prompt_cache_key"),
    (CHAT, fields(prompt_cache_key=""), "prompt_cache_key"),
    (CHAT, fields(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
    (CHAT, fields(tools=[{"type": "function"}]), "tools"),
    (CHAT, fields(response_format={"type": "json_object"}), "response_format"),
    (TEXT, fields(prompt=None), "prompt"),
    (TEXT, fields(prompt="", add_special_tokens=False), "prompt"),
    (TEXT, fields(prompt=[]), "prompt"),
    (TEXT, fields(prompt=[[]]), "prompt"),
    (TEXT, fields(prompt=[1, "a"]), "prompt"),
    (TEXT, fields(prompt=["a", 1]), "prompt"),
    (TEXT, fields(prompt=[True]), "prompt"),
    (TEXT, fields(prompt=[9999]), "prompt"),
    (TEXT, fields(prompt=[[1, -1]]), "prompt"),
    (TEXT, fields(prompt=[{"prompt": "a"}]), "prompt"),
    (TEXT, fields(prompt=["a"] * 1025), "prompt"),
    (TEXT, fields(prompt=[[1]] * 1025), "prompt"),
    (TEXT, fields(prompt=["a"] * 513, n=2), "n"),
    (TEXT, fields(prompt=["a"] * 1024, n=128), "n"),
    (TEXT, fields(prompt=[[1]] * 9, n=128), "n"),
    (TEXT, fields(logprobs=21), "logprobs"),
    (TEXT, fields(logprobs=-1, echo=True), "logprobs"),
    (TEXT, fields(suffix="x"), "suffix"),
    (TEXT, fields(max_tokens=None, min_tokens=17), "min_tokens"),
    (GENERATE, fields(text=None), "text"),
    (GENERATE, fields(input_ids=[1]), "text"),
    (GENERATE, fields(text=[]), "text"),
    (GENERATE, fields(text=None, input_ids=[]), "input_ids"),
    (GENERATE, fields(text=None, input_ids=["a"]), "input_ids"),
    (GENERATE, fields(text=None, input_ids=[{"prompt": "a"}]), "input_ids"),
    (GENERATE, fields(text=None, input_ids=[[1], 2]), "input_ids"),
    (GENERATE, fields(text=None, input_ids=[9999]), "input_ids"),
    (GENERATE, fields(text=["a", "b"], rid=["x"]), "rid"),
    (GENERATE, fields(text=["a", "b"], sampling_params=[{}]), "sampling_params"),
    (GENERATE, fields(return_logprob=[True, True]), "return_logprob"),
    (GENERATE, fields(return_logprob=True, top_logprobs_num=21), "top_logprobs_num"),
    (GENERATE, fields(top_logprobs_num=-1), "top_logprobs_num"),
    (GENERATE, fields(return_logprob=True, logprob_start_len=-2), "logprob_start_len"),
    (GENERATE, fields(rid=""), "rid"),
    (GENERATE, fields(rid="x" * 129), "rid"),
    (GENERATE, fields(extra_key=""), "extra_key"),
    (GENERATE, fields(image_data="x"), "image_data"),
    (GENERATE, params(n=0), "sampling_params.n"),
    (GENERATE, params(stop="a" * 1025), "sampling_params.stop"),
    (GENERATE, fields(text=["a"] * 1025), "text"),
    (GENERATE, fields(text=["a"] * 1025, return_logprob=[True]), "text"),
    (GENERATE, fields(text=None, input_ids=[[1]] * 1025), "input_ids"),
    (GENERATE, fields(text=None, input_ids=["a"] * 1025), "input_ids"),
    (GENERATE, {"text": ["a"] * 513, **params(n=2)}, "sampling_params.n"),
    (GENERATE, fields(text=["a"] * 9, sampling_params=[{"n": 128}] * 8 + [{}]), "sampling_params.n"),
    (GENERATE, params(max_new_tokens=-1), "sampling_params.max_new_tokens"),
    (GENERATE, params(min_new_tokens=5), "sampling_params.min_new_tokens"),
    (GENERATE, params(max_new_tokens=None, min_new_tokens=129), "sampling_params.min_new_tokens"),
    (GENERATE, params(sampling_seed=2**64), "sampling_params.sampling_seed"),
    (GENERATE, params(stop=[""]), "sampling_params.stop"),
    (GENERATE, params(regex="a"), "sampling_params.regex"),
    (GENERATE, params(stop_token_ids=list(range(267)), min_new_tokens=1), "sampling_params.min_new_tokens"),
    (TOKENIZE, fields(prompt=None), "prompt"),
    (TOKENIZE, fields(messages=TALK), "prompt"),
    (TOKENIZE, fields(prompt=None, messages=TALK, add_special_tokens=True), "add_special_tokens"),
    (TOKENIZE, fields(prompt=None, messages=TALK, chat_template_kwargs={"stile": 1}), "chat_template_kwargs"),
    (TOKENIZE, fields(add_generation_prompt=True), "add_generation_prompt"),
    (TOKENIZE, fields(chat_template_kwargs={}), "chat_template_kwargs"),
    (DETOKENIZE, fields(tokens=None), "tokens"),
    (DETOKENIZE, fields(tokens=[9999]), "tokens"),
    (DETOKENIZE, fields(tokens=[-1]), "tokens"),
]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response, whose shape and headers are checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    assert response.headers.get("x-should-retry") == "false"
    document = response.json()
    assert set(document) == {"error"}
    error: dict[str, Any] = document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == KINDS.get(status, "invalid_request_error")
    assert error["message"]
    assert len(error["message"]) <= MAX_SHOWN
    return error


@pytest.fixture(autouse=True)
def _nothing_stays(server: Serving) -> Iterator[None]:
    yield
    check_nothing_left(server)


@pytest.mark.parametrize(("route", "changed", "name"), WRONG, ids=lambda value: json.dumps(value)[:60])
def test_wrong_field_is_named(http: httpx.Client, route: str, changed: dict[str, Any], name: str) -> None:
    error = error_of(http.post(route, json={**PLAIN[route], **changed}), 400)
    assert error["param"] == name
    assert error["code"] is None


@pytest.mark.parametrize("route", PLAIN)
def test_bodies_that_are_no_objects(http: httpx.Client, route: str) -> None:
    head = {"content-type": "application/json"}
    for raw in (
        b"",
        b"{",
        b"nothing",
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
    ):
        error_of(http.post(route, content=raw, headers=head), 400)
    for document in (None, [], [{}], "text", 1, True):
        raw = json.dumps(document).encode()
        assert "object" in error_of(http.post(route, content=raw, headers=head), 400)["message"]


@pytest.mark.parametrize("route", [CHAT, TEXT, DETOKENIZE])
def test_missing_field_is_named(http: httpx.Client, route: str) -> None:
    name = next(iter(PLAIN[route]))
    error = error_of(http.post(route, json={}), 400)
    assert error["param"] == name
    assert "required" in error["message"]


TOO_LONG: list[tuple[str, dict[str, Any], str, int]] = [
    (CHAT, fields(messages=[{"role": "user", "content": LONG}], max_tokens=None), "messages", 620),
    (CHAT, fields(messages=[{"role": "user", "content": LONG}]), "messages", 623),
    (CHAT, fields(max_tokens=600), "max_tokens", 624),
    (CHAT, fields(max_tokens=None, min_tokens=500), "min_tokens", 524),
    (CHAT, fields(max_tokens=None, max_completion_tokens=600), "max_completion_tokens", 624),
    (TEXT, fields(prompt=LONG, max_tokens=None), "prompt", 602),
    (TEXT, fields(prompt=[[1], [1] * 600], max_tokens=2), "prompt", 602),
    (TEXT, fields(max_tokens=600), "max_tokens", 606),
    (GENERATE, fields(text=LONG), "text", 605),
    (GENERATE, fields(text=None, input_ids=[1] * 600), "input_ids", 604),
    (GENERATE, params(max_new_tokens=600), "sampling_params.max_new_tokens", 606),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "changed", "name", "needs"), TOO_LONG, ids=lambda value: json.dumps(value)[:40])
def test_what_does_not_fit_the_context(
    http: httpx.Client, route: str, changed: dict[str, Any], name: str, needs: int, stream: bool
) -> None:
    error = error_of(http.post(route, json={**PLAIN[route], **changed, "stream": stream}), 400)
    assert (error["param"], error["code"]) == (name, "context_length_exceeded")
    assert f" {needs} " in error["message"]
    assert " 512 " in error["message"]


@pytest.mark.parametrize("route", [CHAT, TEXT, TOKENIZE, DETOKENIZE])
def test_unknown_model(http: httpx.Client, route: str) -> None:
    error = error_of(http.post(route, json={**PLAIN[route], "model": "other"}), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    error_of(http.post(route, json={**PLAIN[route], "model": "x" * 100_000}), 404)


@pytest.mark.parametrize("route", PLAIN)
def test_content_type(http: httpx.Client, route: str) -> None:
    raw = json.dumps(PLAIN[route]).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""):
        error_of(http.post(route, content=raw, headers={"content-type": kind} if kind else {}), 415)
    for kind in ("application/json", "Application/JSON; charset=utf-8"):
        assert http.post(route, content=raw, headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD"])
@pytest.mark.parametrize("route", PLAIN)
def test_method_that_a_route_does_not_have(http: httpx.Client, route: str, method: str) -> None:
    response = http.request(method, route)
    assert response.headers["allow"] == "POST"
    if method == "HEAD":
        assert response.status_code == 405
    else:
        error_of(response, 405)


def test_paths_that_are_not_there(http: httpx.Client) -> None:
    for path in ("/nothing", "/v1", "/v1/chat", "/page/nothing.js", "/page/..%2fapp.py", "/v1/embeddings"):
        error_of(http.get(path), 404)
    assert error_of(http.get("/v1/models/other/name"), 404)["code"] == "model_not_found"
    assert http.post("/v1/models").headers["allow"] == "GET"


def test_body_that_is_too_large() -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 100

    with serving(ContractModel(), max_body_size=2000) as running, httpx.Client(base_url=running.url) as http:
        head = {"content-type": "application/json"}
        for route in PLAIN:
            assert error_of(http.post(route, content=b" " * 2001, headers=head), 413)["code"] == "body_too_large"
            error = error_of(http.post(route, content=chunks(), headers=head), 413)
            assert "2000" in error["message"]
            assert http.post(route, json=PLAIN[route]).status_code == 200
        check_nothing_left(running)


def test_keys() -> None:
    free = (
        "/",
        "/health",
        "/health/live",
        "/health/ready",
        "/version",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/page/main.js",
    )
    locked = ("/v1/models", "/v1/models/double", "/tokenizer_info", "/stats", "/nothing")
    with serving(ContractModel(), api_key=["one", "two"]) as running, httpx.Client(base_url=running.url) as http:
        assert {path: http.get(path).status_code for path in free} == dict.fromkeys(free, 200)
        assert http.get("/openapi.json").json()["security"], "the page of the documentation can ask for a key"
        for given in (None, "one", "Bearer", "Bearer three", "Basic one", "Bearer one two", "Bearer ONE"):
            head = {} if given is None else {"authorization": given}
            for path in locked:
                response = http.get(path, headers=head)
                assert error_of(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
            for route, body in PLAIN.items():
                error_of(http.post(route, json=body, headers=head), 401)
        for key in ("one", "two"):
            head = {"authorization": f"Bearer {key}"}
            assert all(http.post(route, json=body, headers=head).status_code == 200 for route, body in PLAIN.items())
            assert http.get("/v1/models", headers=head).status_code == 200
        check_nothing_left(running)
