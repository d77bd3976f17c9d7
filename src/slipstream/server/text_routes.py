"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer over HTTP, in vLLM's shapes"""

from __future__ import annotations

from typing import Any

from slipstream.core.errors import InvalidRequestError
from slipstream.engine.inputs import InputProcessor
from slipstream.server.bodies import DetokenizeBody, TokenizeBody
from slipstream.server.logprobs import TokenNames
from slipstream.text.tokenizer import Tokenizer

MAX_CHARACTERS = 2**20
"""Of a text at /tokenize: the tokenizer takes hundreds of bytes for each."""


def tokenize(inputs: InputProcessor, body: TokenizeBody) -> dict[str, Any]:
    """The token ids of a text, or of a conversation."""
    tokenizer = tokenizer_of(inputs)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            raise InvalidRequestError("the template of messages writes BOS itself", param="add_special_tokens")
        begins, continues = body.add_generation_prompt, bool(body.continue_final_message)
        ids = inputs.chat_ids(
            body.messages,
            body.chat_template_kwargs,
            continue_final_message=continues,
            add_generation_prompt=not continues if begins is None else begins,
        )
    else:
        _refuse_chat_fields(body)
        if len(body.prompt or "") > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"prompt has {len(body.prompt or '')} characters; at most {MAX_CHARACTERS}", param="prompt"
            )
        ids = tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
    names = TokenNames(tokenizer)
    return {
        "count": len(ids),
        "max_model_len": inputs.max_model_len,
        "tokens": ids,
        "token_strs": [names.name(token) for token in ids] if body.return_token_strs else None,
    }


def _refuse_chat_fields(body: TokenizeBody) -> None:
    for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise InvalidRequestError(f"{name} belongs to messages, not to prompt", param=name)


def detokenize(inputs: InputProcessor, body: DetokenizeBody) -> dict[str, Any]:
    """The text of token ids, control tokens included."""
    tokenizer = tokenizer_of(inputs)
    for index, token in enumerate(body.tokens):
        if not 0 <= token < inputs.vocab_size:
            raise InvalidRequestError(
                f"tokens[{index}] must be a token id from 0 to {inputs.vocab_size - 1}, not {token}", param="tokens"
            )
    return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}


def tokenizer_info(inputs: InputProcessor) -> dict[str, Any]:
    """What a client that tokenizes by itself has to know."""
    tokenizer = tokenizer_of(inputs)
    eos = next(iter(tokenizer.eos_ids), None)
    return {
        "vocab_size": inputs.vocab_size,
        "max_model_len": inputs.max_model_len,
        "bos_token": tokenizer.text_of(tokenizer.bos_id) or None,
        "bos_token_id": tokenizer.bos_id,
        "eos_token": tokenizer.text_of(eos) or None,
        "eos_token_id": eos,
        "add_bos_token": tokenizer.add_bos,
        "chat_template": None if inputs.template is None else inputs.template.source,
    }


def tokenizer_of(inputs: InputProcessor) -> Tokenizer:
    """The model's tokenizer. Raises InvalidRequestError if there is none."""
    if inputs.tokenizer is None:
        raise InvalidRequestError("this model has no tokenizer")
    return inputs.tokenizer
