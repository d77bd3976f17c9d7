"""JSON schemas of what the routes answer, for the OpenAPI document. Each names what is always there."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}


def record(**properties: Schema) -> Schema:
    """An object that has at least these properties."""
    return {"type": "object", "required": list(properties), "properties": properties}


def items(schema: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": schema, **limits}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*values: Any) -> Schema:
    return {"enum": list(values)}


ERROR = record(error=record(message=TEXT, type=TEXT, param=nullable(TEXT), code=nullable(TEXT)))

EVENT = record(data=TEXT)
"""One server-sent event of a stream: JSON, or [DONE] in the end."""

_USAGE = record(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=record(cached_tokens=COUNT),
)
_HEAD = {"id": TEXT, "created": COUNT, "model": TEXT, "system_fingerprint": TEXT, "seed": WHOLE}
_END = {"finish_reason": one_of("stop", "length"), "stop_reason": {"type": ["string", "integer", "null"]}}
_SCORED = record(token=TEXT, logprob=NUMBER, bytes=items(COUNT))
_CHAT_CHOICE = record(
    index=COUNT,
    message=record(role=one_of("assistant"), content=TEXT, refusal={"type": "null"}),
    logprobs=nullable(record(content=items(_SCORED), refusal={"type": "null"})),
    **_END,
)
_TEXT_CHOICE = record(
    index=COUNT,
    text=TEXT,
    logprobs=nullable(
        record(
            text_offset=items(COUNT),
            token_logprobs=items(nullable(NUMBER)),
            tokens=items(TEXT),
            top_logprobs=items(nullable({"type": "object", "additionalProperties": NUMBER})),
        )
    ),
    **_END,
)
_GENERATED = record(
    text=TEXT,
    output_ids=items(COUNT),
    meta_info=record(
        id=TEXT,
        finish_reason=record(type=one_of("stop", "length")),
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        cached_tokens=COUNT,
        e2e_latency=NUMBER,
        seed=WHOLE,
    ),
)
_MODEL = record(id=TEXT, object=one_of("model"), created=COUNT, owned_by=TEXT, root=TEXT, max_model_len=nullable(COUNT))
_STATUS = record(status=TEXT)

ANSWERS: dict[str, Schema] = {
    "/v1/chat/completions": record(
        object=one_of("chat.completion"), choices=items(_CHAT_CHOICE, minItems=1), usage=_USAGE, **_HEAD
    ),
    "/v1/completions": record(
        object=one_of("text_completion"),
        choices=items(_TEXT_CHOICE, minItems=1),
        usage=_USAGE,
        **{**_HEAD, "seed": nullable(WHOLE)},
    ),
    "/generate": {"anyOf": [_GENERATED, items(_GENERATED, minItems=1)]},
    "/tokenize": record(count=COUNT, max_model_len=COUNT, tokens=items(COUNT), token_strs=nullable(items(TEXT))),
    "/detokenize": record(prompt=TEXT),
    "/tokenizer_info": record(
        vocab_size=COUNT,
        max_model_len=COUNT,
        bos_token=nullable(TEXT),
        bos_token_id=nullable(COUNT),
        eos_token=nullable(TEXT),
        eos_token_id=nullable(COUNT),
        add_bos_token={"type": "boolean"},
        chat_template=nullable(TEXT),
    ),
    "/v1/models": record(object=one_of("list"), data=items(_MODEL, minItems=1)),
    "/v1/models/{model}": _MODEL,
    "/health": _STATUS,
    "/health/live": _STATUS,
    "/health/ready": _STATUS,
    "/version": record(version=TEXT),
    "/stats": {"type": "object"},
}
"""By path. /metrics is text."""
