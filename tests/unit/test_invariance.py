"""The check that rows depend on nothing beside them: it passes on a model that keeps the rule, and finds breaches."""

from __future__ import annotations

import pytest
import torch

from doubles.tiny_checkpoints import tiny_model
from slipstream.devices.cpu import CpuDevice
from slipstream.engine.invariance import check_invariance
from slipstream.loading.weights import load_weights
from slipstream.models.registry import build_model


class _Source:
    def __init__(self, weights):
        self.weights = weights

    def names(self):
        return list(self.weights)

    def shape(self, name):
        return tuple(self.weights[name].shape)

    def tensor(self, name):
        return self.weights[name]


@pytest.fixture
def device(request):
    before = torch.get_num_threads()
    yield CpuDevice(getattr(request, "param", 1))
    torch.set_num_threads(before)


two_threads = pytest.mark.parametrize("device", [2], indirect=True)


@pytest.fixture
def model():
    tiny = tiny_model("qwen3")
    model = build_model(tiny.config)
    load_weights(model, _Source(tiny.weights), torch.float32)
    return model


@two_threads
def test_the_pytorch_path_keeps_the_rule(model, device):
    report = check_invariance(model, device, page_size=8, rounds=1)
    assert report.ok
    assert len(report.ways) == 4
    assert report.rows > 100


def test_a_result_that_depends_on_the_place_in_the_tile_is_found(model, device, monkeypatch):
    layer = model.layers[1].mlp
    forward = layer.forward
    scale = 1 + 1e-3 * torch.arange(device.row_tile)[:, None]
    monkeypatch.setattr(layer, "forward", lambda x: forward(x) * scale)
    report = check_invariance(model, device, page_size=8, rounds=1)
    assert not report.ok
    difference = report.differences[0]
    assert difference.way == "row by row"
    assert difference.largest > 0
    # Position 1 of the first sequence is row 1 when whole and row 0 alone; before that product all is equal.
    assert (difference.sequence, difference.position) == (0, 1)
    assert difference.first_op.startswith("aten.mul.Tensor")
    assert "aten.mul.Tensor" in str(difference)


def test_a_result_that_depends_on_neighbours_is_found(model, device, monkeypatch):
    norm = model.norm.forward
    monkeypatch.setattr(model.norm, "forward", lambda x: norm(x) + x.mean() * 1e-3)
    report = check_invariance(model, device, page_size=8, rounds=1)
    assert {difference.way for difference in report.differences} >= {"row by row"}


def test_a_difference_in_the_head_is_named_so(model, device, monkeypatch):
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: logits(hidden) + torch.arange(len(hidden))[:, None])
    report = check_invariance(model, device, page_size=8, rounds=1)
    assert report.differences[0].first_op == "the head"


@two_threads
def test_a_result_that_depends_on_threads_is_found(model, device, monkeypatch):
    norm = model.norm.forward
    monkeypatch.setattr(model.norm, "forward", lambda x: norm(x) + torch.get_num_threads())
    report = check_invariance(model, device, page_size=8, rounds=0)
    assert [difference.way for difference in report.differences] == [
        "whole on 1 thread",
        "batched in random chunks on 1 thread",
    ]
    assert report.differences[0].first_op.startswith("aten.add")
