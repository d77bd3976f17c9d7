"""/metrics: the names that dashboards and benchmark tools know, in a text that Prometheus reads, with true values."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from doubles.raw_clients import CHAT, COMPLETIONS, Client, fetch, until
from doubles.served import ServedModel, Serving, serving
from slipstream.engine.stats import EngineStats
from slipstream.server import metrics

LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:token_usage",
    "sglang:cache_hit_rate",
    "sglang:num_retracted_reqs",
    "sglang:startup_time_seconds",
    "sglang:weight_load_duration_seconds",
)
COUNTERS = (
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:num_preemptions",
    "vllm:request_success",
    "sglang:cached_tokens",
    "sglang:prompt_tokens",
    "sglang:generation_tokens",
    "sglang:num_aborted_requests",
)
HISTOGRAMS = (
    *(f"vllm:{name}" for name in LATENCIES),
    *(f"sglang:{name}" for name in LATENCIES),
    "vllm:request_time_per_output_token_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "sglang:queue_time_seconds",
)

Samples = dict[str, float]
BODY = {"prompt": "hello world, " * 4, "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(ServedModel(step_ms=1), served_model_name=["a name", "another"]) as running:
        for done in range(3):  # as a loader of weights tells; the double has none
            running.service.report("loading", done, 2)
        yield running


def samples(server: Serving) -> Samples:
    """Every value by its name and the labels that are not the model's name."""
    found: Samples = {}
    for family in text_string_to_metric_families(fetch(server.url, "/metrics").body.decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items() if name != "model_name")
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def moved(server: Serving, before: Samples) -> Samples:
    """What has changed, and by how much."""
    return {
        name: value - before.get(name, 0) for name, value in samples(server).items() if value != before.get(name, 0)
    }


def test_every_known_name_is_served(server: Serving) -> None:
    answer = fetch(server.url, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
        for name in names:
            assert name in families, name
            assert families[name].type == kind, name
    for family in families.values():
        assert family.documentation, family.name
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name == f"{family.name}_total"
            if not family.name.startswith("slipstream:http_requests"):
                assert sample.labels["model_name"] == "a name"


def test_a_request_moves_what_it_should(server: Serving) -> None:
    before = samples(server)
    usage = fetch(server.url, COMPLETIONS, {**BODY, "n": 2}).json["usage"]
    change = moved(server, before)
    for family in ("vllm", "sglang"):
        assert change[f"{family}:generation_tokens_total"] == usage["completion_tokens"] == 40
        assert change[f"{family}:time_to_first_token_seconds_count"] == 1
        assert change[f"{family}:inter_token_latency_seconds_count"] == 38
        assert change[f"{family}:e2e_request_latency_seconds_count"] == 1
    assert change["vllm:request_success_total{finished_reason=length}"] == 1
    for name in ("queue", "prefill", "decode"):
        assert change[f"vllm:request_{name}_time_seconds_count"] == 1
    assert change["vllm:request_time_per_output_token_seconds_count"] == 1
    assert change["sglang:queue_time_seconds_count"] == 1
    assert change["vllm:request_prompt_tokens_sum"] == usage["prompt_tokens"]
    assert change["vllm:request_generation_tokens_sum"] == 40
    assert change["slipstream:steps_total"] >= 20
    assert change["slipstream:http_requests_total{route=/v1/completions,status=200}"] == 1
    assert not any("abort" in name or "preempt" in name for name in change)
    # The parts of a request's time add up to it.
    parts = sum(change[f"vllm:request_{name}_time_seconds_sum"] for name in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(change["vllm:e2e_request_latency_seconds_sum"], abs=0.05)


def test_histograms_are_cumulative(server: Serving) -> None:
    fetch(server.url, COMPLETIONS, BODY)
    for family in text_string_to_metric_families(fetch(server.url, "/metrics").body.decode()):
        if family.type != "histogram":
            continue
        counts = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
        bounds = [float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")]
        (count,) = [sample.value for sample in family.samples if sample.name.endswith("_count")]
        assert counts == sorted(counts)
        assert bounds == sorted(bounds)
        assert bounds[-1] == float("inf")
        assert counts[-1] == count


def test_prefix_hits_are_counted(server: Serving) -> None:
    prompt = {**BODY, "prompt": "a prompt that comes twice " * 4}
    usage = fetch(server.url, COMPLETIONS, prompt).json["usage"]
    before = samples(server)
    again = fetch(server.url, COMPLETIONS, prompt).json["usage"]
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < again["prompt_tokens"] == usage["prompt_tokens"]
    change = moved(server, before)
    assert change["vllm:prefix_cache_hits_total"] == change["sglang:cached_tokens_total"] == cached
    assert change["vllm:prefix_cache_queries_total"] == change["vllm:prompt_tokens_total"] == usage["prompt_tokens"]
    rate = samples(server)
    assert rate["sglang:cache_hit_rate"] == pytest.approx(
        rate["vllm:prefix_cache_hits_total"] / rate["vllm:prefix_cache_queries_total"]
    )


def test_what_runs_and_what_waits_is_seen(server: Serving) -> None:
    clients = [Client(server.url, COMPLETIONS, {**BODY, "max_tokens": 400, "n": 3}) for _ in range(4)]
    until(lambda: samples(server)["vllm:num_requests_running"] == 8)
    now = samples(server)
    assert now["sglang:num_running_reqs"] == 8
    assert now["vllm:num_requests_waiting"] == now["sglang:num_queue_reqs"] == 4
    assert 0 < now["vllm:kv_cache_usage_perc"] == now["sglang:token_usage"] <= 1
    aborted = now["sglang:num_aborted_requests_total"]
    for client in clients:
        client.close()
    until(lambda: samples(server)["sglang:num_aborted_requests_total"] == aborted + 4)
    until(lambda: samples(server)["vllm:num_requests_running"] == 0)
    now = samples(server)
    assert now["vllm:num_requests_waiting"] == now["vllm:kv_cache_usage_perc"] == 0
    assert now["vllm:request_success_total{finished_reason=abort}"] == aborted + 4


def test_preemptions_are_counted() -> None:
    with serving(ServedModel(pages=80, max_model_len=256, max_sequences=4)) as server:
        clients = [
            Client(server.url, COMPLETIONS, {"prompt": str(n), "max_tokens": 200, "ignore_eos": True}) for n in range(4)
        ]
        for client in clients:
            assert client.response().status == 200
        now = samples(server)
        assert now["vllm:num_preemptions_total"] == now["sglang:num_retracted_reqs"] > 0


def test_refused_requests_are_counted_by_status_and_not_by_what_clients_choose(server: Serving) -> None:
    before = samples(server)
    for number in range(30):
        assert fetch(server.url, f"/no/such/{number}", **{"x-request-id": str(number)}).status == 404
    assert fetch(server.url, CHAT, b"{").status == 400
    assert fetch(server.url, "/v1/models/none").status == 404
    change = moved(server, before)
    assert change["slipstream:http_requests_total{route=other,status=404}"] == 30
    assert change["slipstream:http_requests_total{route=/v1/chat/completions,status=400}"] == 1
    assert change["slipstream:http_requests_total{route=/v1/models/{model:path},status=404}"] == 1
    assert len(server.service.requests_by_status) < 30


def test_names_are_escaped() -> None:
    with serving(served_model_name=['with "quotes" and \\ slashes']) as server:
        families = list(text_string_to_metric_families(fetch(server.url, "/metrics").body.decode()))
        names = {s.labels["model_name"] for family in families for s in family.samples if "model_name" in s.labels}
        assert names == {'with "quotes" and \\ slashes'}


def test_it_costs_little_however_much_was_counted(server: Serving) -> None:
    def cost() -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            size = len(metrics.render(server.service))
            times.append(time.perf_counter() - began)
        assert size < 60_000
        return min(times)

    stats: EngineStats = server.engine.stats
    for number in range(10_000):
        stats.finished["stop"] += 1
        for values in (stats.time_to_first_token, stats.inter_token, stats.end_to_end, stats.queue, stats.decode):
            values.observe(number / 1000)
        stats.prompt_length.observe(number)
    assert cost() < 0.05  # 3 ms on an idle machine; what it is made of does not grow with what was counted
