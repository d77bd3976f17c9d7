"""The request bodies, one class per route. Each field says how it is supported (see `fields`)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from slipstream.server.fields import advisory, between, implemented, neutral
from slipstream.text.chat_messages import KNOWN_ROLES

Text = str | None
Whole = int | None
Number = float | None
Switch = bool | None
Json = Any


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of all bodies: an unknown field is an error that names it."""


_STOP_LENGTH = {"minLength": 1, "maxLength": 1024}
_STOP: dict[str, Any] = {**_STOP_LENGTH, "maxItems": 16, "items": _STOP_LENGTH}
_MANY: dict[str, Any] = {"maxItems": 1024}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string"}},
}
_MESSAGES: dict[str, Any] = {
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": list(KNOWN_ROLES)},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
        },
    }
}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_IDS_OR_LISTS: dict[str, Any] = {
    "anyOf": [_IDS, {"type": "array", "items": _IDS, "minItems": 1, **_MANY}, {"type": "null"}]
}
_PROMPTS: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, **_MANY},
        *_IDS_OR_LISTS["anyOf"][:2],
    ]
}


class StreamOptions(Body):
    include_usage: Annotated[Switch, implemented("a last chunk with the request's usage")] = None
    continuous_usage_stats: Annotated[Switch, implemented("usage so far in every chunk (vLLM)")] = None
    include_obfuscation: Annotated[Switch, advisory("chunks are never padded")] = None


class Sampling(Body):
    """What /v1/chat/completions and /v1/completions have in common."""

    model: Annotated[Text, implemented("one of the served names; null: the first of them")] = None
    n: Annotated[Whole, implemented("choices, 1 to 128", between(1, 128))] = None
    seed: Annotated[
        Whole, implemented("64 bits; the answer's `seed` is the one in use", between(-(2**63), 2**64 - 1))
    ] = None
    stream: Annotated[Switch, implemented("answer in server-sent events")] = None
    stream_options: Annotated[StreamOptions | None, implemented("with `stream` only")] = None
    stop: Annotated[
        str | list[str] | None, implemented("up to 16 strings, of up to 1,024 characters, that end the output", _STOP)
    ] = None
    temperature: Annotated[Number, implemented("0 or more; 0: greedy", between(0))] = None
    top_p: Annotated[Number, implemented("in (0, 1]", between(0, 1, above=True))] = None
    frequency_penalty: Annotated[Number, implemented("in [-2, 2]", between(-2, 2))] = None
    presence_penalty: Annotated[Number, implemented("in [-2, 2]", between(-2, 2))] = None
    logit_bias: Annotated[dict[str, float] | None, implemented("token id to a number in [-100, 100]")] = None
    user: Annotated[Text, advisory("ignored")] = None
    cache_prompt: Annotated[Switch, advisory("ignored; the prefix cache is on or off for all (llama.cpp)")] = None
    id_slot: Annotated[Whole, advisory("ignored; there are no slots (llama.cpp)")] = None

    top_k: Annotated[Whole, implemented("keep the k most likely tokens; 0 or -1: all", between(-1, 2**31 - 1))] = None
    min_p: Annotated[Number, implemented("in [0, 1]", between(0, 1))] = None
    typical_p: Annotated[Number, implemented("in (0, 1]", between(0, 1, above=True))] = None
    repetition_penalty: Annotated[Number, implemented("above 0", between(0, above=True))] = None
    min_tokens: Annotated[Whole, implemented("no end before so many tokens", between(0))] = None
    stop_token_ids: Annotated[list[int] | None, implemented("up to 1,024 tokens that end the output", _MANY)] = None
    include_stop_str_in_output: Annotated[Switch, implemented("keep the text that ended the output")] = None
    ignore_eos: Annotated[Switch, implemented("go on after the model's end of text")] = None
    skip_special_tokens: Annotated[Switch, implemented("leave control tokens out of the text; default true")] = None
    bad_words: Annotated[list[str] | None, implemented("up to 1,024 words that must not be generated", _MANY)] = None
    allowed_token_ids: Annotated[list[int] | None, implemented("the only tokens that may be generated")] = None
    prompt_logprobs: Annotated[Whole, implemented("alternatives per prompt token, 0 to 20 (vLLM)", between(0, 20))] = (
        None
    )
    priority: Annotated[Whole, implemented("lower is served first")] = None
    cache_salt: Annotated[Text, implemented("the prefix cache is shared only with requests of the same salt")] = None
    request_id: Annotated[Text, implemented("becomes part of the answer's id; at most 128 characters")] = None
    return_token_ids: Annotated[Switch, implemented("add prompt_token_ids and token_ids (vLLM)")] = None
    return_tokens_as_token_ids: Annotated[Switch, implemented("name tokens token_id:N in logprobs (vLLM)")] = None

    timings_per_token: Annotated[Json, neutral(False)] = None
    spaces_between_special_tokens: Annotated[Json, neutral(True)] = None
    truncate_prompt_tokens: Annotated[Json, neutral(text="a prompt is never cut")] = None
    use_beam_search: Annotated[Json, neutral(False)] = None
    best_of: Annotated[Json, neutral(1)] = None
    length_penalty: Annotated[Json, neutral(1.0, text="for beam search only")] = None
    response_format: Annotated[Json, neutral({"type": "text"}, text="structured output is not implemented")] = None
    structured_outputs: Annotated[Json, neutral(text="structured output is not implemented")] = None
    guided_json: Annotated[Json, neutral(text="structured output is not implemented")] = None
    guided_regex: Annotated[Json, neutral(text="structured output is not implemented")] = None
    guided_choice: Annotated[Json, neutral(text="structured output is not implemented")] = None
    guided_grammar: Annotated[Json, neutral(text="structured output is not implemented")] = None
    logits_processors: Annotated[Json, neutral([])] = None


class ChatBody(Sampling, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[
        list[dict[str, Any]],
        implemented("the conversation; text content only", min_length=1, schema=_MESSAGES),
    ]
    max_tokens: Annotated[Whole, implemented("old name of max_completion_tokens", between(0))] = None
    max_completion_tokens: Annotated[
        Whole, implemented("tokens to generate at most; null: the room left", between(0))
    ] = None
    logprobs: Annotated[Switch, implemented("report each token's log-probability")] = None
    top_logprobs: Annotated[Whole, implemented("alternatives per token, 0 to 20; with `logprobs`", between(0, 20))] = (
        None
    )

    add_generation_prompt: Annotated[Switch, implemented("begin the assistant's answer; default true")] = None
    continue_final_message: Annotated[Switch, implemented("go on within the last message")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, implemented("further variables that the template reads")] = (
        None
    )
    documents: Annotated[list[dict[str, Any]] | None, implemented("documents, if the template reads them")] = None

    metadata: Annotated[dict[str, Any] | None, advisory("ignored")] = None
    service_tier: Annotated[Text, advisory("ignored; there is one tier")] = None
    safety_identifier: Annotated[Text, advisory("ignored")] = None
    prompt_cache_key: Annotated[Text, advisory("taken as `cache_salt` where that is not given")] = None
    prompt_cache_retention: Annotated[Text, advisory("ignored; the cache keeps what it has room for")] = None
    prompt_cache_options: Annotated[Json, advisory("ignored; the cache keeps what it has room for")] = None

    echo: Annotated[Json, neutral(False, text="use continue_final_message")] = None
    add_special_tokens: Annotated[Json, neutral(False, text="the template writes BOS itself")] = None
    include_reasoning: Annotated[Json, neutral(True, text="reasoning is part of the text")] = None
    separate_reasoning: Annotated[Json, neutral(True, False, text="there is no reasoning parser")] = None
    stream_reasoning: Annotated[Json, neutral(True, False, text="there is no reasoning parser")] = None
    store: Annotated[Json, neutral(False, text="answers are not stored")] = None
    tools: Annotated[Json, neutral([], text="tool calls are not implemented")] = None
    tool_choice: Annotated[Json, neutral("none", "auto", text="tool calls are not implemented")] = None
    parallel_tool_calls: Annotated[Json, neutral(True, False, text="tool calls are not implemented")] = None
    functions: Annotated[Json, neutral([], text="tool calls are not implemented")] = None
    function_call: Annotated[Json, neutral("none", "auto", text="tool calls are not implemented")] = None
    audio: Annotated[Json, neutral(text="text output only")] = None
    modalities: Annotated[Json, neutral(["text"], text="text output only")] = None
    moderation: Annotated[Json, neutral(text="there is no moderation")] = None
    prediction: Annotated[Json, neutral(text="predicted outputs are not implemented")] = None
    reasoning_effort: Annotated[Json, neutral(text="use chat_template_kwargs where a template takes it")] = None
    verbosity: Annotated[Json, neutral("medium")] = None
    web_search_options: Annotated[Json, neutral(text="there is no web search")] = None
    chat_template: Annotated[Json, neutral(text="set when the server is started")] = None


class CompletionBody(Sampling, kw_only=True):
    """POST /v1/completions"""

    prompt: Annotated[
        str | list[Any] | None,
        implemented(
            "a text, a list of texts, a list of token ids, or a list of such lists",
            schema=_PROMPTS,
        ),
    ]
    max_tokens: Annotated[
        Whole, implemented("tokens to generate at most; default 16, as OpenAI has it", between(0))
    ] = None
    logprobs: Annotated[
        Whole, implemented("alternatives per token, 0 to 20; with `echo` for the prompt too", between(0, 20))
    ] = None
    echo: Annotated[Switch, implemented("put the prompt before the output")] = None
    add_special_tokens: Annotated[Switch, implemented("put BOS before a text if the model wants it; default true")] = (
        None
    )
    suffix: Annotated[Json, neutral("", text="filling in the middle is not implemented")] = None


class GenerateSampling(Body):
    """`sampling_params` of POST /generate"""

    max_new_tokens: Annotated[
        Whole, implemented("tokens to generate at most; default 128, as SGLang has it", between(0))
    ] = None
    min_new_tokens: Annotated[Whole, implemented("no end before so many tokens", between(0))] = None
    temperature: Annotated[Number, implemented("0 or more; 0: greedy", between(0))] = None
    top_p: Annotated[Number, implemented("in (0, 1]", between(0, 1, above=True))] = None
    top_k: Annotated[Whole, implemented("keep the k most likely tokens; 0 or -1: all", between(-1, 2**31 - 1))] = None
    min_p: Annotated[Number, implemented("in [0, 1]", between(0, 1))] = None
    frequency_penalty: Annotated[Number, implemented("in [-2, 2]", between(-2, 2))] = None
    presence_penalty: Annotated[Number, implemented("in [-2, 2]", between(-2, 2))] = None
    repetition_penalty: Annotated[Number, implemented("above 0", between(0, above=True))] = None
    stop: Annotated[
        str | list[str] | None, implemented("up to 16 strings, of up to 1,024 characters, that end the output", _STOP)
    ] = None
    stop_token_ids: Annotated[list[int] | None, implemented("up to 1,024 tokens that end the output", _MANY)] = None
    no_stop_trim: Annotated[Switch, implemented("keep the text that ended the output")] = None
    ignore_eos: Annotated[Switch, implemented("go on after the model's end of text")] = None
    skip_special_tokens: Annotated[Switch, implemented("leave control tokens out of the text; default true")] = None
    logit_bias: Annotated[dict[str, float] | None, implemented("token id to a number in [-100, 100]")] = None
    n: Annotated[Whole, implemented("choices, 1 to 128", between(1, 128))] = None
    sampling_seed: Annotated[Whole, implemented("64 bits", between(-(2**63), 2**64 - 1))] = None
    spaces_between_special_tokens: Annotated[Json, neutral(True)] = None
    stop_regex: Annotated[Json, neutral()] = None
    regex: Annotated[Json, neutral(text="structured output is not implemented")] = None
    json_schema: Annotated[Json, neutral(text="structured output is not implemented")] = None
    ebnf: Annotated[Json, neutral(text="structured output is not implemented")] = None
    structural_tag: Annotated[Json, neutral(text="structured output is not implemented")] = None
    custom_params: Annotated[Json, neutral()] = None


class GenerateBody(Body):
    """POST /generate, as SGLang has it"""

    text: Annotated[str | list[str] | None, implemented("a prompt or a list of up to 1,024 prompts", _MANY)] = None
    input_ids: Annotated[list[Any] | None, implemented("token ids in place of text", schema=_IDS_OR_LISTS)] = None
    sampling_params: Annotated[
        GenerateSampling | list[GenerateSampling] | None, implemented("for all prompts, or one for each")
    ] = None
    stream: Annotated[Switch, implemented("answer in server-sent events; each holds the text so far")] = None
    return_logprob: Annotated[bool | list[bool] | None, implemented("report log-probabilities")] = None
    logprob_start_len: Annotated[
        int | list[int] | None,
        implemented(
            "prompt tokens from here on are reported too, in a stream in each choice's first and last events; "
            "-1: none of them; with `return_logprob`"
        ),
    ] = None
    top_logprobs_num: Annotated[
        int | list[int] | None, implemented("alternatives per token, 0 to 20; with `return_logprob`")
    ] = None
    return_text_in_logprobs: Annotated[Switch, implemented("add each token's text; with `return_logprob`")] = None
    rid: Annotated[str | list[str] | None, implemented("the id in meta_info")] = None
    extra_key: Annotated[Text, implemented("the prefix cache is shared only with requests of the same key")] = None
    priority: Annotated[Whole, implemented("lower is served first")] = None
    input_embeds: Annotated[Json, neutral()] = None
    image_data: Annotated[Json, neutral(text="text only")] = None
    audio_data: Annotated[Json, neutral(text="text only")] = None
    video_data: Annotated[Json, neutral(text="text only")] = None
    lora_path: Annotated[Json, neutral()] = None
    return_hidden_states: Annotated[Json, neutral(False)] = None
    return_routed_experts: Annotated[Json, neutral(False)] = None
    token_ids_logprob: Annotated[Json, neutral()] = None
    log_metrics: Annotated[Switch, advisory("ignored; requests are always counted")] = None


class TokenizeBody(Body):
    """POST /tokenize, as vLLM has it"""

    model: Annotated[Text, implemented("one of the served names")] = None
    prompt: Annotated[Text, implemented("a text")] = None
    messages: Annotated[list[dict[str, Any]] | None, implemented("a conversation, in place of a text")] = None
    add_special_tokens: Annotated[Switch, implemented("put BOS before a text; default true, false for messages")] = None
    return_token_strs: Annotated[Switch, implemented("add each token's text")] = None
    add_generation_prompt: Annotated[Switch, implemented("begin the assistant's answer; default true")] = None
    continue_final_message: Annotated[Switch, implemented("go on within the last message")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, implemented("further variables that the template reads")] = (
        None
    )
    tools: Annotated[Json, neutral([], text="tool calls are not implemented")] = None
    chat_template: Annotated[Json, neutral(text="set when the server is started")] = None


class DetokenizeBody(Body):
    """POST /detokenize, as vLLM has it"""

    tokens: Annotated[list[int], implemented("token ids")]
    model: Annotated[Text, implemented("one of the served names")] = None
