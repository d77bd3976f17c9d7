"""Whole models under native numerics: every row's bits are the definition's, whatever the instruction set, the threads,
the chunks, the pages and the company; and they are near the model in float32.
"""

from __future__ import annotations

import ctypes
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_models import VARIANTS, config_values, expected, make_reference, save

from doubles.native_models import (
    Files,
    assert_same_rows,
    defined_run,
    native_run,
    pages_for,
    random_plan,
    reference_run,
    relative_error,
    row_by_row,
    run_plan,
    whole,
)
from doubles.native_programs import libraries, why_missing
from doubles.tiny_checkpoints import FAMILIES, tiny_model, write_folder, write_gguf
from slipstream.devices.native_cpu import NativeCpuDevice
from slipstream.kernels.cpu.kinds import KIND_OF_FORMAT
from slipstream.kernels.cpu.library import ISAS
from slipstream.models.decoder import Decoder

pytestmark = pytest.mark.skipif(not libraries(), reason=why_missing())


def slow_unless(value: str, *fast: str) -> Any:
    """A parameter whose test is left out of the fast ones unless it is among `fast`."""
    return value if value in fast else pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))


def random_sequences(vocab: int, *lengths: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(vocab) for _ in range(length)] for length in lengths]


def check_bits(files: Files, sequences: list[list[int]], **options: str) -> dict[tuple[int, int], torch.Tensor]:
    """Every way of running equals the definition -> logits of every row."""
    pages = pages_for(sequences)
    first, device = files.native(**options)
    assert not device.prepared.program.references
    truth = run_plan(defined_run(device.prepared, pages), sequences, whole(sequences))
    plans = {
        "whole": (whole(sequences), False),
        "row by row": (row_by_row(sequences), False),
        "in chunks": (random_plan(sequences, 1), False),
        "in chunks, few logits": (random_plan(sequences, 2), True),
    }
    for library in libraries():
        for threads in (1, 2):
            made = (first, device) if library is device.library and threads == 1 else None
            run = native_run(made or files.native(library, threads=threads, **options), pages)
            for seed, (way, (plan, only_last)) in enumerate(plans.items()):
                found = run_plan(run, sequences, plan, seed, only_last=only_last)
                assert_same_rows(found, truth, f"{ISAS[library.isa]}, {threads} threads, {way}")
    return truth


@pytest.mark.parametrize("name", [slow_unless(name, *FAMILIES) for name in VARIANTS])
def test_every_variant(name: str, tmp_path: Path) -> None:
    """Weights in float32: what is left of the difference from transformers is the cache in bf16."""
    values = config_values(VARIANTS[name], len(name) % 3) | {"head_dim": 32}
    reference = make_reference(values)
    files = Files(save(reference, tmp_path / "model"))
    sequences = random_sequences(values["vocab_size"], 90, 19)
    rows = check_bits(files, sequences)
    theirs = {
        (index, at): row
        for index, tokens in enumerate(sequences)
        for at, row in enumerate(expected(reference, tokens)[1])
    }
    # Rows near the border between two experts fall to either side.
    assert relative_error(rows, theirs) < (0.15 if "moe" in name else 0.02)


@pytest.mark.parametrize("cache", ["bf16", "int8"])
@pytest.mark.parametrize("form", [slow_unless(form, "Q4_0", "Q5_1", "Q8_0", "Q5_K", "BF16") for form in KIND_OF_FORMAT])
def test_every_format(form: str, cache: str, tmp_path: Path, record_property: pytest.RecordProperty) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8} if form.endswith("_K") else {}
    model = tiny_model("llama", head_dim=32, tie_word_embeddings=form in ("Q4_0", "Q6_K"), **wide)
    files = Files(write_gguf(tmp_path / "m.gguf", model, formats=form))
    sequences = random_sequences(128, 45, 18)
    rows = check_bits(files, sequences, cache_kind=cache)
    reference = reference_run(files.reference(), pages_for(sequences))
    error = relative_error(rows, run_plan(reference, sequences, whole(sequences)))
    record_property("relative_error", error)
    plain = KIND_OF_FORMAT[form] in ("bf16", "f32")
    assert error < {"bf16": 0.01, "int8": 0.03}[cache] + (0 if plain else 0.04)


@pytest.mark.parametrize("form", [slow_unless(form, "Q4_K") for form in ("Q4_0", "Q5_1", "Q4_K", "BF16")])
def test_experts_of_every_kind(form: str, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 8} if form.endswith("_K") else {}
    model = tiny_model("qwen3_moe", head_dim=32, num_experts=6, **wide)
    check_bits(Files(write_gguf(tmp_path / "m.gguf", model, formats=form)), random_sequences(128, 30, 7))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("family", [slow_unless(family, "mistral", "qwen3_moe") for family in FAMILIES])
def test_folders_in_bf16_and_quantised(family: str, quantization: str, tmp_path: Path) -> None:
    model = tiny_model(family, head_dim=32, sliding_window=20, use_sliding_window=True, max_window_layers=1)
    files = Files(write_folder(tmp_path / "m", model, dtype=torch.bfloat16))
    sequences = random_sequences(128, 41, 9)
    rows = check_bits(files, sequences, quantization=quantization)
    reference = reference_run(files.reference(), pages_for(sequences))
    error = relative_error(rows, run_plan(reference, sequences, whole(sequences)))
    limit = {"none": 0.02, "int8": 0.05, "int4": 0.3}[quantization]
    assert error < limit + (0.25 if family == "qwen3_moe" else 0.0)


def experts_read(device: NativeCpuDevice, model: Decoder, plan: list[list[tuple[int, int, int]]]) -> list[int]:
    """Experts whose weights each step of a plan reads, over all layers; every sequence begins with its own token."""
    step = device.compile(model, device.allocate(model.cache_specs(), 40, 16))
    count = device.library.handle.ss_program_experts_read
    count.restype, count.argtypes = ctypes.c_int64, (ctypes.c_void_p,)
    sequences = [[index % 3] for index in range(12)]
    reads = [0]
    for pieces in plan:
        run_plan(step.run, sequences, [pieces])
        reads.append(count(step._native.address))
    return [after - before for before, after in pairwise(reads)]


@pytest.mark.parametrize("threads", [1, 2])
def test_an_expert_is_read_once_for_all_rows_that_chose_it(threads: int, tmp_path: Path) -> None:
    layers, experts, top_k = 3, 16, 2
    model = tiny_model(
        "qwen3_moe", head_dim=32, num_experts=experts, num_experts_per_tok=top_k, num_hidden_layers=layers
    )
    files = Files(write_gguf(tmp_path / "m.gguf", model, formats="Q8_0"))
    made, device = files.native(threads=threads)
    # Sequences 0, 3, 6 and 9 are one row each that is the same in all; so are the others.
    alike = [[(index, 0, 1) for index in range(start, 12, 3)] for start in range(3)]
    every = [(index, 0, 1) for index in range(12)]
    one, first, second, third, together = experts_read(device, made, [alike[0][:1], *alike, every])
    assert one == first == second == third == layers * top_k
    assert layers * top_k < together <= 3 * layers * top_k
