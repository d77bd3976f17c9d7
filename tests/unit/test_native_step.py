"""What a native step does with batches that do not fit it, and what its caches take of memory."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from doubles.engines import Driver, make_engine, make_inputs
from doubles.native_models import Files
from doubles.native_programs import libraries, why_missing
from doubles.tiny_checkpoints import tiny_model, write_gguf
from slipstream.core.batch import StepBatch
from slipstream.core.errors import EngineDeadError, SlipstreamError
from slipstream.core.sampling_params import SamplingParams
from slipstream.devices import native_cpu, packed_file
from slipstream.devices.native_step import NativeStep

pytestmark = pytest.mark.skipif(not libraries(), reason=why_missing())


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    return Files(write_gguf(tmp_path / "m.gguf", tiny_model("llama", head_dim=32), formats="Q4_0"))


def step_of(files: Files, max_rows: int = 4) -> NativeStep:
    model, device = files.native(max_rows=max_rows)
    return device.compile(model, device.allocate(model.cache_specs(), 80, 16))


def batch_of(tokens: list[int]) -> StepBatch:
    pages = -(-len(tokens) // 16)
    batch = StepBatch(max_rows=len(tokens), max_sequences=1, max_pages=pages, page_size=16)
    number = batch.add_sequence(np.arange(1, pages + 1, dtype=np.int32), len(tokens))
    batch.add_rows(number, tokens, 0, wants_logits=True)
    return batch


@pytest.mark.parametrize("token", [-1, 128, 2**31 - 1, -(2**31)])
def test_tokens_out_of_range_are_refused(files: Files, token: int) -> None:
    step = step_of(files)
    before = step.run(batch_of([1, 2, 3])).clone()
    for place in range(3):
        tokens = [1, 2, 3]
        tokens[place] = token
        with pytest.raises(SlipstreamError, match="refused a batch of 3 rows"):
            step.run(batch_of(tokens))
    assert torch.equal(step.run(batch_of([1, 2, 3])), before)


def test_a_batch_of_more_rows_than_planned_is_run(files: Files) -> None:
    tokens = [int(token) for token in np.random.default_rng(1).integers(0, 128, 1200)]
    wide = step_of(files, max_rows=1200).run(batch_of(tokens)).clone()
    grown = step_of(files, max_rows=4)
    assert torch.equal(grown.run(batch_of(tokens[:3])), wide[:3])
    assert torch.equal(grown.run(batch_of(tokens)), wide)


def test_an_empty_batch_and_one_beyond_all_bounds_are_refused(files: Files) -> None:
    step = step_of(files)
    empty = StepBatch(max_rows=1, max_sequences=1, max_pages=1, page_size=16)
    with pytest.raises(SlipstreamError):
        step.run(empty)
    batch = batch_of([1] * 5)
    batch.num_rows = 2**20 + 1
    with pytest.raises(SlipstreamError, match="max_rows"):
        step.run(batch)
    batch.num_rows = 5
    assert len(step.run(batch)) == 5


def test_a_refused_step_ends_its_requests_alone(files: Files) -> None:
    model, device = files.native()
    driver = Driver(make_engine(model, device=device, page_size=16, pages=40, max_model_len=100))
    inputs = make_inputs(model, max_model_len=100)
    bad, good = (inputs.request([1, 2], SamplingParams(max_tokens=3), request_id=name) for name in ("bad", "good"))
    bad.prompt_ids = [1, 500]  # as no input lets through
    driver.run([bad])
    assert isinstance(driver.errors["bad"], EngineDeadError)
    driver.run([good])
    assert len(driver.tokens("good")[0]) == 3


def test_caches_begin_in_small_pages(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of a small model must not take 2 MiB in every layer."""
    advised: list[tuple[int, int]] = []

    class Memory(mmap.mmap):
        def madvise(self, *arguments: int) -> None:
            advised.append((len(self), arguments[1]))

    monkeypatch.setattr(packed_file.mmap, "mmap", Memory)
    model, device = files.native()
    advised.clear()
    device.allocate(model.cache_specs(), 10, 16)
    assert advised == []
    page = 2 * 2 * 32 * 16 * 2
    pages = 2 * native_cpu.SMALL_PAGES // page
    device.allocate(model.cache_specs(), pages, 16)
    assert advised == [(pages * page, native_cpu.SMALL_PAGES)] * 2
