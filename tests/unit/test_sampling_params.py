"""Sampling parameters: defaults, every limit, and what is accepted in more than one form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from slipstream.core.errors import InvalidRequestError
from slipstream.core.sampling_params import SamplingParams

WRONG: list[tuple[str, Any]] = [
    *[("n", value) for value in (0, -1, 129, 1.0, True, "1", None)],
    *[("max_tokens", value) for value in (-1, -5, 1.5, False, "7")],
    *[("min_tokens", value) for value in (-1, 0.0, True, None)],
    *[("seed", value) for value in (2**64, -(2**63) - 1, 1.0, True, "1")],
    *[("temperature", value) for value in (-0.1, math.nan, math.inf, True, "1", None, 10**400)],
    *[("top_k", value) for value in (-2, 1.0, True, None)],
    *[("top_p", value) for value in (0, -0.1, 1.01, math.nan, None)],
    *[("min_p", value) for value in (-0.01, 1.01, math.nan, None)],
    *[("typical_p", value) for value in (0, 1.01, math.nan)],
    *[("repetition_penalty", value) for value in (0, -1, math.inf, math.nan, None)],
    *[("frequency_penalty", value) for value in (-2.01, 2.01, math.nan, None)],
    *[("presence_penalty", value) for value in (-2.01, 2.01, "0")],
    *[("logit_bias", value) for value in ([1], "x", {-1: 0}, {1: 101}, {1: math.nan}, {"a": 1}, {"-1": 1}, {1.5: 1})],
    *[("bad_words", value) for value in ("word", [""], [1], 3, ["a"] * 1025, ["a" * 16384, "b"])],
    *[("allowed_token_ids", value) for value in ([], [-1], [1.0], "12", {1: 2}, 5)],
    *[("stop", value) for value in ("", [""], [1], 5, ["x"] * 17, "x" * 1025, ["y", "x" * 1025])],
    *[("stop_token_ids", value) for value in ([-1], [True], "1", 7, range(1025))],
    *[("logprobs", value) for value in (-1, 21, True, 1.0)],
    *[("prompt_logprobs", value) for value in (-1, 21, "1")],
    *[(name, 1) for name in ("include_stop_str_in_output", "ignore_eos", "echo", "skip_special_tokens")],
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: repr(value)[:20])
def test_a_wrong_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.status == 400
    assert name in str(caught.value)
    assert " must be " in str(caught.value)


RIGHT: list[tuple[str, Any]] = [
    *[("n", value) for value in (1, 128, np.int64(3))],
    *[("seed", value) for value in (0, -1, 2**64 - 1, -(2**63), None)],
    *[("temperature", value) for value in (0, 1e-300, 100, np.float32(0.5))],
    *[("top_k", value) for value in (0, -1, 10**9)],
    *[("top_p", value) for value in (1, 1e-9)],
    *[("min_p", value) for value in (0, 1)],
    *[("frequency_penalty", value) for value in (-2, 2)],
    *[("logprobs", value) for value in (0, 20)],
    *[("stop", value) for value in ("a", ["a", "b"], (), None, ["x" * 1024] * 16)],
    *[("stop_token_ids", value) for value in (range(1024), (), None)],
    *[("bad_words", value) for value in (["a" * 16] * 1024, ["a" * 16384], [])],
]


@pytest.mark.parametrize(("name", "value"), RIGHT, ids=lambda value: repr(value)[:20])
def test_the_limits_themselves_are_accepted(name: str, value: object) -> None:
    SamplingParams(**{name: value})


def test_defaults_ask_for_nothing() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, 0, 1.0, 0.0)
    assert params.max_tokens is None
    assert params.logprobs is None
    assert not params.greedy
    params.validate_for_model(1)


def test_forms_are_made_one() -> None:
    params = SamplingParams(stop="end", logit_bias={"5": 1, 7: -2.5}, top_k=-1, stop_token_ids=[3], temperature=0)
    assert list(params.stop) == ["end"]
    assert params.logit_bias == {5: 1.0, 7: -2.5}
    assert params.top_k == 0
    assert tuple(params.stop_token_ids) == (3,)
    assert params.greedy


def test_lists_cannot_be_changed_from_outside() -> None:
    words, biases = ["a"], {1: 2.0}
    params = SamplingParams(bad_words=words, logit_bias=biases)
    words.append("b")
    biases[2] = 1.0
    assert list(params.bad_words or ()) == ["a"]
    assert params.logit_bias == {1: 2.0}


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    SamplingParams(min_tokens=4, max_tokens=4)
    with pytest.raises(InvalidRequestError, match=r"max_tokens \(4\)") as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"


def test_from_mapping_refuses_unknown_names() -> None:
    assert SamplingParams.from_mapping({"temperature": 0.5, "n": 2}).n == 2
    with pytest.raises(InvalidRequestError, match="best_of") as caught:
        SamplingParams.from_mapping({"best_of": 2})
    assert caught.value.param == "best_of"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {100: 1.0}),
        ("allowed_token_ids", [5, 100]),
        ("allowed_token_ids", [5] * 101),
        ("stop_token_ids", [100]),
    ],
)
def test_token_ids_must_be_in_the_vocabulary(name: str, value: object) -> None:
    params = SamplingParams(**{name: value})
    params.validate_for_model(101)
    with pytest.raises(InvalidRequestError, match="vocabulary's size 100") as caught:
        params.validate_for_model(100)
    assert caught.value.param == name
