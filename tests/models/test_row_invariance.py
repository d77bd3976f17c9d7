"""A sequence's hidden states and logits keep every bit whatever its chunks, its pages and its company."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from paged_runs import one_by_one, random_chunks, run_paged
from torch import Tensor

from doubles.tiny_checkpoints import FAMILIES, tiny_model, write_folder
from slipstream.loading.checkpoint import open_checkpoint
from slipstream.loading.weights import load_weights
from slipstream.models.decoder import Decoder
from slipstream.models.registry import build_model

LENGTHS = (150, 141, 90, 33)


def load(family: str, dtype: torch.dtype, folder: Path) -> Decoder:
    changes = {"sliding_window": 37, "use_sliding_window": True, "max_window_layers": 1}
    checkpoint = open_checkpoint(write_folder(folder, tiny_model(family, **changes)))
    model = build_model(checkpoint.config)
    load_weights(model, checkpoint, dtype)
    return model


def same_bits(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(mine, right) for mine, right in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_pages_and_company_do_not_matter(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(family, dtype, tmp_path)
    draw = random.Random(3)
    sequences = [[draw.randrange(128) for _ in range(length)] for length in LENGTHS]
    together = run_paged(model, sequences, random_chunks(1, decode=20), page_size=16, seed=1)
    again = run_paged(model, sequences[::-1], random_chunks(2, decode=3), page_size=16, seed=2)[::-1]
    assert all(map(same_bits, together, again))
    whole = run_paged(model, sequences[:1], lambda done, total: total, page_size=16)
    assert same_bits(whole[0], together[0])
    alone = run_paged(model, sequences[3:], one_by_one, page_size=16)
    assert same_bits(alone[0], together[3])


def test_another_page_size_may_give_other_bits(tmp_path: Path) -> None:
    """A page is a block of attention. That this test can tell shows that the one above compares bits."""
    model = load("llama", torch.float32, tmp_path)
    draw = random.Random(4)
    sequences = [[draw.randrange(128) for _ in range(150)]]
    sixteen, thirty_two = (run_paged(model, sequences, one_by_one, page_size=size)[0] for size in (16, 32))
    assert not same_bits(sixteen, thirty_two)
    torch.testing.assert_close(sixteen[0], thirty_two[0], rtol=1e-4, atol=1e-5)
