"""Files whose values have a wrong kind or size give one sentence, quickly, and never a bare Python error."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from doubles.small_vocabularies import byte_metadata
from doubles.tiny_checkpoints import tiny_config
from slipstream.core.damage import reading
from slipstream.core.errors import InvalidRequestError, LoadError
from slipstream.models.registry import build_model
from slipstream.text.chat_template import ChatTemplate
from slipstream.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 2**22},
        {"num_hidden_layers": 2**40},
        {"head_dim": 2**40},
        {"hidden_size": 2**40},
        {"vocab_size": 2**60},
        {"architectures": 5},
        {"rope_scaling": {"rope_type": "yarn", "factor": float("inf"), "original_max_position_embeddings": 32}},
        {"rope_scaling": {"rope_type": "factors", "factors": "ab"}},
        {"rope_scaling": 7},
        {"rms_norm_eps": []},
    ],
    ids=str,
)
def test_config(change: dict[str, Any]) -> None:
    with pytest.raises(LoadError):
        build_model({**tiny_config("llama"), **change})


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer.ggml.token_type": 5},
        {"tokenizer.ggml.pre": []},
        {"tokenizer.ggml.merges": [1, 2]},
        {"tokenizer.ggml.bos_token_id": "x"},
        {"tokenizer.ggml.tokens": 3},
    ],
    ids=str,
)
def test_tokenizer(change: dict[str, Any]) -> None:
    with pytest.raises(LoadError), reading("tokenizer"):
        Tokenizer.from_gguf_metadata({**byte_metadata("qwen2"), **change})


def test_errors_made_on_purpose_pass_through() -> None:
    with pytest.raises(InvalidRequestError), reading("x"):
        raise InvalidRequestError("no")


@pytest.mark.parametrize("use", ["{{ %s }}", "{% set a = %s %}", "{% if %s %}{% endif %}"])
def test_templates_compute_nothing_when_loaded(use: str) -> None:
    # Folded while compiling, this would be a hundred megabytes.
    tracemalloc.start()
    ChatTemplate("{% if false %}" + use.replace("%s", "'x' * 10**8") + "{% endif %}ok", bos_token="", eos_token="")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e7


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    from slipstream.loading.checkpoint import open_checkpoint

    with pytest.raises(LoadError, match="no such file"):
        open_checkpoint(tmp_path / "none.gguf")
