"""A model with an operator of its own, which the native library cannot know, runs natively around that operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles.engines import Driver, check_idle, make_engine, make_inputs
from doubles.native_programs import libraries, why_missing
from doubles.tiny_checkpoints import tiny_model, write_folder
from slipstream import ops
from slipstream.core.config import EngineConfig
from slipstream.core.errors import ConfigError
from slipstream.core.sampling_params import SamplingParams
from slipstream.devices.cpu import CpuDevice
from slipstream.devices.native_cpu import NativeCpuDevice
from slipstream.devices.not_lowerable import NotLowerable
from slipstream.devices.program_cache import Options
from slipstream.devices.reference_calls import ReferenceCall
from slipstream.engine.invariance import check_invariance
from slipstream.engine.numerics import choose_device
from slipstream.loading.checkpoint import open_checkpoint
from slipstream.loading.weight_source import CheckpointSource
from slipstream.loading.weights import load_weights
from slipstream.models.decoder import Decoder
from slipstream.models.registry import build_model
from slipstream.ops.rows import Rows

pytestmark = pytest.mark.skipif(not libraries(), reason=why_missing())

TIE = 0.05
"""Log-probabilities this close may change places between the two numerics."""


@torch.library.custom_op("slipstream_tests::squash", mutates_args=())
def squash(x: Tensor, weight: Tensor, position: Tensor, limit: float) -> Tensor:
    """Rows [R, width] held within `limit`, more so at odd positions."""
    strength = 1.0 + 0.1 * (position % 2)[:, None]
    return limit * torch.tanh(x * weight * strength / limit)


@squash.register_fake
def _(x: Tensor, weight: Tensor, position: Tensor, limit: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("slipstream_tests::needs_values", mutates_args=())
def needs_values(x: Tensor) -> Tensor:
    """An operator without a description of its result's shape."""
    return x.clone()


class Squashed(Decoder):
    """A decoder whose stream goes through `squash` behind every layer."""

    def forward(self, rows: Rows, caches: list[Tensor]) -> Tensor:
        table = ops.rope_table(rows.position, self.inv_freq, self.rope_scale)
        x = self.embed_tokens.forward(rows.token)
        for index, layer in enumerate(self._layers()):
            x, caches[index] = layer.forward(x, table, rows, caches[index])
            x = torch.ops.slipstream_tests.squash(x, self.norm.weight, rows.position, 4.0)
        return self.norm.forward(x)


class Unclear(Decoder):
    """A decoder with an operator whose result has no known shape before it has run."""

    def forward(self, rows: Rows, caches: list[Tensor]) -> Tensor:
        hidden: Tensor = torch.ops.slipstream_tests.needs_values(super().forward(rows, caches))
        return hidden


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    return write_folder(tmp_path / "m", tiny_model("qwen2", head_dim=32, num_hidden_layers=3))


def native(folder: Path, kind: type[Decoder], threads: int = 1) -> tuple[Decoder, NativeCpuDevice]:
    checkpoint = open_checkpoint(folder)
    model = kind(build_model(checkpoint.config).config)
    source = CheckpointSource(checkpoint, model)
    made = NativeCpuDevice(
        libraries()[-1], model, model.cache_specs(), source, threads=threads, options=Options(), max_rows=32
    )
    return model, made


def reference(folder: Path, kind: type[Decoder]) -> tuple[Decoder, CpuDevice]:
    checkpoint = open_checkpoint(folder)
    model = kind(build_model(checkpoint.config).config)
    load_weights(model, checkpoint, torch.float32)
    return model, CpuDevice(1)


def answers(model: Decoder, device: Any) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of some prompts, and by how much each was better than the next best."""
    driver = Driver(make_engine(model, device=device, page_size=16, pages=60, max_rows=32))
    inputs = make_inputs(model)
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, ignore_eos=True)
    prompts = [[5 * i + 1, 9, 2 * i, 44, 3 * i][: 1 + i % 5] * (1 + 3 * (i % 3)) for i in range(16)]
    driver.run([inputs.request(prompt, params, request_id=str(i)) for i, prompt in enumerate(prompts)])
    assert driver.errors == {}
    found = []
    for index in range(len(prompts)):
        (choice,) = driver.output(str(index)).outputs
        margins = []
        for entry in choice.logprobs or []:
            best, second = sorted((each.logprob for each in entry.values()), reverse=True)[:2]
            margins.append(best - second)
        found.append((choice.token_ids, margins))
    check_idle(driver.engine)
    return found


def test_it_gives_the_tokens_of_the_pytorch_path(folder: Path) -> None:
    model, device = native(folder, Squashed)
    assert {each["op"] for each in device.prepared.program.references} == {"slipstream_tests.squash.default"}
    compared = 0
    for (mine, _), (theirs, margins) in zip(answers(model, device), answers(*reference(folder, Squashed)), strict=True):
        for token, expected, margin in zip(mine, theirs, margins, strict=True):
            if margin < TIE:
                break
            assert token == expected
            compared += 1
    assert compared > 20


def test_it_keeps_the_rule_of_rows(folder: Path) -> None:
    model, device = native(folder, Squashed, threads=2)
    report = check_invariance(model, device, page_size=16, rounds=1)
    assert report.ok, report.differences


def test_a_program_belongs_to_the_model_s_own_code(folder: Path) -> None:
    """The same files as another class have another program."""
    texts = {native(folder, kind)[1].prepared.text for kind in (Decoder, Squashed, Decoder)}
    assert len(texts) == 2


def test_an_operator_of_unknown_shape_is_a_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotLowerable, match="needs_values"):
        native(folder, Unclear)
    checkpoint = open_checkpoint(folder)
    model = Unclear(build_model(checkpoint.config).config)
    device, why = choose_device(EngineConfig(threads=1), model, checkpoint)
    assert isinstance(device, CpuDevice)
    assert why.startswith("reference: the model cannot be run without values")
    with pytest.raises(ConfigError, match="native is not possible"):
        choose_device(EngineConfig(numerics="native", threads=1), model, checkpoint)


def test_an_operator_that_torch_does_not_know_is_a_reason() -> None:
    description = {"op": "slipstream_tests.gone.default", "wanted": False}
    with pytest.raises(NotLowerable, match=r"slipstream_tests\.gone"):
        ReferenceCall(description, {})
