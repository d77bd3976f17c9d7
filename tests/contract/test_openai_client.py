"""OpenAI's own client against the server: what it reads, raises and sends again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import anyio
import openai
import pytest

from doubles.contract_model import EOS, NAMES, ContractModel, check_nothing_left
from doubles.raw_clients import until
from doubles.served import Serving, serving

TALK: Any = [{"role": "user", "content": "hello"}]
CHAT: Any = {"model": "double", "messages": TALK, "max_tokens": 12, "seed": 1}
TEXT: Any = {"model": "double", "prompt": "hello", "max_tokens": 12, "seed": 1}
# The stream helper takes an answer that was cut for an error, so this one ends by itself, with its twelfth token.
ENDING: Any = {**CHAT, "logit_bias": {str(EOS): 100}, "extra_body": {"min_tokens": 11}}


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=30) as made:
        yield made


@pytest.fixture
def sent(server: Serving) -> Any:
    """Checks how many requests the server has answered since the test began, by status."""
    seen = server.service.requests_by_status

    def counts() -> dict[int, int]:
        found: dict[int, int] = {}
        for (_, status), number in list(seen.items()):
            found[status] = found.get(status, 0) + number
        return found

    def settled() -> dict[int, int]:
        """The server counts a request when its answer is out, so a client may be ahead of it."""
        found = counts()
        time.sleep(0.05)
        return found if counts() == found else settled()

    before = settled()

    def check(**expected: int) -> None:
        now = settled()
        assert {f"status_{s}": n - before.get(s, 0) for s, n in now.items() if n != before.get(s, 0)} == expected

    return check


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the client would have slept; it does not."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    fake_time = SimpleNamespace(**{**vars(time), "sleep": found.append})
    monkeypatch.setattr("openai._base_client.time", fake_time)
    monkeypatch.setattr("openai._base_client.anyio", SimpleNamespace(**{**vars(anyio), "sleep": sleep}))
    return found


def asynchronous(server: Serving, use: Any, **settings: Any) -> Any:
    """What `use` returns, given an async client."""

    async def main() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=30, **settings) as client:
            return await use(client)

    return anyio.run(main)


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)
    assert whole.object == "chat.completion"
    assert whole.model == "double"
    assert whole.system_fingerprint.endswith("-reference")  # what is in force, not what was asked for
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    assert whole.usage.prompt_tokens_details is not None
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_chat_asynchronously(server: Serving, client: openai.OpenAI) -> None:
    async def use(api: openai.AsyncOpenAI) -> tuple[Any, str]:
        whole = await api.chat.completions.create(**CHAT)
        stream = await api.chat.completions.create(**CHAT, stream=True)
        return whole, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    whole, text = asynchronous(server, use)
    assert text == whole.choices[0].message.content == client.chat.completions.create(**CHAT).choices[0].message.content


def check_stream_events(events: list[Any], final: Any, whole: Any) -> None:
    kinds = {event.type for event in events}
    assert kinds == {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"}
    text = whole.choices[0].message.content
    assert "".join(event.delta for event in events if event.type == "content.delta") == text
    assert [event.content for event in events if event.type == "content.done"] == [text]
    assert [len(event.content) for event in events if event.type == "logprobs.content.done"] == [12]
    assert final.choices[0].message.content == text
    assert final.choices[0].message.role == "assistant"
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    assert final.object == "chat.completion"


def test_stream_helper(server: Serving, client: openai.OpenAI) -> None:
    body = {**ENDING, "logprobs": True, "top_logprobs": 2}
    options: Any = {"include_usage": True}
    whole = client.chat.completions.create(**body)
    with client.chat.completions.stream(**body, stream_options=options) as stream:
        check_stream_events(list(stream), stream.get_final_completion(), whole)

    async def use(api: openai.AsyncOpenAI) -> tuple[list[Any], Any]:
        async with api.chat.completions.stream(**body, stream_options=options) as stream:
            return [event async for event in stream], await stream.get_final_completion()

    check_stream_events(*asynchronous(server, use), whole)


def test_stream_helper_with_several_choices(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ENDING, n=3)
    with client.chat.completions.stream(**ENDING, n=3) as stream:
        final = stream.get_final_completion()
    assert [c.message.content for c in final.choices] == [c.message.content for c in whole.choices]
    assert len({c.message.content for c in whole.choices}) == 3


def test_raw_response_has_the_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(**CHAT, extra_headers={"x-request-id": "mine"})
    assert raw.headers["x-request-id"] == "mine"
    assert raw.request_id == "mine"
    assert raw.parse().choices[0].message.content
    assert client.chat.completions.create(**CHAT)._request_id


def test_logprobs_of_chat(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 12
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
        assert len(entry.top_logprobs) == 3
        assert entry.bytes is not None
    content = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content).decode(errors="replace")
    assert content == choice.message.content


def test_rules_of_chat(client: openai.OpenAI) -> None:
    letters: Any = {"97": 100, "98": 100}
    text = client.chat.completions.create(**CHAT, logit_bias=letters).choices[0].message.content
    assert text is not None
    assert set(text) == {"a", "b"}
    stopped = client.chat.completions.create(**CHAT, logit_bias=letters, stop=["b"]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == text.partition("b")[0]
    again = [client.chat.completions.create(**{**CHAT, "seed": seed}).choices[0].message.content for seed in (7, 7, 8)]
    assert again[0] == again[1] != again[2]
    ends: Any = {str(EOS): 100}
    assert client.chat.completions.create(**CHAT, logit_bias=ends).choices[0].finish_reason == "stop"


def test_extra_body(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, extra_body={"allowed_token_ids": [97], "return_token_ids": True})
    assert answer.choices[0].message.content == "a" * 12
    assert answer.choices[0].token_ids == [97] * 12  # type: ignore[attr-defined]
    assert answer.seed == 1  # type: ignore[attr-defined]


def test_completions(server: Serving, client: openai.OpenAI) -> None:
    one = client.completions.create(**TEXT)
    assert one.object == "text_completion"
    assert one.choices[0].finish_reason == "length"
    assert "".join(c.choices[0].text for c in client.completions.create(**TEXT, stream=True)) == one.choices[0].text
    prompts: Any = [["hello", "other"], [104, 105], [[104, 105], [1, 2, 3]]]
    counts = [len(client.completions.create(**{**TEXT, "prompt": p, "n": 2}).choices) for p in prompts]
    assert counts == [4, 2, 4]
    listed = client.completions.create(**{**TEXT, "prompt": ["hello", "other"]})
    assert [choice.index for choice in listed.choices] == [0, 1]
    assert listed.choices[0].text == one.choices[0].text

    async def use(api: openai.AsyncOpenAI) -> str:
        return "".join([c.choices[0].text async for c in await api.completions.create(**TEXT, stream=True)])

    assert asynchronous(server, use) == one.choices[0].text


def test_completions_with_echo_and_logprobs(client: openai.OpenAI) -> None:
    plain = client.completions.create(**TEXT).choices[0]
    choice = client.completions.create(**TEXT, echo=True, logprobs=2).choices[0]
    assert choice.text == "hello" + plain.text
    lists = choice.logprobs
    assert lists is not None
    assert lists.token_logprobs is not None
    assert len(lists.tokens or []) == len(lists.text_offset or []) == len(lists.token_logprobs) == 6 + 12
    assert lists.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in lists.token_logprobs[1:])
    letters: Any = {"97": 100, "98": 100}
    offsets = client.completions.create(**TEXT, echo=True, logprobs=0, logit_bias=letters).choices[0].logprobs
    assert offsets is not None
    assert offsets.text_offset == [0, *range(5 + 12)], "BOS is not in the text"
    open_end: Any = {**TEXT, "prompt": [104, 0xE4], "logit_bias": letters}
    offsets = client.completions.create(**open_end, echo=True, logprobs=0).choices[0].logprobs
    assert offsets is not None
    assert offsets.text_offset == [0, 1, *range(2, 2 + 12)]
    scored = client.completions.create(**{**TEXT, "max_tokens": 0}, echo=True, logprobs=0).choices[0]
    assert scored.text == "hello"
    assert scored.logprobs is not None
    assert scored.logprobs.token_logprobs == lists.token_logprobs[:6]


def test_several_prompts_without_a_seed_can_be_repeated(client: openai.OpenAI) -> None:
    body: Any = {"model": "double", "prompt": ["hello", "hello"], "max_tokens": 12}
    answer = client.completions.create(**body)
    assert answer.seed is None  # type: ignore[attr-defined]
    assert answer.choices[0].text != answer.choices[1].text
    for choice in answer.choices:
        again = client.completions.create(**{**TEXT, "seed": choice.seed})  # type: ignore[attr-defined]
        assert again.choices[0].text == choice.text
    streamed: dict[int, set[int]] = {0: set(), 1: set()}
    for chunk in client.completions.create(**body, stream=True):
        streamed[chunk.choices[0].index].add(chunk.choices[0].seed)  # type: ignore[attr-defined]
    assert [len(seeds) for seeds in streamed.values()] == [1, 1]
    assert streamed[0] != streamed[1]


def test_models(client: openai.OpenAI) -> None:
    assert tuple(model.id for model in client.models.list()) == NAMES
    model = client.models.retrieve("alias")
    assert (model.id, model.object, model.owned_by) == ("alias", "model", "slipstream")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


def test_wrong_requests_raise_and_are_sent_once(client: openai.OpenAI, sent: Any, slept: list[float]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**CHAT, top_p=2)
    assert caught.value.param == "top_p"
    assert caught.value.type == "invalid_request_error"
    assert "top_p must be in (0, 1]" in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(**{**CHAT, "max_tokens": 4000}, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**{**CHAT, "model": "other"})
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    sent(status_400=2, status_404=1)
    assert slept == []


def test_overload_is_sent_again_after_the_time_it_says(
    server: Serving, client: openai.OpenAI, sent: Any, slept: list[float]
) -> None:
    server.service.draining = True
    try:
        with pytest.raises(openai.InternalServerError) as caught:
            client.chat.completions.create(**CHAT)

        async def use(api: openai.AsyncOpenAI) -> None:
            await api.completions.create(**TEXT, stream=True)

        with pytest.raises(openai.InternalServerError):
            asynchronous(server, use)
    finally:
        server.service.draining = False
    assert caught.value.status_code == 503
    assert caught.value.code == "draining"
    sent(status_503=6)
    assert slept == [float(caught.value.response.headers["retry-after"])] * 4


def test_overload_that_ends_is_not_seen(
    server: Serving, client: openai.OpenAI, sent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        server.service.draining = False

    monkeypatch.setattr("openai._base_client.time", SimpleNamespace(**{**vars(time), "sleep": sleep}))
    server.service.draining = True
    try:
        assert client.chat.completions.create(**CHAT).choices
    finally:
        server.service.draining = False
    sent(status_503=1, status_200=1)


def test_key(slept: list[float]) -> None:
    with serving(ContractModel(), api_key=["secret"]) as running:

        def models(key: str) -> list[str]:
            with openai.OpenAI(base_url=f"{running.url}/v1", api_key=key) as client:
                return [model.id for model in client.models.list()]

        assert models("secret") == ["double"]
        with pytest.raises(openai.AuthenticationError) as caught:
            models("guess")
        assert caught.value.code == "invalid_api_key"
        assert until(lambda: running.service.requests_by_status.get(("other", 401))) == 1
        assert slept == []


@pytest.fixture
def own() -> Iterator[Serving]:
    """A server whose model may be made to fail and to stall."""
    with serving(ContractModel(step_ms=2)) as running:
        yield running
        check_nothing_left(running)


def test_failure_within_a_stream_is_raised(own: Serving) -> None:
    assert own.model is not None
    with openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            **{**CHAT, "max_tokens": 400}, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        own.model.fails = RuntimeError("planted")
        with pytest.raises(openai.APIError, match="planted") as caught:
            list(stream)
        assert caught.value.type == "server_error"
        own.model.fails = RuntimeError("planted")
        with pytest.raises(openai.InternalServerError) as whole:
            client.chat.completions.create(**CHAT)
        assert whole.value.status_code == 500


def test_rules_that_leave_no_token_within_a_stream_are_raised(own: Serving) -> None:
    rules = {"allowed_token_ids": [97], "bad_words": ["aaaa"]}
    with openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0) as client:
        got: list[Any] = []
        with pytest.raises(openai.APIError) as caught:
            got.extend(client.chat.completions.create(**CHAT, stream=True, extra_body=rules))
        assert caught.value.type == "invalid_request_error"
        assert caught.value.param == "allowed_token_ids"
        with pytest.raises(openai.BadRequestError) as whole:
            client.chat.completions.create(**CHAT, extra_body=rules)
        assert whole.value.param == "allowed_token_ids"
        assert "bad_words" in whole.value.message


def test_timeout_ends_the_request(own: Serving) -> None:
    assert own.model is not None
    own.model.go.clear()
    try:
        with openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0, timeout=0.2) as client:
            with pytest.raises(openai.APITimeoutError):
                client.chat.completions.create(**CHAT)
            with pytest.raises(openai.APITimeoutError):
                client.completions.create(**TEXT, stream=True)
    finally:
        own.model.go.set()
