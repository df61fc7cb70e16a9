"""Worker metrics under the names of vLLM, for existing dashboards and autoscalers.

Reads the private state of WorkerMetrics. Series that a worker cannot measure (preemptions, time in the engine's queue)
are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvolt.core.load import WorkerLoad
from kvolt.worker.metrics import WorkerMetrics

WITH_VLLM_NAMES = ("sim",)
"""Engines that simulate vLLM. The real vLLM exports its own metrics."""
_FIRST_ENGINE = "0"
"""Label of series that are not counted per rank."""


def vllm_names(metrics: WorkerMetrics) -> Iterator[Metric]:
    yield from _gauges(metrics)
    yield from _counters(metrics)
    for name, text, histogram in (
        ("time_to_first_token_seconds", "Time from a request to its first token", metrics._first_s),
        ("inter_token_latency_seconds", "Time from one token to the next", metrics._between_s),
        ("e2e_request_latency_seconds", "Time from a request to its end", metrics._request_s),
    ):
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=("model_name", "engine"))
        family.add_metric((metrics.labels.model, _FIRST_ENGINE), histogram.buckets(), histogram.total)
        yield family


def _gauges(metrics: WorkerMetrics) -> Iterator[Metric]:
    of_load: tuple[tuple[str, str, Callable[[WorkerLoad], float]], ...] = (
        ("num_requests_running", "Requests that the engine computes", lambda load: load.running),
        ("num_requests_waiting", "Requests that wait in the engine", lambda load: load.waiting),
        ("kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1", lambda load: load.kv_usage),
        ("gpu_cache_usage_perc", "The same under its name before vLLM 0.10", lambda load: load.kv_usage),
    )
    for name, text, read in of_load:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=("model_name", "engine"))
        for dp_rank, load in sorted(metrics._loads.items()):
            family.add_metric((metrics.labels.model, str(dp_rank)), read(load))
        yield family
    labels = ("block_size", "num_gpu_blocks", "engine")
    config = GaugeMetricFamily("vllm:cache_config_info", "The KV cache", labels=labels)
    for dp_rank, load in sorted(metrics._loads.items()):
        config.add_metric((str(metrics.block_size), str(load.kv_total_blocks), str(dp_rank)), 1)
    yield config


def _counters(metrics: WorkerMetrics) -> Iterator[Metric]:
    for name, text, count in (
        ("prompt_tokens", "Prompt tokens of requests that began", metrics._prompt_tokens),
        ("generation_tokens", "Tokens generated", metrics._generated_tokens),
        ("prefix_cache_queries", "Prompt tokens looked for in the cache", metrics._prompt_tokens),
        ("prefix_cache_hits", "Prompt tokens found in the cache", metrics._cached_tokens),
    ):
        family = CounterMetricFamily(f"vllm:{name}", text, labels=("model_name", "engine"))
        family.add_metric((metrics.labels.model, _FIRST_ENGINE), count)
        yield family
    labels = ("model_name", "engine", "finished_reason")
    success = CounterMetricFamily("vllm:request_success", "Requests by why they ended", labels=labels)
    for reason, count in sorted(metrics.finish_counts.items()):
        success.add_metric((metrics.labels.model, _FIRST_ENGINE, reason), count)
    yield success
