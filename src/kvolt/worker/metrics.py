"""Prometheus metrics of a worker, equal for every engine.

No cost per token: plain numbers are updated per step and per request, and converted at each scrape. Metrics are named
`kvolt_worker_*`; simulated engines also export vLLM's names (`vllm_names`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.core.load import StepStats, WorkerLoad
from kvolt.runtime.histogram import Histogram

_STEP_BOUNDS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
_REQUEST_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_FIRST_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_IDENTITY = ("namespace", "component", "endpoint", "worker_id", "model")
_DECAY = 0.99
"""Decay of the hit rate per request: about the last hundred requests count."""

_SUMS = (
    *("_num_steps", "_prefill_tokens", "_decode_tokens", "_prompt_tokens", "_cached_tokens"),
    *("_recent_prompt", "_recent_cached", "_generated_tokens"),
)
_COUNTERS = ("kv_event_counts", "finish_counts", "_outcomes")
_HISTOGRAMS = ("_step_s", "_request_s", "_first_s", "_between_s")

FINISHED, CANCELLED, DEADLINE, FAILED, REFUSED = "finished", "cancelled", "deadline", "failed", "refused"
WITH_VLLM_NAMES = ("sim",)
"""Engines that simulate vLLM. The real vLLM exports its own metrics."""
_FIRST_ENGINE = "0"
"""vLLM's label of series that are not counted per rank."""

WITHDRAWN = "withdrawn"
"""Outcome of a request that was withdrawn before it started."""


class Labels(msgspec.Struct, frozen=True, kw_only=True):
    """Labels that identify a worker."""

    namespace: str
    component: str
    endpoint: str
    instance: str
    model: str


class WorkerMetrics(Collector):
    """Metrics of one worker. `on_*` methods update them; `collect` is called by the registry."""

    def __init__(self) -> None:
        self.labels = Labels(namespace="", component="", endpoint="", instance="", model="")
        self.load_time_s = 0.0
        self.num_open: Callable[[], int] = lambda: 0
        self.step_age_s: Callable[[], float] = lambda: 0.0
        self.uptime_s: Callable[[], float] = lambda: 0.0
        self.kv_history_bytes: Callable[[], int] = lambda: 0
        self.kv_event_counts: Counter[str] = Counter()
        self.finish_counts: Counter[str] = Counter()
        """Finished requests, by finish reason."""
        self.block_size = 0
        self.alias_families: Callable[[WorkerMetrics], Iterable[Metric]] | None = None
        """Additional metrics under another engine's names."""
        self.engine_metrics: Callable[[Mapping[str, str]], Iterable[Metric]] | None = None
        """Metrics of the engine itself, given these labels."""
        self._loads: dict[int, WorkerLoad] = {}
        self._num_steps = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._recent_prompt = 0.0
        self._recent_cached = 0.0
        self._step_s = Histogram(_STEP_BOUNDS_S)
        self._request_s = Histogram(_REQUEST_BOUNDS_S)
        self._generated_tokens = 0
        self._first_s = Histogram(_FIRST_BOUNDS_S)
        self._between_s = Histogram(_STEP_BOUNDS_S)
        self._pauses: dict[int, tuple[int, float]] = {}
        """Per rank: unfinished answers of the last decode step, and the time of prefill-only steps since."""
        self._outcomes: Counter[str] = Counter(
            {FINISHED: 0, CANCELLED: 0, DEADLINE: 0, FAILED: 0, REFUSED: 0, WITHDRAWN: 0}
        )

    def on_load(self, load: WorkerLoad) -> None:
        """Record the load and timing of a step."""
        self._loads[load.dp_rank] = load
        step = load.step
        if step is not None:
            self._num_steps += 1
            self._prefill_tokens += step.prefill_tokens
            self._decode_tokens += step.batch
            self._step_s.observe(step.time_s)
            self._observe_between(load, step)

    def _observe_between(self, load: WorkerLoad, step: StepStats) -> None:
        """Record the inter-token latency of all answers of a step: its time, plus that of prefill-only steps since the
        last decode step for answers that were running then."""
        num_waiting, pause_s = self._pauses.get(load.dp_rank, (0, 0.0))
        if step.batch:
            num_waiting = min(num_waiting, step.batch)
            self._between_s.observe(step.time_s + pause_s, num_waiting)
            self._between_s.observe(step.time_s, step.batch - num_waiting)
            self._pauses[load.dp_rank] = (min(step.batch, load.running), 0.0)
        else:
            self._pauses[load.dp_rank] = (num_waiting, pause_s + step.time_s)

    def on_tokens(self, num_tokens: int) -> None:
        """Record the tokens of a step."""
        self._generated_tokens += num_tokens

    def on_prompt(self, num_tokens: int, num_cached: int, after_s: float = 0.0) -> None:
        """Record the first token of a request and its time since arrival."""
        self._first_s.observe(after_s)
        self._prompt_tokens += num_tokens
        self._cached_tokens += num_cached
        self._recent_prompt = self._recent_prompt * _DECAY + num_tokens
        self._recent_cached = self._recent_cached * _DECAY + num_cached

    def on_end(self, outcome: str, after_s: float | None) -> None:
        """Record the end of a request; without a time if it never started."""
        self._outcomes[outcome] += 1
        if after_s is not None:
            self._request_s.observe(after_s)

    @property
    def hit_rate(self) -> float:
        """Cached fraction of recent prompt tokens."""
        return self._recent_cached / self._recent_prompt if self._recent_prompt else 0.0

    def absorb(self, other: WorkerMetrics) -> None:
        """Add another worker's metrics, as if both were one worker. Ages are the maximum."""
        own_open, own_age, own_uptime, own_history = (
            self.num_open(),
            self.step_age_s(),
            self.uptime_s(),
            self.kv_history_bytes(),
        )
        num_open, age_s = own_open + other.num_open(), max(own_age, other.step_age_s())
        uptime_s = max(own_uptime, other.uptime_s())
        history = own_history + other.kv_history_bytes()
        self.num_open, self.step_age_s = lambda: num_open, lambda: age_s
        self.uptime_s, self.kv_history_bytes = lambda: uptime_s, lambda: history
        self.load_time_s = max(self.load_time_s, other.load_time_s)
        for dp_rank, load in other._loads.items():
            before = self._loads.get(dp_rank, WorkerLoad(dp_rank=dp_rank))
            self._loads[dp_rank] = WorkerLoad(
                running=before.running + load.running,
                waiting=before.waiting + load.waiting,
                kv_used_blocks=before.kv_used_blocks + load.kv_used_blocks,
                kv_total_blocks=before.kv_total_blocks + load.kv_total_blocks,
                dp_rank=dp_rank,
            )
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))
        for name in _HISTOGRAMS:
            getattr(self, name).merge(getattr(other, name))

    # --- for the registry

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        if self.alias_families is not None:
            yield from self.alias_families(self)
        if self.engine_metrics is not None:
            yield from self.engine_metrics(dict(zip(_IDENTITY, self._identity, strict=True)))

    def _gauges(self) -> Iterator[Metric]:
        of_load: tuple[tuple[str, str, Callable[[WorkerLoad], float]], ...] = (
            ("running", "Running requests of the engine", lambda load: load.running),
            ("waiting", "Waiting requests of the engine", lambda load: load.waiting),
            ("kv_used_blocks", "KV blocks held by requests", lambda load: load.kv_used_blocks),
            ("kv_total_blocks", "KV blocks of the device", lambda load: load.kv_total_blocks),
            (
                "kv_usage_ratio",
                "Fraction of the KV blocks held by requests, from 0 to 1",
                lambda load: load.kv_usage,
            ),
        )
        for name, text, read in of_load:
            family = GaugeMetricFamily(f"kvolt_worker_{name}", text, labels=(*_IDENTITY, "dp_rank"))
            for dp_rank, load in sorted(self._loads.items()):
                family.add_metric((*self._identity, str(dp_rank)), read(load))
            yield family
        for name, text, value in (
            ("open_requests", "Requests in progress", self.num_open()),
            ("kv_hit_rate", "Fraction of recent prompt tokens found in the cache", self.hit_rate),
            ("step_age_seconds", "Time since the latest step; 0 when idle", self.step_age_s()),
            ("load_seconds", "Start-up time of the engine", self.load_time_s),
            ("uptime_seconds", "Time since the start of the worker", self.uptime_s()),
            ("kv_history_bytes", "Memory of the KV events kept for replay", self.kv_history_bytes()),
        ):
            family = GaugeMetricFamily(f"kvolt_worker_{name}", text, labels=_IDENTITY)
            family.add_metric(self._identity, value)
            yield family

    def _counters(self) -> Iterator[Metric]:
        outcomes = self._outcomes
        for name, text, value in (
            ("requests_started", "Accepted requests", outcomes.total() - outcomes[REFUSED] + self.num_open()),
            ("steps", "Engine steps", self._num_steps),
            ("prefill_tokens", "Prompt tokens computed", self._prefill_tokens),
            ("decode_tokens", "Tokens decoded", self._decode_tokens),
            ("prompt_tokens", "Prompt tokens of started requests", self._prompt_tokens),
            ("cached_tokens", "Prompt tokens found in the cache", self._cached_tokens),
        ):
            family = CounterMetricFamily(f"kvolt_worker_{name}", text, labels=_IDENTITY)
            family.add_metric(self._identity, value)
            yield family
        for name, text, label, counts in (
            ("requests", "Ended requests by outcome", "outcome", outcomes),
            ("kv_events", "KV blocks stored, removed or cleared", "kind", self.kv_event_counts),
        ):
            family = CounterMetricFamily(f"kvolt_worker_{name}", text, labels=(*_IDENTITY, label))
            for kind, count in sorted(counts.items()):
                family.add_metric((*self._identity, kind), count)
            yield family

    def _histograms(self) -> Iterator[Metric]:
        for name, text, histogram in (
            ("step_seconds", "Time of an engine step", self._step_s),
            ("first_token_seconds", "Time from a request's arrival to its first token", self._first_s),
            ("request_seconds", "Time from a request's arrival to its end", self._request_s),
        ):
            family = HistogramMetricFamily(f"kvolt_worker_{name}", text, labels=_IDENTITY)
            family.add_metric(self._identity, histogram.buckets(), histogram.total)
            yield family

    @property
    def _identity(self) -> tuple[str, ...]:
        own = self.labels
        return own.namespace, own.component, own.endpoint, own.instance, own.model


def vllm_names(metrics: WorkerMetrics) -> Iterator[Metric]:
    """The metrics under the names of vLLM, for existing dashboards and autoscalers.

    Series that a worker cannot measure (preemptions, time in the engine's queue) are absent.
    """
    yield from _vllm_gauges(metrics)
    yield from _vllm_counters(metrics)
    for name, text, histogram in (
        ("time_to_first_token_seconds", "Time from a request to its first token", metrics._first_s),
        ("inter_token_latency_seconds", "Time from one token to the next", metrics._between_s),
        ("e2e_request_latency_seconds", "Time from a request to its end", metrics._request_s),
    ):
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=("model_name", "engine"))
        family.add_metric((metrics.labels.model, _FIRST_ENGINE), histogram.buckets(), histogram.total)
        yield family


def _vllm_gauges(metrics: WorkerMetrics) -> Iterator[Metric]:
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


def _vllm_counters(metrics: WorkerMetrics) -> Iterator[Metric]:
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
