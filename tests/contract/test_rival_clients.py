"""Load and evaluation tools get what they read: bodies as these tools send them, answers read as they read them.

The bodies are those of lm-evaluation-harness 0.4.13, guidellm 0.8.1, `vllm bench serve` 0.32, SGLang's
`sglang.benchmark.serving`, AIPerf 0.13.0, and of frameworks that use OpenAI's client.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from doubles.contract_model import NAMES

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
MODEL = NAMES[0]
TOKENS = 5
IDS = [list(b"one two three"), list(b"four")]
MESSAGES = [{"role": "user", "content": "hello"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
USAGE = {"include_usage": True}
GUIDELLM = {
    "model": MODEL,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "stop": None,
    "ignore_eos": True,
}
VLLM_SAMPLING = {
    "temperature": 0.0,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "repetition_penalty": 1.1,
}
VLLM = {
    "model": MODEL,
    "prompt": "hello",
    "repetition_penalty": 1.0,
    "max_tokens": TOKENS,
    "logprobs": None,
    "stream": True,
    "stream_options": USAGE,
    "ignore_eos": True,
}
VLLM_CHAT = {
    "model": MODEL,
    "messages": PARTS,
    "max_completion_tokens": TOKENS,
    "stream": True,
    "stream_options": USAGE,
    "ignore_eos": True,
}
SGLANG = {
    "model": MODEL,
    "prompt": "hello",
    "best_of": 1,
    "max_tokens": TOKENS,
    "stream": True,
    "temperature": 0.0,
    "ignore_eos": True,
}
SGLANG_CHAT = {
    "model": MODEL,
    "messages": MESSAGES,
    "max_completion_tokens": TOKENS,
    "stream": True,
    "temperature": 0.0,
    "ignore_eos": True,
}
SGLANG_NATIVE = {
    "text": "hello",
    "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True},
    "stream": True,
    "lora_path": None,
    "return_logprob": False,
    "return_routed_experts": False,
    "logprob_start_len": -1,
}
AIPERF = {"model": MODEL, "stream": True, "ignore_eos": True, "min_tokens": TOKENS, "stream_options": USAGE}
LM_EVAL = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "seed": 1234}

STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "guidellm": (COMPLETIONS, GUIDELLM | {"prompt": "hello", "max_tokens": TOKENS}),
    "guidellm-chat": (CHAT, GUIDELLM | {"messages": PARTS, "max_completion_tokens": TOKENS}),
    "vllm": (COMPLETIONS, VLLM),
    "vllm-sampling": (COMPLETIONS, VLLM | VLLM_SAMPLING),
    "vllm-logprobs": (COMPLETIONS, VLLM | {"logprobs": 3}),
    "vllm-ids": (COMPLETIONS, VLLM | {"prompt": IDS[0]}),
    "vllm-chat": (CHAT, VLLM_CHAT),
    "vllm-chat-sampling": (CHAT, VLLM_CHAT | VLLM_SAMPLING),
    "sglang": (COMPLETIONS, SGLANG),
    "sglang-logprobs": (COMPLETIONS, SGLANG | {"logprobs": 2}),
    "sglang-chat": (CHAT, SGLANG_CHAT),
    "sglang-chat-rounds": (CHAT, SGLANG_CHAT | {"stream_options": USAGE}),
    "sglang-native": (GENERATE, SGLANG_NATIVE),
    "aiperf": (COMPLETIONS, AIPERF | {"prompt": "hello", "max_tokens": TOKENS}),
    "aiperf-chat": (CHAT, AIPERF | {"messages": MESSAGES, "max_completion_tokens": TOKENS}),
    "aiperf-chat-usage": (
        CHAT,
        AIPERF | {"messages": MESSAGES, "max_tokens": TOKENS, "stream_options": GUIDELLM["stream_options"]},
    ),
    "sglang-native-logprobs": (GENERATE, SGLANG_NATIVE | {"return_logprob": True, "top_logprobs_num": 2}),
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "lm-eval-generate": (COMPLETIONS, LM_EVAL | {"prompt": IDS, "stop": ["\n\n", "<|im_end|>"]}),
    "lm-eval-text": (COMPLETIONS, LM_EVAL | {"prompt": "hello", "stop": ["<|im_end|>"]}),
    "lm-eval-chat": (CHAT, LM_EVAL | {"messages": MESSAGES, "stop": ["<|im_end|>"]}),
    "sglang-chat": (CHAT, SGLANG_CHAT | {"stream": False}),
    "sglang-native": (GENERATE, SGLANG_NATIVE | {"stream": False}),
    "langchain": (
        CHAT,
        {
            "model": MODEL,
            "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi", "name": "ann"}],
            "stream": False,
            "temperature": 0.7,
            "max_completion_tokens": TOKENS,
            "n": 1,
            "logprobs": False,
            "user": "ann",
            "metadata": {"run": "1"},
        },
    ),
    "llama-index": (CHAT, {"model": MODEL, "messages": MESSAGES, "stream": False, "temperature": 0.1, "max_tokens": 5}),
    "llama-index-text": (COMPLETIONS, {"model": MODEL, "prompt": "hi", "temperature": 0.1, "max_tokens": TOKENS}),
    "frameworks-nulls": (
        CHAT,
        {
            "model": MODEL,
            "messages": MESSAGES,
            "max_tokens": TOKENS,
            **dict.fromkeys(
                ("stop", "seed", "tools", "tool_choice", "response_format", "logit_bias", "stream_options")
            ),
            **dict.fromkeys(
                ("functions", "function_call", "top_logprobs", "store", "service_tier", "reasoning_effort")
            ),
        },
    ),
}


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON of each event, read by lines as these tools do; the last line must be [DONE]."""
    done = False
    for line in response.iter_lines():
        if not line.strip():
            continue
        assert not done, f"a line after [DONE]: {line}"
        assert line.startswith("data: "), line
        chunk = line.removeprefix("data: ")
        done = chunk == "[DONE]"
        if not done:
            yield json.loads(chunk)
    assert done


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_has_what_load_tools_read(http: httpx.Client, name: str) -> None:
    path, body = STREAMS[name]
    headers = {"Authorization": "Bearer EMPTY", "x-request-id": f"bench-{name}"}
    with http.stream("POST", path, json=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        found = list(events(response))
    usage = [event for event in found if event.get("usage")]
    if path == GENERATE:
        assert all(event["meta_info"]["prompt_tokens"] for event in found)
        assert found[-1]["meta_info"]["completion_tokens"] == TOKENS
        assert [event["text"] for event in found] == sorted((event["text"] for event in found), key=len)
        return
    asked = body.get("stream_options") or {}
    if asked:
        assert found[-1]["choices"] == []
        assert found[-1]["usage"]["completion_tokens"] == TOKENS
        assert found[-1]["usage"]["prompt_tokens"] > 0
        assert len(usage) == (len(found) if asked.get("continuous_usage_stats") else 1)
        found.pop()
    else:
        # SGLang's tool takes choices[0] of every event.
        assert not usage
    assert all(len(event["choices"]) == 1 for event in found)
    key = "text" if path == COMPLETIONS else "delta"
    assert all(key in event["choices"][0] for event in found)
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    if body.get("logprobs"):
        entries = [entry for event in found for entry in event["choices"][0]["logprobs"]["token_logprobs"]]
        assert len(entries) == TOKENS


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_answer_has_what_tools_read(http: httpx.Client, name: str) -> None:
    path, body = WHOLE[name]
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    if path == GENERATE:
        assert isinstance(answer["text"], str)
        assert answer["meta_info"]["completion_tokens"] == TOKENS
        return
    assert 0 < answer["usage"]["completion_tokens"] <= TOKENS * len(answer["choices"])
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    if path == COMPLETIONS:
        assert len(choices) == (len(body["prompt"]) if isinstance(body["prompt"], list) else 1)
    texts = [choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in choices]
    assert all(isinstance(text, str) for text in texts)


def test_tokenizer_routes_as_lm_eval_and_vllm_use_them(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").raise_for_status().json()
    assert {"eos_token", "bos_token", "chat_template"} <= info.keys()
    for extra in ({}, {"model": MODEL}):
        body = {"prompt": "test", "add_special_tokens": False, **extra}
        tokens = http.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        assert tokens == list(b"test")
        assert http.post("/detokenize", json={"tokens": tokens, **extra}).raise_for_status().json()["prompt"] == "test"


def test_models_are_listed_as_guidellm_reads_them(http: httpx.Client) -> None:
    assert [entry["id"] for entry in http.get("/v1/models").raise_for_status().json()["data"]] == list(NAMES)
    assert http.get("/health").status_code == 200
