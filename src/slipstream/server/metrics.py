"""The engine's counts for Prometheus, under the names of vLLM and of SGLang, and as JSON for the chat page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from slipstream import __version__
from slipstream.core.histogram import Histogram
from slipstream.engine.stats import EngineSnapshot, EngineStats
from slipstream.server.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(service: Service) -> bytes:
    """All metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Engine(service))
    return generate_latest(registry)


def snapshot_of(service: Service) -> EngineSnapshot:
    """The engine's counts; zeros before it is loaded."""
    engine = service.loaded
    return EngineSnapshot(EngineStats()) if engine is None else engine.worker.snapshot()


def stats_of(service: Service) -> dict[str, Any]:
    """What the chat page shows, as JSON."""
    seen, engine = snapshot_of(service), service.loaded
    stats = seen.stats
    shown: dict[str, Any] = {
        "model": service.names[0],
        "version": __version__,
        "state": service.state,
        "detail": "" if engine is not None else service.progress[0],
        "context": None,
        "device": "",
        "running": seen.running,
        "waiting": seen.waiting,
        "cache_usage": _share(seen.pages_used, seen.pages_total),
        "prompt_tokens": stats.prompt_tokens,
        "cached_prompt_tokens": stats.cached_prompt_tokens,
        "output_tokens": stats.output_tokens,
        "steps": stats.steps,
        "step_ms": stats.step_ms,
        "host_ms": stats.host_ms,
        "preemptions": stats.preemptions,
        "uptime_s": service.uptime,
        "defaults": {},
    }
    if engine is not None:
        defaults = engine.inputs.defaults
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        shown["context"] = engine.inputs.max_model_len
        shown["device"] = engine.report.get("device", "")
        shown["defaults"] = {name: getattr(defaults, name) for name in names}
    return shown


class _Engine(Collector):
    """Makes the metrics of one moment."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._label = service.names[0]

    def collect(self) -> Iterator[Metric]:
        seen = snapshot_of(self._service)
        yield from self._gauges(seen)
        yield from self._counters(seen.stats)
        yield from self._histograms(seen.stats)
        yield from self._server()

    def _gauges(self, seen: EngineSnapshot) -> Iterator[Metric]:
        usage = _share(seen.pages_used, seen.pages_total)
        stats = seen.stats
        gauge = self._gauge
        yield gauge("vllm:num_requests_running", "Sequences that are running.", seen.running)
        yield gauge("vllm:num_requests_waiting", "Sequences that wait for a place.", seen.waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Share of the cache's pages in use, 0 to 1.", usage)
        yield gauge("sglang:num_running_reqs", "Sequences that are running.", seen.running)
        yield gauge("sglang:num_queue_reqs", "Sequences that wait for a place.", seen.waiting)
        yield gauge("sglang:token_usage", "Share of the cache's pages in use, 0 to 1.", usage)
        hits = _share(stats.cached_prompt_tokens, stats.prompt_tokens)
        yield gauge("sglang:cache_hit_rate", "Share of prompt tokens found in the prefix cache.", hits)
        yield gauge("sglang:num_retracted_reqs", "Sequences preempted since the start.", stats.preemptions)
        yield gauge("slipstream:step_ms", "Duration of the last step.", stats.step_ms)
        yield gauge("slipstream:host_ms", "Part of the last step that was not the model.", stats.host_ms)

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        counter = self._counter
        for name in ("vllm:prompt_tokens", "sglang:prompt_tokens"):
            yield counter(name, "Prompt tokens processed, cached ones included.", stats.prompt_tokens)
        for name in ("vllm:generation_tokens", "sglang:generation_tokens"):
            yield counter(name, "Tokens generated.", stats.output_tokens)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prompt_tokens)
        yield counter("vllm:prefix_cache_hits", "Of those, tokens found.", stats.cached_prompt_tokens)
        yield counter("sglang:cached_tokens", "Prompt tokens found in the prefix cache.", stats.cached_prompt_tokens)
        yield counter(
            "vllm:num_preemptions", "Sequences that lost their pages and were computed again.", stats.preemptions
        )
        yield counter("sglang:num_requests", "Requests that ended.", sum(stats.finished.values()))
        yield counter("sglang:num_aborted_requests", "Requests that were aborted.", stats.finished["abort"])
        yield counter("slipstream:steps", "Steps of the engine.", stats.steps)
        yield counter("slipstream:step_rows", "Rows in those steps.", stats.rows)
        yield counter("slipstream:failed_steps", "Steps that failed.", stats.failed_steps)
        success = CounterMetricFamily(
            "vllm:request_success", "Requests by how they ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats.finished.items():
            success.add_metric([self._label, reason], count)
        yield success

    def _histograms(self, stats: EngineStats) -> Iterator[Metric]:
        both = {
            "time_to_first_token_seconds": ("Time to first token.", stats.time_to_first_token),
            "inter_token_latency_seconds": ("Time between a choice's tokens.", stats.inter_token),
            "e2e_request_latency_seconds": ("From arrival to the last token.", stats.end_to_end),
        }
        for name, (text, values) in both.items():
            yield self._histogram(f"vllm:{name}", text, values)
            yield self._histogram(f"sglang:{name}", text, values)
        yield self._histogram("sglang:queue_time_seconds", "From arrival to the first step.", stats.queue)
        only_vllm = {
            "request_queue_time_seconds": ("From arrival to the first step.", stats.queue),
            "request_prefill_time_seconds": ("From the first step to the first token.", stats.prefill),
            "request_decode_time_seconds": ("From the first token to the last.", stats.decode),
            "request_time_per_output_token_seconds": (
                "Mean time per token of a request after its first.",
                stats.time_per_output_token,
            ),
            "request_prompt_tokens": ("Prompt tokens of a request.", stats.prompt_length),
            "request_generation_tokens": ("Tokens generated for a request.", stats.output_length),
        }
        for name, (text, values) in only_vllm.items():
            yield self._histogram(f"vllm:{name}", text, values)
        yield self._histogram("slipstream:step_seconds", "Duration of steps.", stats.step)
        yield self._histogram("slipstream:host_seconds", "Part of steps that was not the model.", stats.host)

    def _server(self) -> Iterator[Metric]:
        service = self._service
        requests = CounterMetricFamily(
            "slipstream:http_requests", "HTTP requests by route and status.", labels=["route", "status"]
        )
        for (route, status), count in sorted(service.requests_by_status.items()):
            requests.add_metric([route, str(status)], count)
        yield requests
        yield self._counter(
            "slipstream:http_disconnects", "Clients that left before their answer.", service.disconnects
        )
        yield self._gauge("slipstream:ready", "1 while requests are taken.", int(service.state == "ready"))
        if service.startup_seconds is not None:
            yield self._gauge("sglang:startup_time_seconds", "From start to ready.", service.startup_seconds)
        if service.weight_load_seconds is not None:
            yield self._gauge("sglang:weight_load_duration_seconds", "Reading weights.", service.weight_load_seconds)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._label], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._label], value)
        return family

    def _histogram(self, name: str, text: str, values: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        counts, total = list(values.counts), values.total
        running, buckets = 0, []
        for bound, count in zip([*values.bounds, float("inf")], counts, strict=True):
            running += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), running))
        family.add_metric([self._label], buckets, total)
        return family


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
