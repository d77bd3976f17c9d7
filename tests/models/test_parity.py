"""Every family against transformers: same weights, same tokens, hidden states within 1e-4 and the same best token.

Ours runs as it does in an engine: prompt chunks and single tokens of several sequences in tiles of 16 rows, on pages in
random order, well beyond one group of pages and beyond the positions that rope scalings were made from.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_runs import one_by_one, random_chunks, run_paged
from reference_models import VARIANTS, config_values, expected, make_reference, publish_old_rope, save
from torch import Tensor
from transformers import PreTrainedModel

from slipstream.layers.attention import Attention
from slipstream.loading.checkpoint import open_checkpoint
from slipstream.loading.weights import load_weights
from slipstream.models.decoder import Decoder
from slipstream.models.registry import build_model

TOLERANCE = 1e-4
"""Largest L2 norm of a row's difference, relative to the row's norm."""

TIE = 1e-4
"""Two logits this close, relative to the row's largest, may change places."""

Expected = list[tuple[Tensor, Tensor]]


def load(folder: Path) -> Decoder:
    checkpoint = open_checkpoint(folder)
    model = build_model(checkpoint.config)
    load_weights(model, checkpoint, torch.float32)
    return model


def random_sequences(vocab: int, lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for length in lengths]


def worst_error(ours: Expected, theirs: Expected) -> float:
    """The largest relative error of a row's hidden state."""
    return max(
        float(((mine - right).norm(dim=-1) / right.norm(dim=-1)).max())
        for (mine, _), (right, _) in zip(ours, theirs, strict=True)
    )


def wrong_best_tokens(ours: Expected, theirs: Expected) -> int:
    """Rows in which the best token is another one, without being a tie."""
    wrong = 0
    for (_, mine), (_, right) in zip(ours, theirs, strict=True):
        lost = right.amax(-1) - right.gather(-1, mine.argmax(-1, keepdim=True))[:, 0]
        wrong += int((lost > TIE * right.abs().amax(-1)).sum())
    return wrong


def make_pair(name: str, shape: int, folder: Path) -> tuple[PreTrainedModel, Decoder]:
    reference = make_reference(config_values(VARIANTS[name], shape), seed=shape)
    return reference, load(save(reference, folder))


@pytest.mark.parametrize("shape", range(3))
@pytest.mark.parametrize("name", VARIANTS)
def test_family_equals_transformers(
    name: str, shape: int, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    reference, model = make_pair(name, shape, tmp_path)
    page_size = (16, 32, 16)[shape]
    lengths = (300 + 170 * (shape == 1), 131, 7)
    sequences = random_sequences(model.vocab_size, lengths, seed=shape)
    theirs = [expected(reference, tokens) for tokens in sequences]
    ours = run_paged(model, sequences, random_chunks(shape, decode=9), page_size=page_size, seed=shape)
    error = worst_error(ours, theirs)
    record_property("relative error", error)
    assert error < TOLERANCE
    assert wrong_best_tokens(ours, theirs) == 0


@pytest.mark.parametrize("name", ["llama-llama3", "mistral", "qwen2", "qwen3-window", "qwen3_moe"])
def test_decoding_token_by_token(name: str, tmp_path: Path) -> None:
    reference, model = make_pair(name, 2, tmp_path)
    sequences = random_sequences(model.vocab_size, (150, 141, 90), seed=5)
    theirs = [expected(reference, tokens) for tokens in sequences]
    ours = run_paged(model, sequences, one_by_one, page_size=16)
    assert worst_error(ours, theirs) < TOLERANCE
    assert wrong_best_tokens(ours, theirs) == 0


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.rope])
def test_old_layout_of_rope_settings(name: str, tmp_path: Path) -> None:
    _, new = make_pair(name, 0, tmp_path)
    publish_old_rope(tmp_path)
    old = load(tmp_path)
    assert torch.equal(old.inv_freq, new.inv_freq)
    assert old.rope_scale == new.rope_scale


def attentions(model: Decoder) -> list[Attention]:
    return [layer.self_attn for layer in model._layers()]


def shift_window(by: int) -> Callable[[Decoder], None]:
    def plant(model: Decoder) -> None:
        for attention in attentions(model):
            if attention.window:
                attention.window += by

    return plant


def theta_off(model: Decoder) -> None:
    exponent = torch.arange(len(model.inv_freq)) / len(model.inv_freq)
    model.inv_freq = model.inv_freq * 1.01**-exponent


def drop(path: str, leaf: str) -> Callable[[Decoder], None]:
    """Leave out a bias, norm or head in the middle layer (or of the whole model)."""

    def plant(model: Decoder) -> None:
        setattr(model.get_submodule(path), leaf, None)

    return plant


def drop_head_norms(model: Decoder) -> None:
    for attention in attentions(model)[:1]:
        attention.q_norm = attention.k_norm = None


def flat_attention_factor(model: Decoder) -> None:
    model.rope_scale = 1.0


def other_shares(model: Decoder) -> None:
    for layer in model._layers():
        layer.mlp.renormalise = not layer.mlp.renormalise


def swap_experts(model: Decoder) -> None:
    down = model._layers()[1].mlp.down
    model._layers()[1].mlp.down = torch.nn.Parameter(down.roll(1, 0), requires_grad=False)


def wrong_scale(model: Decoder) -> None:
    attentions(model)[0].scale *= 1.01


def other_eps(model: Decoder) -> None:
    model.norm.eps += 1e-3


def interpolate_all(model: Decoder) -> None:
    """Linear scaling where llama3 keeps the short wavelengths."""
    model.inv_freq = model.inv_freq.clone()
    model.inv_freq[0] /= 8


PLANTED: list[tuple[str, Callable[[Decoder], None]]] = [
    ("llama", theta_off),
    ("llama", wrong_scale),
    ("llama", other_eps),
    ("llama-biases", drop("layers.1.mlp.down_proj", "bias")),
    ("llama-biases", drop("layers.1.self_attn.o_proj", "bias")),
    ("llama-biases", drop("layers.1.self_attn.q_proj", "bias")),
    ("llama-llama3", interpolate_all),
    ("llama-yarn", flat_attention_factor),
    ("mistral", shift_window(1)),
    ("mistral", shift_window(-1)),
    ("qwen2", drop("layers.2.self_attn.v_proj", "bias")),
    ("qwen2-window", shift_window(1)),
    ("qwen3", drop_head_norms),
    ("qwen3_moe", other_shares),
    ("qwen3_moe", swap_experts),
]


@pytest.mark.parametrize(("name", "plant"), PLANTED)
def test_planted_defects_are_detected(name: str, plant: Callable[[Decoder], None], tmp_path: Path) -> None:
    """What the tolerance must not let through."""
    reference, model = make_pair(name, 2, tmp_path)
    sequences = random_sequences(model.vocab_size, (150,), seed=1)
    theirs = [expected(reference, tokens) for tokens in sequences]
    plant(model)
    ours = run_paged(model, sequences, random_chunks(1, decode=2), page_size=16)
    assert worst_error(ours, theirs) > TOLERANCE


def test_planted_wrong_page_is_detected(tmp_path: Path) -> None:
    reference, model = make_pair("llama", 0, tmp_path)
    sequences = random_sequences(model.vocab_size, (150,), seed=1)
    theirs = [expected(reference, tokens) for tokens in sequences]
    good = model.forward

    def forward(rows: Any, caches: list[Tensor]) -> Tensor:
        table = rows.page_table.clone()
        table[:, [2, 3]] = table[:, [3, 2]]
        return good(rows._replace(page_table=table), caches)

    model.forward = forward  # type: ignore[method-assign]
    ours = run_paged(model, sequences, random_chunks(1, decode=2), page_size=16)
    assert worst_error(ours, theirs) > TOLERANCE
