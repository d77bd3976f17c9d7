"""For every implemented field of every body: a setting, and what must come of it.

`Case.given` is added to the body's plain request for both answers; `setting` is the field's value in the second one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from doubles.contract_model import BOS, EOS, START
from slipstream.server.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    GenerateSampling,
    StreamOptions,
    TokenizeBody,
)

Effect = Callable[[Any, Any], bool]
"""Whether the answers without and with the setting are as they must be."""


def differs(plain: Any, changed: Any) -> bool:
    return bool(plain != changed)


@dataclass(frozen=True)
class Case:
    """One field's case; without `effect` the answers must just differ."""

    setting: Any
    given: dict[str, Any] = field(default_factory=dict)
    effect: Effect = differs
    in_place_of: str | None = None
    """A field that the setting excludes."""


AB = {"allowed_token_ids": [97, 98]}
ABCDE = {"allowed_token_ids": [97, 98, 99, 100, 101]}
ENDS = {"logit_bias": {str(EOS): 100}}
TALK = [{"role": "user", "content": "hello"}]
BEGUN = [*TALK, {"role": "assistant", "content": "well"}]


def text_of(answer: Any) -> str:
    """The first choice's text, in any of the shapes."""
    if "text" in answer:
        return str(answer["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def _choices(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else list(answer["choices"])


def tokens_of(answer: Any) -> int:
    usage = answer["meta_info"] if "meta_info" in answer else answer["usage"]
    return int(usage["completion_tokens"])


def prompt_of(answer: Any) -> int:
    usage = answer["meta_info"] if "meta_info" in answer else answer["usage"]
    return int(usage["prompt_tokens"])


def only(letters: str) -> Effect:
    return lambda plain, changed: set(text_of(plain)) - set(letters) != set() and set(text_of(changed)) <= set(letters)


def longer(plain: Any, changed: Any) -> bool:
    return tokens_of(changed) > tokens_of(plain)


def more_of(key: str) -> Effect:
    """The first choice, or the answer, has a value at `key` now."""

    def effect(plain: Any, changed: Any) -> bool:
        def has(answer: Any) -> bool:
            return answer.get(key) is not None or answer["choices"][0].get(key) is not None

        return has(changed) and not has(plain)

    return effect


def _ends_at_a(plain: Any, changed: Any) -> bool:
    return "a" in text_of(plain) and text_of(changed) == text_of(plain).partition("a")[0]


def _keeps_the_a(plain: Any, changed: Any) -> bool:
    return "a" not in text_of(plain) and text_of(changed) == text_of(plain) + "a"


def _streams(plain: Any, changed: Any) -> bool:
    return isinstance(changed, list) and not isinstance(plain, list)


SAMPLING: dict[str, Case] = {
    "n": Case(3, effect=lambda _, changed: len(_choices(changed)) == 3),
    "temperature": Case(0),
    "top_p": Case(0.01),
    "frequency_penalty": Case(2.0, AB),
    "presence_penalty": Case(2.0, ABCDE),
    "logit_bias": Case({"97": 100}, effect=only("a")),
    "top_k": Case(1),
    "min_p": Case(1.0),
    "typical_p": Case(0.01),
    "repetition_penalty": Case(9.0, ABCDE),
    "min_tokens": Case(5, ENDS, lambda plain, changed: tokens_of(plain) == 1 and tokens_of(changed) >= 5),
    "stop": Case("a", AB, _ends_at_a),
    "stop_token_ids": Case([97], AB, _ends_at_a),
    "include_stop_str_in_output": Case(True, {**AB, "stop": ["a"]}, _keeps_the_a),
    "ignore_eos": Case(True, ENDS, longer),
    "skip_special_tokens": Case(
        False,
        {"allowed_token_ids": [START]},
        lambda plain, changed: text_of(plain) == "" and text_of(changed) == "<|im_start|>" * tokens_of(changed),
    ),
    "bad_words": Case(["a"], AB, only("b")),
    "allowed_token_ids": Case([97, 98], effect=only("ab")),
}

OPENAI: dict[str, Case] = {
    **SAMPLING,
    "model": Case("alias", effect=lambda plain, changed: (plain["model"], changed["model"]) == ("double", "alias")),
    "seed": Case(2, effect=lambda plain, changed: changed["seed"] == 2 and text_of(plain) != text_of(changed)),
    "stream": Case(True, effect=_streams),
    "stream_options": Case({"include_usage": True}, {"stream": True}),
    "prompt_logprobs": Case(1, effect=more_of("prompt_logprobs")),
    "request_id": Case("mine", effect=lambda _, changed: changed["id"].endswith("-mine")),
    "return_token_ids": Case(True, effect=more_of("token_ids")),
}

CHAT: dict[str, Case] = {
    **OPENAI,
    "messages": Case([{"role": "user", "content": "other"}]),
    "max_tokens": Case(3, {"max_completion_tokens": None}, lambda _, changed: tokens_of(changed) == 3),
    "max_completion_tokens": Case(3, effect=lambda _, changed: tokens_of(changed) == 3),
    "logprobs": Case(True, effect=more_of("logprobs")),
    "top_logprobs": Case(
        2,
        {"logprobs": True},
        lambda _, changed: {len(e["top_logprobs"]) for e in changed["choices"][0]["logprobs"]["content"]} == {2},
    ),
    "return_tokens_as_token_ids": Case(
        True,
        {"logprobs": True},
        lambda _, changed: changed["choices"][0]["logprobs"]["content"][0]["token"].startswith("token_id:"),
    ),
    "add_generation_prompt": Case(False, effect=lambda plain, changed: prompt_of(changed) < prompt_of(plain)),
    "continue_final_message": Case(
        True, {"messages": BEGUN}, lambda plain, changed: prompt_of(changed) < prompt_of(plain)
    ),
    "chat_template_kwargs": Case(
        {"style": "dry"}, effect=lambda plain, changed: prompt_of(changed) == prompt_of(plain) + len("(dry)")
    ),
    "documents": Case(
        [{"title": "t", "text": "doc"}], effect=lambda plain, changed: prompt_of(changed) == prompt_of(plain) + 5
    ),
}

COMPLETION: dict[str, Case] = {
    **OPENAI,
    "prompt": Case("other"),
    "max_tokens": Case(3, effect=lambda _, changed: tokens_of(changed) == 3),
    "logprobs": Case(2, effect=lambda _, changed: len(changed["choices"][0]["logprobs"]["top_logprobs"][0]) >= 2),
    "echo": Case(True, effect=lambda plain, changed: text_of(changed) == "hello" + text_of(plain)),
    "add_special_tokens": Case(False, effect=lambda plain, changed: prompt_of(changed) == prompt_of(plain) - 1),
    "return_tokens_as_token_ids": Case(
        True,
        {"logprobs": 0},
        lambda _, changed: changed["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:"),
    ),
}

# The rules that /generate does not have are stood in for by biases.
LETTERS = {"logit_bias": {"97": 100, "98": 100}}
GENERATE_SAMPLING: dict[str, Case] = {
    "max_new_tokens": Case(3, effect=lambda _, changed: tokens_of(changed) == 3),
    "min_new_tokens": SAMPLING["min_tokens"],
    "sampling_seed": Case(
        2, effect=lambda plain, changed: changed["meta_info"]["seed"] == 2 and text_of(plain) != text_of(changed)
    ),
    "no_stop_trim": Case(True, {**LETTERS, "stop": ["a"]}, _keeps_the_a),
    "stop": Case("a", LETTERS, _ends_at_a),
    "stop_token_ids": Case([97], LETTERS, _ends_at_a),
    "frequency_penalty": Case(2.0, LETTERS),
    "presence_penalty": Case(2.0, {"logit_bias": {str(token): 20 for token in range(97, 102)}}),
    "repetition_penalty": Case(9.0),
    "skip_special_tokens": Case(False, {"logit_bias": {str(START): 100}}, SAMPLING["skip_special_tokens"].effect),
    "n": SAMPLING["n"],
    **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k", "min_p", "ignore_eos", "logit_bias")},
}


def _reports(key: str) -> Effect:
    return lambda plain, changed: key in changed["meta_info"] and key not in plain["meta_info"]


GENERATE: dict[str, Case] = {
    "text": Case("other"),
    "input_ids": Case([1, 2, 3], {}, lambda _, changed: prompt_of(changed) == 3, in_place_of="text"),
    "sampling_params": Case({"max_new_tokens": 3}, effect=lambda _, changed: tokens_of(changed) == 3),
    "stream": Case(True, effect=_streams),
    "return_logprob": Case(True, effect=_reports("output_token_logprobs")),
    "logprob_start_len": Case(0, {"return_logprob": True}, _reports("input_token_logprobs")),
    "top_logprobs_num": Case(
        2, {"return_logprob": True}, lambda _, changed: len(changed["meta_info"]["output_top_logprobs"][0]) == 2
    ),
    "return_text_in_logprobs": Case(
        True,
        {"return_logprob": True},
        lambda plain, changed: (
            plain["meta_info"]["output_token_logprobs"][0][2] is None
            and changed["meta_info"]["output_token_logprobs"][0][2] is not None
        ),
    ),
    "rid": Case("mine", effect=lambda _, changed: changed["meta_info"]["id"] == "mine"),
}

STREAM_OPTIONS: dict[str, Case] = {
    "include_usage": Case(
        True, effect=lambda plain, changed: changed[-1]["choices"] == [] and "usage" not in plain[-1]
    ),
    "continuous_usage_stats": Case(
        True, effect=lambda plain, changed: changed[0]["usage"]["completion_tokens"] > 0 and "usage" not in plain[0]
    ),
}

TOKENIZE: dict[str, Case] = {
    "prompt": Case("other"),
    "messages": Case(TALK, {}, lambda _, changed: changed["tokens"][0] == START, in_place_of="prompt"),
    "add_special_tokens": Case(False, effect=lambda plain, changed: plain["tokens"] == [BOS, *changed["tokens"]]),
    "return_token_strs": Case(True, effect=lambda _, changed: changed["token_strs"] == ["<|end|>", *"hello"]),
    "add_generation_prompt": Case(
        False, {"prompt": None, "messages": TALK}, lambda plain, changed: changed["count"] < plain["count"]
    ),
    "continue_final_message": Case(
        True, {"prompt": None, "messages": BEGUN}, lambda plain, changed: changed["count"] < plain["count"]
    ),
    "chat_template_kwargs": Case(
        {"style": "dry"},
        {"prompt": None, "messages": TALK},
        lambda plain, changed: changed["count"] == plain["count"] + len("(dry)"),
    ),
}

CASES: dict[type, dict[str, Case]] = {
    ChatBody: CHAT,
    CompletionBody: COMPLETION,
    GenerateBody: GENERATE,
    GenerateSampling: GENERATE_SAMPLING,
    StreamOptions: STREAM_OPTIONS,
    TokenizeBody: TOKENIZE,
    DetokenizeBody: {"tokens": Case([104, 105], effect=lambda _, changed: changed["prompt"] == "hi")},
}

ELSEWHERE: dict[type, set[str]] = {
    ChatBody: {"priority", "cache_salt"},
    CompletionBody: {"priority", "cache_salt"},
    GenerateBody: {"priority", "extra_key"},
    GenerateSampling: set(),
    StreamOptions: set(),
    TokenizeBody: {"model"},
    DetokenizeBody: {"model"},
}
"""Fields whose effect is on other requests or on the status; they have tests of their own."""

ADVISORY: dict[type, dict[str, Any]] = {
    ChatBody: {
        "user": "someone",
        "cache_prompt": False,
        "id_slot": 3,
        "metadata": {"a": "b"},
        "service_tier": "flex",
        "safety_identifier": "someone",
        "prompt_cache_key": "key",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "implicit"},
    },
    CompletionBody: {"user": "someone", "cache_prompt": False, "id_slot": 3},
    StreamOptions: {"include_obfuscation": True},
    GenerateBody: {"log_metrics": True},
}
