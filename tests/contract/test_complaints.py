"""What users of serving engines report again and again, where no other test has it; docs/complaints.md lists all."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from doubles.hash_model import WindowedReference
from doubles.raw_clients import CHAT, COMPLETIONS, GENERATE, Client, fetch, until
from doubles.served import ServedModel, Serving, serving, tokenizer_of_bytes
from slipstream.cli.flags import BY_NAME, SERVE_NAMES, Kind
from slipstream.cli.options import takes_flags

ROOT = Path(__file__).parents[2]
LIST = ROOT / "docs" / "complaints.md"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
WRONG_SCHEMA = {"type": "no such type", "pattern": "(["}
TEMPLATED = [{"role": "user", "content": "hello"}]

CONSTRAINTS: list[tuple[str, str, Any]] = [
    (path, name, value)
    for path in (CHAT, COMPLETIONS)
    for name, value in [
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": WRONG_SCHEMA}}),
        ("structured_outputs", {"regex": "(["}),
        ("guided_json", SCHEMA),
        ("guided_regex", "(["),
        ("guided_grammar", "root ::= ("),
        ("guided_choice", ["a", "b"]),
    ]
] + [
    (CHAT, "tools", [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]),
    (CHAT, "tool_choice", "required"),
    (GENERATE, "sampling_params.json_schema", json.dumps(SCHEMA)),
    (GENERATE, "sampling_params.regex", "(["),
    (GENERATE, "sampling_params.ebnf", "root ::= ("),
    (GENERATE, "lora_path", "adapter"),
    (GENERATE, "input_embeds", [[0.0]]),
]


def body_for(path: str, name: str, value: Any) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": TEMPLATED, "max_tokens": 4, name: value}
    if path == COMPLETIONS:
        return {"prompt": "hello", "max_tokens": 4, name: value}
    outer, _, inner = name.partition(".")
    params = {"max_new_tokens": 4, **({inner: value} if inner else {})}
    return {"text": "hello", "sampling_params": params, **({} if inner else {outer: value})}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "name", "value"), CONSTRAINTS, ids=lambda value: str(value)[:50])
def test_a_constraint_that_is_not_implemented_is_refused_and_hurts_nobody(
    server: Serving, path: str, name: str, value: Any, stream: bool
) -> None:
    """It never fails open, and an invalid one takes nothing down."""
    answer = fetch(server.url, path, {**body_for(path, name, value), "stream": stream})
    assert answer.status == 400
    assert answer.json["error"]["param"] == name
    assert answer.headers["x-should-retry"] == "false"
    assert fetch(server.url, COMPLETIONS, {"prompt": "hello", "max_tokens": 2}).status == 200


def test_a_conversation_goes_on_after_a_turn_was_left() -> None:
    """What an aborted turn leaves in the prefix cache is right, and is used."""
    begin = [{"role": "user", "content": "tell me a long story about the sea"}]
    later = [*begin, {"role": "assistant", "content": "once"}, {"role": "user", "content": "go on"}]
    asked = {"messages": later, "max_tokens": 40, "seed": 7, "ignore_eos": True}
    with serving(ServedModel()) as fresh:
        expected = fetch(fresh.url, CHAT, asked).json["choices"]
    with serving(ServedModel(step_ms=2)) as server:
        for stream in (True, False):
            made = server.engine.stats.output_tokens
            turn = {"messages": begin, "max_tokens": 300, "seed": 7, "ignore_eos": True, "stream": stream}
            client = Client(server.url, CHAT, turn)
            until(lambda made=made: server.engine.stats.output_tokens > made + 10)
            client.close()
            until(lambda: not server.engine.has_work)
        answer = fetch(server.url, CHAT, asked).json
        assert answer["choices"] == expected
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("seed", [None, 3], ids=["no seed", "seed"])
def test_choices_of_a_request_differ_and_each_ends_once(server: Serving, seed: int | None) -> None:
    body = {"messages": TEMPLATED, "max_tokens": 60, "seed": seed, "n": 6, "stop": ["a", "e"], "stream": True}
    client = Client(server.url, CHAT, body)
    pieces: dict[int, list[str]] = {index: [] for index in range(6)}
    ends: Counter[int] = Counter()
    for data in client.events():
        if data == "[DONE]":
            break
        for choice in json.loads(data)["choices"]:
            assert not ends[choice["index"]], "news of a choice after its end"
            pieces[choice["index"]].append(choice["delta"].get("content", ""))
            ends[choice["index"]] += choice["finish_reason"] is not None
    client.close()
    assert ends == dict.fromkeys(range(6), 1)
    assert len({len(found) for found in pieces.values()}) > 1  # one that ended did not end the others
    assert len({"".join(found) for found in pieces.values()}) == 6


def test_requests_without_a_seed_differ_and_can_be_repeated(server: Serving) -> None:
    body = {"prompt": "hello", "max_tokens": 30, "ignore_eos": True, "n": 2}
    first, second = (fetch(server.url, COMPLETIONS, body).json for _ in range(2))
    assert first["seed"] != second["seed"]
    assert first["choices"] != second["choices"]
    for answer in (first, second):
        again = fetch(server.url, COMPLETIONS, {**body, "seed": answer["seed"]}).json
        assert again["choices"] == answer["choices"]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_scores_of_a_prompt_are_those_of_the_model(server: Serving, max_tokens: int) -> None:
    """What an evaluation's log-likelihoods are made of, for several prompts of ids, also when they are cached."""
    assert server.model is not None
    reference = WindowedReference(server.model)
    prompts = [tokenizer_of_bytes().encode(text) for text in ("a question: yes", "a question: no", "x" * 70)]
    body = {"prompt": prompts, "max_tokens": max_tokens, "echo": True, "logprobs": 1}
    for _ in range(2):
        choices = fetch(server.url, COMPLETIONS, body).json["choices"]
        for prompt, choice in zip(prompts, choices, strict=True):
            found = choice["logprobs"]["token_logprobs"]
            assert len(found) == len(prompt) + max_tokens
            assert found[0] is None
            for place in range(1, len(prompt)):
                scores = torch.log_softmax(reference.logits(prompt[:place]), -1)
                assert found[place] == pytest.approx(float(scores[prompt[place]]), abs=1e-4)
                best = max(choice["logprobs"]["top_logprobs"][place].values())
                assert best == pytest.approx(float(scores.max()), abs=1e-4)


VLLM = """--model --tokenizer --chat-template --dtype --max-model-len --max-num-seqs --max-num-batched-tokens
    --block-size --enable-prefix-caching --no-enable-prefix-caching --kv-cache-memory-bytes --seed --host --port
    --api-key --served-model-name --ssl-keyfile --ssl-certfile"""
SGLANG = """--model-path --tokenizer-path --chat-template --dtype --context-length --max-running-requests --host --port
    --chunked-prefill-size --disable-radix-cache --random-seed --max-queued-requests --api-key --served-model-name
    --ssl-keyfile --ssl-certfile"""
VALUES = {Kind.WHOLE: "16", Kind.NUMBER: "2.5", Kind.SIZE: "1GiB", Kind.TEXT: "text", Kind.PATH: "x", Kind.TEXTS: "x"}


def test_flags_of_other_engines_mean_the_same() -> None:
    """A script written for another engine, or for an older version, starts the server that it means."""
    seen: list[Any] = []
    app = typer.Typer()

    @app.command()
    @takes_flags(SERVE_NAMES)
    def show(*, settings: Any) -> None:
        seen.append((settings.engine, settings.server))

    def settings_of(*arguments: str) -> Any:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code == 0, result.output
        return seen[-1]

    flags = [BY_NAME[name] for name in SERVE_NAMES]
    accepted = {flag.option for flag in flags}
    for flag in flags:
        value = [] if flag.kind is Kind.SWITCH else [VALUES[flag.kind]]
        own = settings_of(flag.option, *value)
        assert own != settings_of()
        for alias in flag.aliases:
            assert settings_of(alias, *value) == own
        for alias in flag.off_aliases:
            assert settings_of(alias) == settings_of(flag.off_option) != own
        accepted |= {*flag.aliases, *flag.off_aliases}
    assert set(f"{VLLM} {SGLANG}".split()) <= accepted


def test_the_list_of_complaints_names_tests_that_exist() -> None:
    text = LIST.read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 40
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assigned = {
            t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)
        }
        assert name in functions | assigned, f"{file}::{name}"
    assert text.count("::") == len(named), "a test is named in another form"
