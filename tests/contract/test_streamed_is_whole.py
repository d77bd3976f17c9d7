"""The chunks of a stream, joined, are the whole answer."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doubles.contract_model import EOS, START

MESSAGES = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "é中"}, {"role": "user", "content": ""}],
]
PROMPTS: list[Any] = ["hello", "é中😀", ["a", "bc the"], [104, 105, 200], [[1, 2, 3], [255, 4], [7]]]
LISTS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")
SALTS = itertools.count()


def some(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """The value, or null."""
    return st.one_of(st.none(), strategy)


LIMIT = st.integers(0, 20)
# Few tokens, so that stops and ends are met; bytes that are no characters alone, so that text is held back.
LETTERS = [97, 98, 32, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x98, 0x80, EOS, START]
STOPS = st.one_of(
    st.sampled_from(["a", "ab", "中", "b a"]), st.lists(st.sampled_from(["aa", "b", "a b", "中", "�"]), max_size=3)
)
TOKENS = st.sampled_from(LETTERS)
NUMBERS = {
    "temperature": some(st.sampled_from([0, 0.5, 1, 3])),
    "frequency_penalty": some(st.sampled_from([-2, 0.5, 2])),
    "presence_penalty": some(st.sampled_from([-2, 0.5, 2])),
    "repetition_penalty": some(st.sampled_from([0.5, 3])),
    "stop": some(STOPS),
    "stop_token_ids": some(st.lists(TOKENS, max_size=3)),
    "ignore_eos": some(st.booleans()),
    "skip_special_tokens": some(st.booleans()),
    "n": some(st.integers(1, 3)),
}
SAMPLING = {
    **NUMBERS,
    "seed": st.integers(0, 2**64 - 1),
    "allowed_token_ids": some(st.just(LETTERS)),
    "min_tokens": some(st.integers(0, 6)),
    "include_stop_str_in_output": some(st.booleans()),
    "prompt_logprobs": some(st.integers(0, 3)),
    "return_token_ids": some(st.booleans()),
    "return_tokens_as_token_ids": some(st.booleans()),
    "stream_options": some(
        st.fixed_dictionaries({"include_usage": some(st.booleans()), "continuous_usage_stats": some(st.booleans())})
    ),
}
CHATS = st.fixed_dictionaries(
    {
        **SAMPLING,
        "messages": st.sampled_from(MESSAGES),
        "max_tokens": LIMIT,
        "logprobs": some(st.booleans()),
    }
).flatmap(
    lambda body: st.fixed_dictionaries(
        {
            **{k: st.just(v) for k, v in body.items()},
            "top_logprobs": some(st.integers(0, 4)) if body["logprobs"] else st.none(),
        }
    )
)
COMPLETIONS = st.fixed_dictionaries(
    {
        **SAMPLING,
        "prompt": st.sampled_from(PROMPTS),
        "max_tokens": some(LIMIT),
        "logprobs": some(st.integers(0, 4)),
        "echo": some(st.booleans()),
    }
)
GENERATES = st.builds(
    lambda prompt, params, limits, more: {
        ("input_ids" if isinstance(prompt[0], int | list) and not isinstance(prompt, str) else "text"): prompt,
        "sampling_params": {**params, **limits},
        **more,
    },
    st.sampled_from(PROMPTS),
    st.fixed_dictionaries(
        {
            **NUMBERS,
            "sampling_seed": SAMPLING["seed"],
            "logit_bias": some(st.just(dict.fromkeys(map(str, LETTERS), 100))),
        }
    ),
    st.fixed_dictionaries(
        {"max_new_tokens": LIMIT, "min_new_tokens": some(st.integers(0, 6)), "no_stop_trim": some(st.booleans())}
    ),
    st.fixed_dictionaries(
        {
            "return_logprob": some(st.booleans()),
            "logprob_start_len": some(st.integers(-1, 3)),
            "top_logprobs_num": some(st.integers(0, 3)),
            "return_text_in_logprobs": some(st.booleans()),
        }
    ),
)


def both(
    http: httpx.Client, path: str, body: dict[str, Any], salt_name: str
) -> tuple[dict[str, Any], list[Any]] | None:
    """The whole answer and the events of the same request; None if both were refused alike."""
    plain = {key: value for key, value in body.items() if key != "stream_options"}
    whole = http.post(path, json={**plain, salt_name: f"streamed-{next(SALTS)}"})
    streamed = http.post(path, json={**body, "stream": True, salt_name: f"streamed-{next(SALTS)}"})
    assert streamed.status_code == whole.status_code, (whole.text, streamed.text)
    if whole.status_code != 200:
        assert whole.status_code == 400, whole.text
        assert streamed.json() == whole.json()
        return None
    events = [json.loads(part.removeprefix("data: ")) for part in streamed.text.split("\n\n")[:-2]]
    assert streamed.text.endswith("data: [DONE]\n\n")
    return whole.json(), events


def check_usage(body: dict[str, Any], whole: dict[str, Any], chunks: list[Any]) -> list[Any]:
    """Usage stands where it was asked for, grows, and ends at the whole answer's. -> the chunks with choices."""
    if body["return_token_ids"]:
        assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in whole["choices"])
    options = body["stream_options"] or {}
    usages = [chunk.get("usage") for chunk in chunks]
    if options.get("include_usage"):
        last = chunks.pop()
        assert last["choices"] == []
        assert usages[-1] == whole["usage"]
    if options.get("continuous_usage_stats"):
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts)
        assert usages[-1] == whole["usage"]
    elif options.get("include_usage"):
        assert all("usage" in chunk and chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    same = {key: {json.dumps(chunk[key]) for chunk in chunks} for key in ("id", "created", "model", "seed", "object")}
    assert all(len(values) == 1 for values in same.values()), same
    return chunks


def ended(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The end of a choice, which is its last chunk and no other."""
    assert [part["finish_reason"] is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    assert ["stop_reason" in part for part in parts] == [False] * (len(parts) - 1) + [True]
    return {"finish_reason": parts[-1]["finish_reason"], "stop_reason": parts[-1]["stop_reason"]}


def joined_ids(parts: list[dict[str, Any]]) -> dict[str, Any]:
    if not any("token_ids" in part for part in parts):
        return {}
    return {"token_ids": [token for part in parts for token in part["token_ids"]]}


def joined_chat(chunks: list[Any]) -> dict[str, Any]:
    """The chat.completion that chunks make up."""
    by_choice: dict[int, list[Any]] = {}
    answer: dict[str, Any] = {"choices": []}
    for chunk in chunks:
        by_choice.setdefault(chunk["choices"][0]["index"], []).append(chunk["choices"][0])
        for name in ("prompt_logprobs", "prompt_token_ids"):
            if name in chunk:
                assert answer.setdefault(name, chunk[name]) == chunk[name]
    for index, parts in sorted(by_choice.items()):
        assert ["role" in part["delta"] for part in parts] == [True] + [False] * (len(parts) - 1)
        logprobs = None
        if parts[0]["logprobs"] is not None:
            logprobs = {"content": [e for part in parts for e in part["logprobs"]["content"]], "refusal": None}
        content = "".join(part["delta"].get("content", "") for part in parts)
        message = {"role": parts[0]["delta"]["role"], "content": content, "refusal": None}
        answer["choices"].append(
            {"index": index, "message": message, "logprobs": logprobs, **ended(parts), **joined_ids(parts)}
        )
    return answer


def joined_completion(chunks: list[Any]) -> dict[str, Any]:
    """The text_completion that chunks make up."""
    by_choice: dict[int, list[Any]] = {}
    for chunk in chunks:
        by_choice.setdefault(chunk["choices"][0]["index"], []).append(chunk["choices"][0])
    choices = []
    for index, parts in sorted(by_choice.items()):
        logprobs = None
        if parts[0]["logprobs"] is not None:
            logprobs = {name: [item for part in parts for item in part["logprobs"][name]] for name in LISTS}
        once = {name: parts[0][name] for name in ("prompt_token_ids", "prompt_logprobs") if name in parts[0]}
        assert not any(name in part for part in parts[1:] for name in ("prompt_token_ids", "prompt_logprobs"))
        text = "".join(part["text"] for part in parts)
        choices.append(
            {"index": index, "text": text, "logprobs": logprobs, **ended(parts), **joined_ids(parts), **once}
        )
    return {"choices": choices}


def check_chat(http: httpx.Client, body: dict[str, Any]) -> bool:
    found = both(http, "/v1/chat/completions", body, "cache_salt")
    if found is None:
        return False
    whole, chunks = found
    joined = joined_chat(check_usage(body, whole, chunks))
    assert joined == {
        name: value for name, value in whole.items() if name in {*joined, "prompt_logprobs", "prompt_token_ids"}
    }
    assert [choice["index"] for choice in whole["choices"]] == list(range(body["n"] or 1))
    return True


def check_completion(http: httpx.Client, body: dict[str, Any]) -> bool:
    found = both(http, "/v1/completions", body, "cache_salt")
    if found is None:
        return False
    whole, chunks = found
    joined = joined_completion(check_usage(body, whole, chunks))
    assert joined["choices"] == whole["choices"]
    for choice in whole["choices"] if not body["return_tokens_as_token_ids"] else ():
        check_offsets(choice)
    return True


def check_offsets(choice: dict[str, Any]) -> None:
    """A token stands in the text where its offset says, as far as the text goes; control tokens may be left out."""
    text, lists = choice["text"], choice["logprobs"]
    if lists is None:
        return
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        shown = text[offset : offset + len(token)]
        assert token.startswith(("bytes:", "<|", shown)), (token, offset, text)


def check_prompt_is_said_twice(events: list[Any]) -> None:
    """What a /generate stream reports of the prompt stands in a choice's first and last events, the same in both."""
    by_choice: dict[int, list[Any]] = {}
    for event in events:
        by_choice.setdefault(event.get("index", 0), []).append(event["meta_info"])
    for metas in by_choice.values():
        for name in ("input_token_logprobs", "input_top_logprobs"):
            assert not any(name in meta for meta in metas[1:-1])
            assert metas[0].get(name) == metas[-1].get(name)


def check_generate(http: httpx.Client, body: dict[str, Any]) -> bool:
    found = both(http, "/generate", body, "extra_key")
    if found is None:
        return False
    given, events = found
    whole = given if isinstance(given, list) else [given]
    check_prompt_is_said_twice(events)
    latest: dict[int, Any] = {}
    for event in events:
        assert ("index" in event) == isinstance(given, list)
        index = event.pop("index", 0)
        before = latest.get(index)
        if before is not None:
            assert before["meta_info"]["finish_reason"] is None
            assert before["meta_info"]["id"] == event["meta_info"]["id"]
            assert event["text"].startswith(before["text"])
            assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        latest[index] = event
    for answer in (*latest.values(), *whole):
        del answer["meta_info"]["id"], answer["meta_info"]["e2e_latency"]
    assert [latest[index] for index in sorted(latest)] == whole
    return True


ROUTES = {
    "chat": (CHATS, check_chat),
    "completions": (COMPLETIONS, check_completion),
    "generate": (GENERATES, check_generate),
}


def check(http: httpx.Client, route: str, examples: int, *, derandomize: bool) -> None:
    bodies, check_body = ROUTES[route]
    answered: list[bool] = []
    limits = settings(
        max_examples=examples,
        derandomize=derandomize,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    limits(given(body=bodies)(lambda body: answered.append(check_body(http, body))))()
    assert sum(answered) > len(answered) / 2, "most requests were refused"


@pytest.mark.parametrize("route", ROUTES)
def test_streamed_is_whole(http: httpx.Client, route: str) -> None:
    check(http, route, 30, derandomize=True)


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_streamed_is_whole_for_long(http: httpx.Client, route: str) -> None:
    check(http, route, 500, derandomize=False)
