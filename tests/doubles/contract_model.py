"""The served double of the contract tests: a tokenizer that wants BOS, and a template that shows what it is given."""

from __future__ import annotations

import time
from dataclasses import dataclass

from doubles.engines import check_idle
from doubles.served import CONTROL, ServedModel, Serving, tokenizer_of_bytes
from doubles.small_vocabularies import byte_metadata
from slipstream.engine.inputs import InputProcessor
from slipstream.text.chat_template import ChatTemplate
from slipstream.text.tokenizer import Tokenizer

NAMES = ("double", "alias")
BOS, START, EOS = 264, 265, 266
"""Ids of <|end|>, which stands in front of texts, of <|im_start|>, and of <|im_end|>, which ends a turn."""

TEMPLATE = (
    "{% for document in documents or [] %}[{{ document.text }}]{% endfor %}"
    "{% for message in messages %}"
    "{% if message.content == 'refuse me' %}{{ raise_exception('no such talk') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if style %}({{ style }}){% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class ContractModel(ServedModel):
    """Its token ids 0 to 255 are bytes."""

    def inputs(self, *, vocab_size: int, max_model_len: int) -> InputProcessor:
        inputs = super().inputs(vocab_size=vocab_size, max_model_len=max_model_len)
        inputs.tokenizer = _with_bos()
        inputs.template = ChatTemplate(TEMPLATE, bos_token="<|end|>", eos_token="<|im_end|>")
        return inputs


def _with_bos() -> Tokenizer:
    metadata = byte_metadata("qwen2", " the", " and", "ing", marked=tuple((text, 3) for text in CONTROL))
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.eos_token_id"] = tokens.index("<|im_end|>")
    metadata["tokenizer.ggml.bos_token_id"] = tokens.index("<|end|>")
    metadata["tokenizer.ggml.add_bos_token"] = True
    assert len(tokens) == tokenizer_of_bytes().vocab_size
    return Tokenizer.from_gguf_metadata(metadata)


def check_nothing_left(server: Serving) -> None:
    """The engine comes to rest soon, and holds nothing then."""
    deadline = time.monotonic() + 10
    while server.engine.has_work and time.monotonic() < deadline:
        time.sleep(0.005)
    check_idle(server.engine)
