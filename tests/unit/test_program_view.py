"""What `doctor --program` shows adds up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from doubles.native_programs import libraries, why_missing
from doubles.tiny_checkpoints import tiny_model, write_gguf
from slipstream.cli.main import app


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))


def test_a_program_is_shown_with_what_it_reads(tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "m.gguf", tiny_model("qwen3_moe"), formats="Q8_0"))
    found = []
    for context in ("100", "200"):
        result = CliRunner().invoke(app, ["doctor", "--model", path, "--program", "--context", context, "--json"])
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout)["program"])
    near, far = found
    assert near["bytes_per_step"] == sum(line["bytes"] for line in near["instructions"])
    # Two layers of two heads, keys and values of width 16 in bf16.
    assert far["bytes_per_step"] - near["bytes_per_step"] == 100 * 2 * 2 * 2 * 16 * 2
    names = [line["name"] for line in near["instructions"]]
    assert names.count("qkv") == names.count("moe") == 2
    # Of four experts two are read.
    assert near["bytes_by_instruction"]["moe"] < near["packed_bytes"] * 0.6
    shown = CliRunner().invoke(app, ["doctor", "--model", path, "--program"])
    assert "2 of 4 experts" in shown.output
    assert "128 logits" in shown.output


def doctor(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["doctor", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_doctor_says_what_would_run(tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "m.gguf", tiny_model("llama", head_dim=32), formats="Q8_0"))
    found = doctor("--model", path)
    if libraries():
        assert found["numerics"].startswith("native: ")
        assert found["model"]["loaded_as"] == "packed"
        assert found["ops"] == {
            "embedding": "embed",
            "linear": "linear, qkv, gateup",
            "moe": "not in this model",
            "paged_attention": "attend",
            "rms_norm": "norm",
            "rope": "qkv",
            "rope_table": "rope_table",
            "sample": "the native sampler",
            "silu_mul": "gateup",
            "write_kv": "qkv",
        }
    found = doctor("--model", path, "--numerics", "reference")
    assert found["numerics"] == "reference: numerics reference was chosen"
    assert found["model"]["loaded_as"] == "float32"
    assert found["ops"]["rms_norm"] == "reference"


@pytest.mark.skipif(not libraries(), reason=why_missing())
def test_doctor_says_why_a_model_runs_by_the_reference(tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "m.gguf", tiny_model("llama"), formats="Q8_0"))
    found = doctor("--model", path)
    assert found["numerics"].startswith("reference: heads are 16 wide")
    assert found["model"]["loaded_as"] == "float32"
    # Without a model's files only what the machine offers is known.
    found = doctor()
    assert "missing" in found["model"]
    assert found["numerics"].startswith("native: ")
    assert found["ops"]["rope"] == "rope, qkv"
