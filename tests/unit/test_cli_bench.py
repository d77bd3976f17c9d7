"""How the latency bench counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slipstream.cache.spec import PagedKV
from slipstream.cli.bench_latency import Latency, Run, Shape, bytes_per_step, spread
from slipstream.core.errors import ConfigError
from slipstream.devices import foreign_load
from slipstream.devices.foreign_load import ForeignLoad
from slipstream.engine.build import read_in_a_step


def test_spread():
    assert spread(range(1, 101)) == {"median": 50.5, "min": 1, "max": 100, "p95": 95}
    assert spread([3.0]) == {"median": 3.0, "min": 3.0, "max": 3.0, "p95": 3.0}
    assert spread([]) == {"median": None, "min": None, "max": None, "p95": None}


def test_decoding_is_counted_while_all_requests_decode():
    # The first request has tokens before the second begins, and the second goes on after the first is done.
    run = Run([[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]], (1e10, 1e10))
    assert run.prefill_seconds == 2.0
    assert run.decode_window == (4, 2.0)


def test_summary():
    latency = Latency(Shape(10, 3, 2), bytes_per_step=5e8)
    latency.runs = [
        Run([[1.0, 1.1, 1.2], [1.0, 1.1, 1.2]], (1e10, 1.1e10)),
        Run([[1.0, 1.2, 1.4], [1.0, 1.2, 1.4]], (1e10, 2e10)),  # the probes differ: no share
    ]
    found = latency.summary()
    assert found["decode_tokens_per_s"]["median"] == pytest.approx(15)
    assert found["decode_tokens_per_s"]["max"] == pytest.approx(20)
    assert found["prefill_tokens_per_s"]["median"] == pytest.approx(20)
    assert found["ttft_ms"]["median"] == pytest.approx(1000)
    assert found["inter_token_ms"]["min"] == pytest.approx(100)
    assert found["inter_token_ms"]["p95"] == pytest.approx(200)
    share = found["bandwidth_share"]
    assert share["median"] == pytest.approx(5e8 / 0.1 / 1.05e10)
    assert (share["runs_used"], share["runs_dropped"]) == (1, 1)
    assert share["probed_gb_per_s"]["max"] == pytest.approx(20)


class _Model:
    def __init__(self, tied: bool) -> None:
        self.embed_tokens = SimpleNamespace(weight=_Weight(100))
        self.lm_head = None if tied else SimpleNamespace(weight=_Weight(100))
        self.layer = _Weight(1000)

    def parameters(self):
        head = [] if self.lm_head is None else [self.lm_head.weight]
        return [self.embed_tokens.weight, *head, self.layer]

    def cache_specs(self):
        return [PagedKV(2, 8), PagedKV(2, 8, window=4)]


class _Weight:
    def __init__(self, count: int) -> None:
        self.count = count

    def numel(self) -> int:
        return self.count

    def element_size(self) -> int:
        return 4


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_step(tied):
    device = SimpleNamespace(page_bytes=lambda specs, size: sum(s.page_elements(size) for s in specs) * 4)
    model = _Model(tied)
    llm = SimpleNamespace(loaded=SimpleNamespace(model=model, device=device, weight_bytes=read_in_a_step(model)))
    weights = 1100 * 4  # the table of a tied model is its head; an untied one is only looked up
    per_token = 2 * 8 * 2 * 4
    assert bytes_per_step(llm, Shape(10, 4, 3)) == weights + 3 * per_token * (12 + 4)


@pytest.mark.parametrize("shape", [Shape(0, 2, 1), Shape(1, 1, 1), Shape(1, 2, 0)])
def test_shapes_that_cannot_be_measured(shape):
    with pytest.raises(ConfigError):
        shape.check()


def test_foreign_load_is_what_others_used(monkeypatch, tmp_path):
    stat = tmp_path / "stat"
    monkeypatch.setattr(foreign_load, "_STAT", stat)
    clock = iter([100.0, 110.0])
    own = iter([5.0, 9.0])
    # The module's own names are replaced: other threads go on using the clock.
    monkeypatch.setattr(foreign_load, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    fake = SimpleNamespace(
        sched_getaffinity=lambda _: {0, 2},
        times=lambda: SimpleNamespace(user=next(own), system=0.0, children_user=0.0, children_system=0.0),
        sysconf=lambda _: 100,
    )
    monkeypatch.setattr(foreign_load, "os", fake)
    stat.write_text("cpu 9 9 9 9\ncpu0 0 0 0 500 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\ncpu2 0 0 0 0 0 0 0 0 0 0\n")
    load = ForeignLoad()
    # 10 s of two CPUs: 4 s busy on one, 6 s on the other, of which 4 s are its own; cpu1 is not ours.
    stat.write_text(
        "cpu 0\ncpu0 300 0 100 900 50 0 0 0 7 7\ncpu1 1000 0 0 0 0 0 0 0 0 0\ncpu2 0 500 0 0 0 0 50 50 0 0\n"
    )
    assert load.share() == pytest.approx((4 + 6 - 4) / 20)


def test_foreign_load_is_unknown_without_the_systems_counters(monkeypatch, tmp_path):
    monkeypatch.setattr(foreign_load, "_STAT", tmp_path / "none")
    assert ForeignLoad().share() is None
