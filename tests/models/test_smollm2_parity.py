"""The default model, whole: the engine's greedy tokens are those of transformers in float32."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench" / "parity.py"


@pytest.mark.slow
def test_greedy_tokens_equal_transformers(default_model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = runpy.run_path(str(BENCH))["measure"](default_model_path, threads=1)
    with capsys.disabled():
        print(f"\n{counts}")
    assert counts.prompts == 30
    assert counts.positions == 30 * 64
    assert counts.mismatches == 0
    assert counts.ties < counts.positions // 100
    assert counts.largest_logprob_difference < 1e-3


def test_ties_and_mismatches_are_told_apart() -> None:
    bench = runpy.run_path(str(BENCH))
    logits = torch.zeros(4, 9)
    logits[0, 3] = 5.0  # the engine's 3 is the best
    logits[1, 4], logits[1, 5] = 2.0, 2.0005  # its 4 is as good as the best
    logits[2, 4], logits[2, 5] = 2.0, 2.01  # its 4 is not
    logits[3, 8] = 1.0

    def model(input_ids: torch.Tensor, logits_to_keep: int) -> Any:
        assert input_ids.tolist() == [[7, 7, 3, 4, 4]]  # the last token has nothing to predict
        assert logits_to_keep == 4
        return SimpleNamespace(logits=logits[None])

    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor([[3], [4], [4], [8]]))[:, 0]
    logprobs[3] += 0.25
    counts = bench["compare"]([bench["Answer"]([7, 7], [3, 4, 4, 8], logprobs.tolist())], model)
    assert (counts.positions, counts.equal, counts.ties, counts.mismatches) == (4, 2, 1, 1)
    assert counts.prompt_tokens == 2
    assert counts.largest_logprob_difference == pytest.approx(0.25, abs=1e-5)
    assert counts.smallest_gap_of_best_two == pytest.approx(0.0005, abs=1e-6)


def test_prompts_are_thirty_of_all_categories() -> None:
    assert len(runpy.run_path(str(BENCH))["read_prompts"]()) == 30
