"""Requests that nobody would send: from the OpenAPI document, and bodies with damaged bytes.

SLIPSTREAM_FUZZ_SECONDS is how long both take together; `make fuzz` sets it to minutes.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from doubles.contract_model import EOS, ContractModel, check_nothing_left
from doubles.served import Serving, serving
from slipstream.core.config import env_value

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

SECONDS = float(env_value("fuzz_seconds") or 30) / 2
EXAMPLES = 20
"""Cases of one operation before it is the next one's turn."""

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
# A server may be full at any time, and says so; what is not JSON gets 415.
CONFIG = {
    "checks": {
        "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", "503"]},
        "negative_data_rejection": {"expected-statuses": ["400", "404", "413", "415", "503"]},
    }
}

PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    "/v1/completions": {"prompt": "x", "max_tokens": 5},
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 5}},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [104]},
}


@pytest.fixture(scope="module")
def small() -> Iterator[Serving]:
    """A server with a short context, so that requests without limits end soon."""
    with serving(ContractModel(max_model_len=64), max_body_size=2**20) as running:
        yield running
        check_nothing_left(running)


def until_time_is_up(turns: list[Callable[[], None]]) -> None:
    """Take turns until the time is up, each at least once."""
    deadline = time.monotonic() + SECONDS
    for number, turn in enumerate(itertools.cycle(turns)):
        if number >= len(turns) and time.monotonic() > deadline:
            return
        turn()


def test_requests_from_the_document(small: Serving) -> None:
    config = schemathesis.Config.from_dict(CONFIG)
    schema = schemathesis.openapi.from_url(f"{small.url}/openapi.json", config=config)
    limits = settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )

    def validate(case: Any) -> None:
        case.validate_response(case.call(timeout=60), checks=CHECKS)

    def mostly_valid(case: Any, rng: random.Random) -> None:
        names = rng.sample(sorted(case.body), rng.randint(0, min(4, len(case.body))))
        case.body = {**PLAIN[case.path], **{name: case.body[name] for name in names}}
        validate(case)

    def turn(operation: Any, mode: Any, check: Callable[..., None] = validate, **more: Any) -> Callable[[], None]:
        return lambda: limits(given(case=operation.as_strategy(generation_mode=mode), **more)(check))()

    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {*PLAIN, "/v1/models/{model}", "/stats"}
    positive, negative = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    turns = [turn(operation, positive) for operation in operations]
    for operation in operations:
        if operation.path in PLAIN:
            turns.append(turn(operation, negative))
            turns.append(turn(operation, positive, mostly_valid, rng=st.randoms()))
    until_time_is_up(turns)
    answered = {route for (route, status), count in small.service.requests_by_status.items() if status == 200 and count}
    assert answered >= set(PLAIN)
    check_nothing_left(small)


RULES = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 1,
    "logit_bias": {str(EOS): 5},
    "stop": ["a", "b"],
    "n": 2,
}
VALID: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "é😀"},
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
            ],
            "max_tokens": 5,
            "chat_template_kwargs": {"style": "<|im_end|>"},
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "top_logprobs": 2,
            "tools": [],
            **RULES,
        },
    ),
    (
        "/v1/completions",
        {"prompt": ["a", "b"], "max_tokens": 5, "echo": True, "logprobs": 1, "bad_words": ["x y"], **RULES},
    ),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 5, "allowed_token_ids": [1, 2], "min_tokens": 2}),
    (
        "/generate",
        {"text": "x", "sampling_params": {"max_new_tokens": 5, **RULES}, "return_logprob": True, "stream": True},
    ),
    ("/generate", {"input_ids": [[1, 2]], "sampling_params": [{"max_new_tokens": 5}], "logprob_start_len": 0}),
    ("/tokenize", {"messages": [{"role": "user", "content": "<|im_end|>"}], "return_token_strs": True}),
    ("/detokenize", {"tokens": [104, 105, 255]}),
]
VALUES = [
    *(
        b"null",
        b"true",
        b"-1",
        b"0",
        b"1.5",
        b"1e400",
        b"-0.0",
        b"9" * 30,
        b"9" * 5000,
        b"NaN",
        b"Infinity",
        b'""',
        b"[]",
        b"{}",
    ),
    *(
        b'"\\ud800"',
        b'"\\udc00\\ud800"',
        b'"\\u0000"',
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"<|im_start|>"',
        b"[null]",
        b'{"a":1}',
    ),
    *(
        b"[" * 300 + b"]" * 300,
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b"[" * 5000 + b"]" * 5000,
        b'"' + b"x" * 70_000 + b'"',
    ),
]


def with_value(rng: random.Random, document: Any) -> bytes:
    """The document with the value at a random place replaced by raw bytes."""
    mark = "\x01mark"
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            places.append((value, key))
            if isinstance(item, dict | list):
                walk(item)

    copy = json.loads(json.dumps(document))
    walk(copy)
    holder, key = rng.choice(places)
    holder[key] = mark
    return json.dumps(copy, ensure_ascii=False).encode().replace(json.dumps(mark).encode(), rng.choice(VALUES))


def damaged(rng: random.Random, document: Any) -> bytes:
    """The document's bytes with one to three faults."""
    raw = with_value(rng, document) if rng.random() < 0.7 else json.dumps(document, ensure_ascii=False).encode()
    for _ in range(rng.choice([0, 0, 1, 2])):
        at, more = sorted((rng.randrange(len(raw) + 1), rng.randrange(len(raw) + 1)))
        raw = (
            rng.choice(
                [
                    raw[:at],
                    raw[:at] + raw[more:],
                    raw[:more] + raw[at:],
                    raw[:at] + rng.randbytes(rng.randint(1, 4)) + raw[at:],
                    raw[:at] + rng.choice([b'"', b"{", b"}", b",", b":", b"\\", b"\x00", b"\xff"]) + raw[at:],
                    raw[:at] + rng.choice(VALUES) + raw[more:],
                    raw + raw,
                ]
            )
            or b" "
        )
    return raw


def test_damaged_bodies(small: Serving) -> None:
    seed = random.SystemRandom().getrandbits(32)
    rng = random.Random(seed)
    seen: dict[int, int] = {}
    with httpx.Client(base_url=small.url, timeout=60) as client:

        def turn() -> None:
            path, document = rng.choice(VALID)
            raw = damaged(rng, document)
            response = client.post(path, content=raw, headers={"content-type": "application/json"})
            status = response.status_code
            seen[status] = seen.get(status, 0) + 1
            assert status in (200, 400, 404, 413, 503), (seed, path, raw[:2000], response.text)
            if status != 200:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
                assert len(response.content) < 10_000

        until_time_is_up([turn] * 200)
    assert seen[200] > 0
    assert seen[400] > 0
    check_nothing_left(small)
