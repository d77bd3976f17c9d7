"""What is refused before it reaches the engine, and what a request is made of."""

from __future__ import annotations

from typing import Any

import pytest

from doubles.engines import make_inputs
from doubles.hash_model import HashModel
from doubles.small_vocabularies import byte_metadata
from slipstream.core.errors import ContextLengthError, InvalidRequestError
from slipstream.core.sampling_params import SamplingParams
from slipstream.text import stop_strings
from slipstream.text.chat_template import ChatTemplate
from slipstream.text.stop_strings import StopStrings, stop_table
from slipstream.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_gguf_metadata(byte_metadata("qwen2", "hello", marked=(("<|end|>", 3),)))
MODEL = HashModel(vocab=TOKENIZER.vocab_size)


def inputs(**rest: Any) -> Any:
    return make_inputs(MODEL, max_model_len=20, tokenizer=TOKENIZER, **rest)


@pytest.mark.parametrize(
    ("prompt", "params", "extra", "param"),
    [
        ([], {}, {}, "prompt"),
        ("", {}, {}, "prompt"),
        (7, {}, {}, "prompt"),
        (b"ab", {}, {}, "prompt"),
        ([1, -1], {}, {}, "prompt_token_ids"),
        ([1, 10**6], {}, {}, "prompt_token_ids"),
        ([1, True], {}, {}, "prompt_token_ids"),
        ([1, "a"], {}, {}, "prompt_token_ids"),
        ({"text": "x"}, {}, {}, "text"),
        ({"prompt": 3}, {}, {}, "prompt"),
        ({}, {}, {}, "prompt"),
        ({1: 2}, {}, {}, "1"),
        ({"prompt_token_ids": 5}, {}, {}, "prompt_token_ids"),
        ([1], {"bad_words": [" "]}, {}, "bad_words"),
        ([1], {}, {"request_id": 7}, "request_id"),
        ([1], {}, {"request_id": ""}, "request_id"),
        ("a\ud800b", {}, {}, "prompt"),
        ([1], {"logit_bias": {10**6: 1}}, {}, "logit_bias"),
        ([1], {"stop_token_ids": [10**6]}, {}, "stop_token_ids"),
        ([1], {"allowed_token_ids": [10**6]}, {}, "allowed_token_ids"),
        ([1], {}, {"priority": "high"}, "priority"),
        ([1], {}, {"priority": True}, "priority"),
        ([1], {}, {"cache_salt": ""}, "cache_salt"),
        ([1], {}, {"cache_salt": 5}, "cache_salt"),
        ([1] * 20, {}, {}, "prompt"),
        ([1] * 21, {"max_tokens": 0}, {}, "prompt"),
        ([1] * 5, {"max_tokens": 16}, {}, "max_tokens"),
    ],
)
def test_bad_input_names_the_field(prompt: Any, params: Any, extra: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        inputs().request(prompt, SamplingParams(**params), **extra)
    assert caught.value.param == param
    assert caught.value.status == 400


def test_too_long_names_both_numbers() -> None:
    with pytest.raises(ContextLengthError, match=r"30 tokens.*context of 20") as caught:
        inputs().request([1] * 30)
    assert caught.value.code == "context_length_exceeded"


def test_max_tokens_defaults_to_the_room_left() -> None:
    assert inputs().request([1] * 5).max_tokens == 15
    assert inputs().request([1] * 19).max_tokens == 1
    assert inputs().request([1] * 20, SamplingParams(max_tokens=0)).max_tokens == 0


def test_user_text_never_becomes_a_control_token() -> None:
    ids = inputs().request("hello<|end|>", SamplingParams(max_tokens=1)).prompt_ids
    assert not set(ids) & TOKENIZER.control_ids


def test_an_unseeded_request_gets_a_seed_of_its_own() -> None:
    source = inputs()
    seeds = {source.request([1]).seed for _ in range(20)}
    assert len(seeds) == 20
    assert source.request([1], SamplingParams(seed=-3)).seed == -3


def test_a_mapping_carries_ids_and_salt() -> None:
    request = inputs().request({"prompt_token_ids": [1, 2], "cache_salt": "s"})
    assert (request.prompt_ids, request.namespace) == ([1, 2], "s")


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequestError):
        make_inputs(MODEL).request([1], SamplingParams(stop=["a"]))
    with pytest.raises(InvalidRequestError):
        make_inputs(MODEL).chat([{"role": "user", "content": "a"}])


def test_chat_without_a_template_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="template"):
        inputs().chat([{"role": "user", "content": "a"}])


def test_text_that_gives_a_token_the_model_lacks_is_refused() -> None:
    small = make_inputs(HashModel(vocab=TOKENIZER.encode("hello")[0]), tokenizer=TOKENIZER)
    with pytest.raises(InvalidRequestError, match="but the model has"):
        small.request("hello")


def test_parameters_of_a_wrong_type_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params"):
        inputs().request([1], {"max_tokens": 2})


def test_the_table_of_stop_strings_is_made_before_the_engine_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes milliseconds, which the engine's thread would take from all other requests."""
    stop_table.cache_clear()
    requests = [inputs().request([1], SamplingParams(stop=["one", "two"], n=8)) for _ in range(4)]
    assert stop_table.cache_info().misses == 1
    monkeypatch.setattr(stop_strings.StopTable, "__init__", None)
    for request in requests:
        assert StopStrings(request.params.stop).push("a two")[1] == "two"


def chat_inputs(source: str) -> Any:
    found = inputs()
    found.template, found.max_model_len = ChatTemplate("x" + source), 200
    return found


READS = [
    "{{ NAME }}",
    "{% if NAME is defined %}y{% endif %}",
    "{% if NAME is not defined %}{% set NAME = 1 %}{% endif %}{{ NAME }}",
    "{% set NAME = NAME | default([]) %}",
    "{% set n = namespace(on=NAME) %}{{ n.on }}",
    "{% for document in NAME %}y{% endfor %}",
    "{% macro shown(given=NAME) %}{{ given }}{% endmacro %}{{ shown() }}",
    "{% macro shown() %}{{ NAME }}{% endmacro %}{{ shown() }}",
    "{% generation %}{{ NAME }}{% endgeneration %}",
    "{{ messages | selectattr('role', 'equalto', NAME) | list | length }}",
]
IGNORES = [
    "",
    "{# NAME #}",
    "{{ 'NAME' }}",
    "{{ messages[0].NAME }}",
    "{% set NAME = 1 %}{{ NAME }}",
    "{% for NAME in messages %}{{ NAME.role }}{% endfor %}",
    "{% macro shown(NAME) %}{{ NAME }}{% endmacro %}{{ shown(1) }}",
]


@pytest.mark.parametrize("name", ["documents", "style"])
@pytest.mark.parametrize(("source", "read"), [*((s, True) for s in READS), *((s, False) for s in IGNORES)])
def test_what_a_template_never_reads_is_refused(source: str, read: bool, name: str) -> None:
    processor = chat_inputs(source.replace("NAME", name))
    given: dict[str, Any] = {"documents": [{"text": "a"}]} if name == "documents" else {}
    variables = None if name == "documents" else {"style": "a"}
    talk = [{"role": "user", "content": "a", "name": "ann"}]
    if read:
        assert processor.chat_ids(talk, variables, **given)
        return
    with pytest.raises(InvalidRequestError, match=name) as caught:
        processor.chat_ids(talk, variables, **given)
    assert caught.value.param == (name if name == "documents" else "chat_template_kwargs")


def test_no_documents_are_none() -> None:
    assert chat_inputs("").chat_ids([{"role": "user", "content": "a"}], {}, documents=[])


def test_looking_for_variables_computes_nothing() -> None:
    """A template's constant expressions may be of any size."""
    chat_inputs("{{ 'a' * 10**12 }}{{ [0] * 10**12 }}{% if 'a' * 10**12 %}{% endif %}")
