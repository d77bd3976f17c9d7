"""A small random model in a file that the command serves like a real one: with a tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

from doubles.served import CONTROL, TEMPLATE
from doubles.small_vocabularies import byte_metadata
from doubles.tiny_checkpoints import tiny_model, write_gguf


def write_servable(path: Path) -> Path:
    """Write a GGUF file whose tokens are bytes, some words and ChatML's control tokens."""
    metadata = byte_metadata("qwen2", " the", " and", "ing", marked=tuple((text, 3) for text in CONTROL))
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.eos_token_id"] = tokens.index("<|im_end|>")
    metadata["tokenizer.ggml.bos_token_id"] = tokens.index("<|end|>")
    metadata["tokenizer.chat_template"] = TEMPLATE
    del metadata["general.architecture"]
    return write_gguf(path, tiny_model("llama", vocab_size=len(tokens)), metadata=metadata)
