"""The throughput bench, with the real engine around a double of a model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from doubles.engines import make_engine, make_inputs
from doubles.hash_model import HashModel
from slipstream.cli import bench_report, session
from slipstream.cli.bench_report import load_of_others, without_secrets
from slipstream.cli.bench_throughput import Throughput, submission
from slipstream.cli.bench_workload import Workload, make_workload, random_words
from slipstream.cli.main import main
from slipstream.cli.percentiles import distribution, nearest_rank
from slipstream.core.config import EngineConfig
from slipstream.core.errors import ConfigError
from slipstream.core.outputs import CompletionOutput, RequestOutput
from slipstream.core.sampling_params import SamplingParams
from slipstream.engine.llm import LLM
from slipstream.engine.worker import EngineWorker


class Probe:
    """Stands in for the bandwidth probe; `speeds` are what it will find."""

    speeds = iter(())

    def measure(self):
        return next(Probe.speeds)


class Letters:
    """A tokenizer with a token for each letter."""

    def encode(self, text, **options):
        return [ord(letter) % 32 for letter in text]


def engine_llm(settings, **engine_settings):
    """The real LLM around a hash model."""
    config = EngineConfig.from_mapping(settings)
    model = HashModel()
    engine = make_engine(model, prefix_caching=config.prefix_caching, **engine_settings)
    llm = LLM.__new__(LLM)
    llm.loaded = SimpleNamespace(
        engine=engine,
        inputs=make_inputs(model, tokenizer=Letters()),
        model=model,
        config=config,
        numerics="reference",
        device=SimpleNamespace(name="double", dtype=torch.float32, threads=1),
        checkpoint=SimpleNamespace(path=Path("folder/hash.gguf")),
    )
    llm._worker = EngineWorker(lambda: engine)
    return llm


@pytest.fixture
def made(monkeypatch):
    """The LLMs that commands load; `engine` holds settings for them."""
    found = SimpleNamespace(llms=[], engine={})

    def make(settings, progress):
        found.llms.append(engine_llm(settings, **found.engine))
        return found.llms[-1]

    monkeypatch.setattr(session, "make_llm", make)
    monkeypatch.setattr("slipstream.devices.bandwidth.ReadProbe", Probe)
    Probe.speeds = iter([2e10, 1e10])
    return found


def bench(capsys, *arguments):
    assert main(["bench", "throughput", *arguments, "--json", "-"]) == 0
    shown = capsys.readouterr()
    return json.loads(shown.out), shown.err


def test_counts_rates_and_conditions(made, capsys):
    found, shown = bench(capsys, "--num-prompts", "5", "--input-len", "7", "--output-len", "4", "--seed", "3")
    assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (5, 35, 20)
    assert found["output_tokens_per_s"] == pytest.approx(20 / found["seconds"])
    assert found["prompt_tokens_per_s"] == pytest.approx(35 / found["seconds"])
    assert found["total_tokens_per_s"] == pytest.approx(55 / found["seconds"])
    assert found["requests_per_s"] == pytest.approx(5 / found["seconds"])
    for name in ("ttft_ms", "inter_token_ms"):
        assert set(found[name]) == {"mean", "p50", "p95", "p99"}
        assert 0 < found[name]["p50"] <= found[name]["p95"] <= found[name]["p99"]
    assert found["bandwidth"] == {"before_gb_per_s": 20.0, "after_gb_per_s": 10.0, "differ": True}
    assert found["preemptions"] == 0
    assert isinstance(found["disturbed"], bool)
    conditions = found["conditions"]
    assert conditions["model"] == "hash.gguf"
    assert (conditions["num_prompts"], conditions["input_len"], conditions["seed"]) == (5, 7, 3)
    assert {"cpu", "torch", "slipstream", "command", "date", "threads", "dtype"} <= set(conditions)
    assert "5 x (7 in, 4 out)" in shown
    assert "output tokens/s" in shown
    assert "differ by more than 15 %" in shown


def test_a_file_gets_the_result(made, capsys, tmp_path):
    Probe.speeds = iter([1e10, 1.1e10])
    file = tmp_path / "result.json"
    shape = ["--num-prompts", "2", "--input-len", "3", "--output-len", "2"]
    assert main(["bench", "throughput", *shape, "--json", str(file)]) == 0
    assert "output tokens/s" in capsys.readouterr().out
    assert json.loads(file.read_text())["bandwidth"]["differ"] is False


def test_the_prompts_are_those_of_the_seed(made):
    llm = engine_llm({})
    try:

        def prompts(seed):
            outputs = submission(llm, Workload(4, 6, 1), seed)(None)
            return [output.prompt_token_ids for output in outputs]

        assert prompts(1) == prompts(1)
        assert prompts(1) != prompts(2)
    finally:
        llm.shutdown()


def test_preemptions_of_the_run_are_counted(made, capsys):
    made.engine = {"pages": 12}
    found, _ = bench(capsys, "--num-prompts", "6", "--input-len", "8", "--output-len", "24")
    assert found["preemptions"] > 0
    assert found["output_tokens"] == 6 * 24


@pytest.mark.parametrize("flags", [[], ["--no-prefix-caching"]])
def test_repeated_prompts_of_a_file_are_found_in_the_prefix_cache(made, capsys, tmp_path, flags):
    made.engine = {"max_sequences": 1}
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["abcdefghi", "left out"]}\n{"prompt": "jklmnopqr"}\n')
    found, _ = bench(capsys, "--num-prompts", "4", "--dataset", str(file), "--output-len", "3", *flags)
    assert found["prompt_tokens"] == 4 * 9
    assert found["conditions"]["dataset"] == "prompts.jsonl"
    assert found["conditions"]["dataset_prompts"] == 2
    hits = found["prefix_hits"]
    if flags:
        assert hits == {"requests": 0, "tokens": 0, "share": 0.0}
        assert found["conditions"]["prefix_caching"] is False
    else:
        # Two full pages of four tokens of each repeated prompt.
        assert hits == {"requests": 2, "tokens": 16, "share": pytest.approx(16 / 36)}


def test_a_model_with_a_template_is_asked_through_it():
    asked = []
    llm = SimpleNamespace(
        loaded=SimpleNamespace(inputs=SimpleNamespace(template=object())),
        chat=lambda messages, params, on_update: asked.append((messages, params)),
    )
    submission(llm, Workload(3, None, 9, texts=("a", "b")), 0)(None)
    messages, params = asked[0]
    assert [m[0]["content"] for m in messages] == ["a", "b", "a"]
    assert params == SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


def test_summary_of_known_times():
    outputs = [
        RequestOutput("a", None, [1] * 10, [CompletionOutput(0, token_ids=[1, 2, 3])], True, num_cached_tokens=4),
        RequestOutput("b", None, [1] * 6, [CompletionOutput(0, token_ids=[1])], True),
    ]
    found = Throughput([[0.5, 0.75, 1.25], [1.0]], outputs, 2.0).summary()
    assert found["ttft_ms"] == {"mean": 750, "p50": 500, "p95": 1000, "p99": 1000}
    assert found["inter_token_ms"] == {"mean": 375, "p50": 250, "p95": 500, "p99": 500}
    assert found["output_tokens_per_s"] == 2
    assert found["prompt_tokens_per_s"] == 8
    assert found["prefix_hits"] == {"requests": 1, "tokens": 4, "share": 0.25}


def test_percentiles():
    assert [nearest_rank(range(1, 101), p) for p in (50, 95, 99, 100)] == [50, 95, 99, 100]
    assert nearest_rank([7.0], 50) == 7.0
    assert distribution([3, 1, 2], scale=10) == {"mean": 20, "p50": 20, "p95": 30, "p99": 30}
    assert distribution([]) == {"mean": None, "p50": None, "p95": None, "p99": None}


@pytest.mark.parametrize(("share", "disturbed"), [(0.05, False), (0.3, True), (None, False)])
def test_a_disturbed_run_is_marked(share, disturbed):
    found = load_of_others(SimpleNamespace(share=lambda: share))
    assert found == {"foreign_load": share, "disturbed": disturbed}


def test_a_key_is_not_kept(monkeypatch):
    kept = without_secrets(["serve", "--api-key", "secret", "--api-key=secret", "--seed", "1"])
    assert kept == ["serve", "--api-key", "***", "--api-key=***", "--seed", "1"]
    monkeypatch.setattr(bench_report.sys, "argv", ["x", "bench", "serve", "--api-key", "secret"])
    assert "secret" not in bench_report.host_conditions()["command"]


def test_lengths_are_spread_around_those_given():
    chooser = random.Random(1)
    lengths = Workload(500, 100, 10, range_ratio=0.5).lengths(chooser)
    inputs, outputs = [a for a, _ in lengths], [b for _, b in lengths]
    assert (min(inputs), max(inputs)) == (50, 150)
    assert (min(outputs), max(outputs)) == (5, 15)
    assert sum(inputs) / 500 == pytest.approx(100, rel=0.05)
    assert set(Workload(3, None, 10).lengths(chooser)) == {(128, 10)}
    assert len(random_words(30, chooser).split()) == 30


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, None, 1, 0.0, None), "--num-prompts must be 1 or more"),
        ((1, None, 0, 0.0, None), "--output-len must be 1 or more"),
        ((1, 0, 1, 0.0, None), "--input-len must be 1 or more"),
        ((1, 1, 1, 1.0, None), "--range-ratio must be 0 or more and less than 1"),
        ((1, 1, 1, float("nan"), None), "--range-ratio"),
        ((1, 1, 1, 0.0, Path("x")), "--dataset excludes --input-len and --range-ratio"),
        ((1, None, 1, 0.5, Path("x")), "--dataset excludes"),
        ((1, None, 1, 0.0, Path("/nowhere")), "--dataset: /nowhere cannot be read"),
    ],
)
def test_workloads_that_cannot_be(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_workload(*arguments)
