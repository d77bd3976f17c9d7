"""The default model, whole: the engine's greedy tokens are those of transformers in float32."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "parity.py"


@pytest.mark.slow
def test_greedy_tokens_equal_transformers(default_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    counts = runpy.run_path(str(BENCH))["measure"](default_model_path, threads=1)
    with capsys.disabled():
        print(f"\n{counts}")
    assert counts.prompts == 30
    assert counts.positions == 30 * 64
    assert counts.mismatches == 0
    assert counts.ties < counts.positions // 100
