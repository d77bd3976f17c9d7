"""Every field does what it says, or is refused: no field is accepted and ignored."""

from __future__ import annotations

import json
import threading
import typing
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_params

from checks.api_fields import ADVISORY, CASES, ELSEWHERE, TALK, Case
from doubles.contract_model import NAMES, ContractModel
from doubles.raw_clients import until
from doubles.served import Serving, serving
from slipstream.core.request import Request
from slipstream.engine.stats import EngineStats
from slipstream.server.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    GenerateSampling,
    StreamOptions,
    TokenizeBody,
)
from slipstream.server.fields import Support, fields_of
from slipstream.server.support import BODIES, markdown

ROUTES: dict[type, tuple[str, dict[str, Any]]] = {
    ChatBody: ("/v1/chat/completions", {"messages": TALK, "max_completion_tokens": 12, "seed": 1}),
    CompletionBody: ("/v1/completions", {"prompt": "hello", "max_tokens": 12, "seed": 1}),
    GenerateBody: ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 12, "sampling_seed": 1}}),
    TokenizeBody: ("/tokenize", {"prompt": "hello"}),
    DetokenizeBody: ("/detokenize", {"tokens": [104]}),
}
VOLATILE = {"id", "created", "e2e_latency", "cached_tokens"}
OFFICIAL = [
    (ChatBody, chat_params.CompletionCreateParamsNonStreaming),
    (ChatBody, chat_params.CompletionCreateParamsStreaming),
    (CompletionBody, completion_params.CompletionCreateParamsNonStreaming),
    (CompletionBody, completion_params.CompletionCreateParamsStreaming),
    (StreamOptions, ChatCompletionStreamOptionsParam),
]


def request_of(body: type, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path and the plain request with `given` fields of `body`, which may be an object within a route's body."""
    if body is GenerateSampling:
        path, plain = ROUTES[GenerateBody]
        return path, {**plain, "sampling_params": {**plain["sampling_params"], **given}}
    if body is StreamOptions:
        path, plain = ROUTES[ChatBody]
        return path, {**plain, "stream": True, "stream_options": given}
    path, plain = ROUTES[body]
    return path, {**plain, **given}


def steady(value: Any) -> Any:
    """A value without what differs from run to run."""
    if isinstance(value, dict):
        return {key: steady(item) for key, item in value.items() if key not in VOLATILE}
    return [steady(item) for item in value] if isinstance(value, list) else value


def parsed(response: httpx.Response) -> Any:
    """The document, or the list of events."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        return response.json()
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def answer(http: httpx.Client, body: type, given: dict[str, Any]) -> Any:
    path, request = request_of(body, given)
    return parsed(http.post(path, json=request))


def refused(http: httpx.Client, body: type, given: dict[str, Any]) -> dict[str, Any]:
    path, request = request_of(body, given)
    response = http.post(path, json=request)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def path_to(body: type, name: str) -> str:
    return {GenerateSampling: "sampling_params.", StreamOptions: "stream_options."}.get(body, "") + name


def of(support: Support) -> list[tuple[type, str]]:
    return [(body, name) for body in BODIES.values() for name, f in fields_of(body).items() if f.support is support]


@pytest.mark.parametrize(("body", "official"), OFFICIAL, ids=lambda value: value.__name__)
def test_official_fields_are_known(body: type, official: Any) -> None:
    names = set(typing.get_type_hints(official))
    assert names
    assert names <= set(fields_of(body))


def test_tables_are_complete() -> None:
    assert set(CASES) == set(BODIES.values())
    for body, cases in CASES.items():
        named = {name for kind, name in of(Support.IMPLEMENTED) if kind is body}
        assert set(cases) | ELSEWHERE[body] == named
        assert not set(cases) & ELSEWHERE[body]
        assert set(ADVISORY.get(body, {})) == {name for kind, name in of(Support.ADVISORY) if kind is body}


def test_support_document_is_current() -> None:
    document = Path(__file__).parents[2] / "docs" / "api_support.md"
    assert document.read_text() == markdown(), "run python -m slipstream.server.support > docs/api_support.md"


@pytest.mark.parametrize(
    ("body", "name", "case"),
    [
        pytest.param(body, name, case, id=f"{body.__name__}-{name}")
        for body, cases in CASES.items()
        for name, case in cases.items()
    ],
)
def test_implemented_field_has_its_effect(http: httpx.Client, body: type, name: str, case: Case) -> None:
    plain = steady_but_id(answer(http, body, case.given))
    excluded = {case.in_place_of: None} if case.in_place_of else {}
    changed = steady_but_id(answer(http, body, {**case.given, **excluded, name: case.setting}))
    assert case.effect(plain, changed), (plain, changed)
    # Null stands for the default, which is what holds without the field.
    if name not in (*_REQUIRED, *ROUTES[_route(body)][1], "seed", "sampling_seed"):
        assert steady(answer(http, body, {**case.given, name: None})) == steady(plain)


_REQUIRED = ("text", "input_ids", "prompt", "messages", "tokens", "sampling_params", "max_new_tokens")


def _route(body: type) -> type:
    return {GenerateSampling: GenerateBody, StreamOptions: ChatBody}.get(body, body)


def steady_but_id(value: Any) -> Any:
    """As `steady`, but a single answer keeps its id."""
    kept = steady(value)
    if isinstance(value, dict):
        kept |= {"id": value["id"]} if "id" in value else {}
        if "meta_info" in value:
            kept["meta_info"]["id"] = value["meta_info"]["id"]
    return kept


@pytest.mark.parametrize(("body", "name"), of(Support.NEUTRAL), ids=lambda value: getattr(value, "__name__", value))
def test_neutral_field_takes_neutral_values_only(http: httpx.Client, body: type, name: str) -> None:
    plain = steady(answer(http, body, {}))
    for value in (None, *fields_of(body)[name].neutral):
        assert steady(answer(http, body, {name: value})) == plain
    for value in ({"not": "neutral"}, [[0]], "no such value", -7):
        error = refused(http, body, {name: value})
        assert error["param"] == path_to(body, name)
        assert path_to(body, name) in error["message"]


def test_one_is_not_true(http: httpx.Client) -> None:
    answer(http, ChatBody, {"best_of": 1, "spaces_between_special_tokens": True})
    assert refused(http, ChatBody, {"best_of": True})["param"] == "best_of"
    assert refused(http, ChatBody, {"spaces_between_special_tokens": 1})["param"] == "spaces_between_special_tokens"


@pytest.mark.parametrize(("body", "name"), of(Support.ADVISORY), ids=lambda value: getattr(value, "__name__", value))
def test_advisory_field_changes_nothing(http: httpx.Client, body: type, name: str) -> None:
    assert steady(answer(http, body, {name: ADVISORY[body][name]})) == steady(answer(http, body, {}))


@pytest.mark.parametrize("body", BODIES.values(), ids=lambda body: body.__name__)
def test_unknown_field_is_refused_by_name(http: httpx.Client, body: type) -> None:
    error = refused(http, body, {"no_such_field": 1})
    assert error["param"] == path_to(body, "no_such_field")
    assert "no_such_field" in error["message"]


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (body, name)
        for body, name in (*of(Support.IMPLEMENTED), *of(Support.ADVISORY))
        if name != "prompt_cache_options"
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_wrong_type_is_refused_with_its_path(http: httpx.Client, body: type, name: str) -> None:
    for value in ({"wrong": [True]}, True, 1.5, "text", [[{}]]):
        path, request = request_of(body, {name: value, **({"text": None} if name == "input_ids" else {})})
        error = None
        response = http.post(path, json=request)
        if response.status_code != 200:
            error = response.json()["error"]
            expected = 404 if name == "model" and isinstance(value, str) else 400
            assert response.status_code == expected, (value, response.text)
            assert error["param"] is not None
            assert error["param"].startswith(path_to(body, name)), (value, error)
    assert error is not None, "a list in a list is right for no field"


def test_items_are_named_by_their_place(http: httpx.Client) -> None:
    assert refused(http, ChatBody, {"stop": ["a", 1]})["param"] == "stop[1]"
    assert refused(http, ChatBody, {"stop_token_ids": [1, "a"]})["param"] == "stop_token_ids[1]"
    assert refused(http, GenerateSampling, {"temperature": "hot"})["param"] == "sampling_params.temperature"


SALTS = [
    (ChatBody, "cache_salt"),
    (ChatBody, "prompt_cache_key"),
    (CompletionBody, "cache_salt"),
    (GenerateBody, "extra_key"),
]


@pytest.mark.parametrize(("body", "name"), SALTS, ids=lambda value: getattr(value, "__name__", value))
def test_salt_parts_the_prefix_cache(http: httpx.Client, body: type, name: str) -> None:
    def cached(salt: str | None) -> int:
        found = answer(http, body, {name: salt} if salt else {})
        usage = found["meta_info"] if body is GenerateBody else found["usage"]["prompt_tokens_details"]
        return int(usage["cached_tokens"])

    one, other = f"{body.__name__}-{name}-one", f"{body.__name__}-{name}-other"
    cached(None)
    assert cached(one) == 0
    assert cached(one) > 0
    assert cached(other) == 0
    assert cached(None) > 0


@pytest.mark.parametrize("body", [TokenizeBody, DetokenizeBody, ChatBody, CompletionBody], ids=lambda b: b.__name__)
def test_model_is_one_of_the_served_names(http: httpx.Client, body: type) -> None:
    for name in (*NAMES, None):
        answer(http, body, {"model": name})
    path, request = request_of(body, {"model": "other"})
    response = http.post(path, json=request)
    assert response.status_code == 404
    assert response.json()["error"]["param"] == "model"


@pytest.fixture(scope="module")
def narrow() -> typing.Iterator[Serving]:
    """A server that runs one sequence at a time."""
    with serving(ContractModel(max_sequences=1, step_ms=1)) as running:
        yield running


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, GenerateBody], ids=lambda b: b.__name__)
def test_priority_is_served_first(narrow: Serving, body: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one request runs, others queue up in the order of their priorities, not of their coming."""
    assert narrow.model is not None
    ended: list[int] = []
    threads: list[threading.Thread] = []
    observe = EngineStats.observe_finished

    def note(stats: EngineStats, request: Request, reason: str, tokens: int) -> None:
        ended.append(request.priority)
        observe(stats, request, reason, tokens)

    monkeypatch.setattr(EngineStats, "observe_finished", note)

    def send(priority: int) -> None:
        path, request = request_of(body, {"priority": priority})
        assert httpx.post(narrow.url + path, json=request, timeout=60).status_code == 200

    narrow.model.go.clear()
    for sent, priority in enumerate((-5, 3, 1, 2), 1):
        threads.append(threading.Thread(target=send, args=(priority,)))
        threads[-1].start()
        until(lambda expected=sent: len(narrow.service.loaded._queues) == expected)
    narrow.model.go.set()
    for thread in threads:
        thread.join(30)
    assert ended == [-5, 1, 2, 3]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tops", [(1, 5), (5, 1), (0, 3), (3, 0), (2, 2)])
def test_each_kind_of_logprobs_has_its_own_number(http: httpx.Client, tops: tuple[int, int], stream: bool) -> None:
    """`logprobs` with `echo` and `prompt_logprobs` report the same tokens; each is what it is without the other."""

    def lists(**asked: int) -> Any:
        given = {"prompt": "é hello", "echo": True, "max_tokens": 6, "seed": 3, "stream": stream, **asked}
        found = parsed(http.post("/v1/completions", json=given))
        choices = [part["choices"][0] for part in found] if stream else [found["choices"][0]]
        return [[choice.get(name) for choice in choices] for name in ("logprobs", "prompt_logprobs")]

    logprobs, prompt_logprobs = lists(logprobs=tops[0], prompt_logprobs=tops[1])
    assert logprobs == lists(logprobs=tops[0])[0]
    assert prompt_logprobs == lists(prompt_logprobs=tops[1])[1]
    shown = [entry for lists in logprobs for entry in lists["top_logprobs"]]
    assert {len(entry) for entry in shown if entry is not None} <= {tops[0], tops[0] + 1}
    assert {len(entry) for entry in prompt_logprobs[0] if entry is not None} <= {tops[1], tops[1] + 1}
