"""What a worker measures, the same for every engine.

Nothing here costs anything per token: figures are added up per step and per request in plain numbers and turned
into Prometheus families when somebody asks. Ours are `kvolt_worker_*`; those that Dynamo's dashboards read have its
names besides, and some engines vLLM's (`worker_vllm_names`). Knows no engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.core.load import StepStats, WorkerLoad
from kvolt.worker.vllm_metric_names import vllm_names

_STEP_BOUNDS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)
_REQUEST_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_FIRST_BOUNDS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_FORGET = 0.99
"""Weight of the past in the hit rate, per request: about the last hundred count."""

_SUMS = (
    *("_num_steps", "_prefill_tokens", "_decode_tokens", "_prompt_tokens", "_cached_tokens"),
    *("_recent_prompt", "_recent_cached", "_generated_tokens"),
)
_COUNTERS = ("kv_event_counts", "finish_counts", "_outcomes")
_HISTOGRAMS = ("_step_s", "_request_s", "_first_s", "_between_s")

FINISHED, CANCELLED, DEADLINE, FAILED, REFUSED = "finished", "cancelled", "deadline", "failed", "refused"
WITHDRAWN = "withdrawn"
"""Asked back before it had begun."""


class Labels(msgspec.Struct, frozen=True, kw_only=True):
    """Which worker this is."""

    namespace: str
    component: str
    endpoint: str
    instance: str
    model: str


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, other: Histogram) -> None:
        assert other.bounds == self.bounds
        self.counts = [one + another for one, another in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def buckets(self) -> list[tuple[str, float]]:
        running, out = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            running += count
            out.append((bound, float(running)))
        return out


class WorkerMetrics(Collector):
    """The figures of one worker. `on_*` add to them; `collect` is for the registry."""

    def __init__(self) -> None:
        self.labels = Labels(namespace="", component="", endpoint="", instance="", model="")
        self.load_time_s = 0.0
        self.num_open: Callable[[], int] = lambda: 0
        self.step_age_s: Callable[[], float] = lambda: 0.0
        self.uptime_s: Callable[[], float] = lambda: 0.0
        self.kv_history_bytes: Callable[[], int] = lambda: 0
        self.kv_event_counts: Counter[str] = Counter()
        self.finish_counts: Counter[str] = Counter()
        """Of requests that ended by themselves, by reason."""
        self.block_size = 0
        self.with_vllm_names = False
        self.of_engine: Callable[[Mapping[str, str]], Iterable[Metric]] | None = None
        """The engine's own, with these labels."""
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
        """Of each rank how many answers its latest decode left unfinished, and the time of steps without them since."""
        self._outcomes: Counter[str] = Counter(
            {FINISHED: 0, CANCELLED: 0, DEADLINE: 0, FAILED: 0, REFUSED: 0, WITHDRAWN: 0}
        )

    def on_load(self, load: WorkerLoad) -> None:
        """Once per step that tells its load."""
        self._loads[load.dp_rank] = load
        step = load.step
        if step is not None:
            self._num_steps += 1
            self._prefill_tokens += step.prefill_tokens
            self._decode_tokens += step.batch
            self._step_s.observe(step.time_s)
            self._observe_between(load, step)

    def _observe_between(self, load: WorkerLoad, step: StepStats) -> None:
        """The time between two tokens, for all answers of a step at once: that of the step, and for those that were
        there before also of the steps since, which computed prompts only."""
        num_waiting, pause_s = self._pauses.get(load.dp_rank, (0, 0.0))
        if step.batch:
            num_waiting = min(num_waiting, step.batch)
            self._between_s.observe(step.time_s + pause_s, num_waiting)
            self._between_s.observe(step.time_s, step.batch - num_waiting)
            self._pauses[load.dp_rank] = (min(step.batch, load.running), 0.0)
        else:
            self._pauses[load.dp_rank] = (num_waiting, pause_s + step.time_s)

    def on_tokens(self, num_tokens: int) -> None:
        """Once per step: the tokens of all its answers."""
        self._generated_tokens += num_tokens

    def on_prompt(self, num_tokens: int, num_cached: int, after_s: float = 0.0) -> None:
        """Once per request, with its first token, so long after it came."""
        self._first_s.observe(after_s)
        self._prompt_tokens += num_tokens
        self._cached_tokens += num_cached
        self._recent_prompt = self._recent_prompt * _FORGET + num_tokens
        self._recent_cached = self._recent_cached * _FORGET + num_cached

    def on_end(self, outcome: str, after_s: float | None) -> None:
        """Once per request; without a time if it never began."""
        self._outcomes[outcome] += 1
        if after_s is not None:
            self._request_s.observe(after_s)

    @property
    def hit_rate(self) -> float:
        """Share of recent prompts that was cached, by tokens."""
        return self._recent_cached / self._recent_prompt if self._recent_prompt else 0.0

    def absorb(self, other: WorkerMetrics) -> None:
        """Add another worker's figures to these: what the two would tell as one. Ages are those of the older."""
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
            getattr(self, name).add(getattr(other, name))

    # --- for the registry

    def collect(self) -> Iterator[Metric]:
        yield from self._own_gauges()
        yield from self._own_counters()
        yield self._histogram("kvolt_worker_step_seconds", "Time of an engine step", self._step_s)
        yield from self._dashboard_names()
        if self.with_vllm_names:
            yield from vllm_names(self)
        if self.of_engine is not None:
            yield from self.of_engine(self._dashboard_labels)

    def _own_gauges(self) -> Iterator[Metric]:
        of_load: tuple[tuple[str, str, Callable[[WorkerLoad], int]], ...] = (
            ("running", "Requests that the engine computes", lambda load: load.running),
            ("waiting", "Requests that wait in the engine", lambda load: load.waiting),
            ("kv_used_blocks", "KV blocks that requests hold", lambda load: load.kv_used_blocks),
            ("kv_total_blocks", "KV blocks of the device", lambda load: load.kv_total_blocks),
        )
        for name, text, read in of_load:
            family = GaugeMetricFamily(f"kvolt_worker_{name}", text, labels=("model", "dp_rank"))
            for dp_rank, load in sorted(self._loads.items()):
                family.add_metric((self.labels.model, str(dp_rank)), read(load))
            yield family
        for name, text, value in (
            ("open_requests", "Streams that are being answered", self.num_open()),
            ("kv_hit_rate", "Share of recent prompt tokens found in the cache", self.hit_rate),
            ("step_age_seconds", "Time since the latest step while there is work", self.step_age_s()),
            ("load_seconds", "Time the engine took to start", self.load_time_s),
            ("kv_history_bytes", "Recent KV events kept for replay", self.kv_history_bytes()),
        ):
            family = GaugeMetricFamily(f"kvolt_worker_{name}", text, labels=("model",))
            family.add_metric((self.labels.model,), value)
            yield family

    def _own_counters(self) -> Iterator[Metric]:
        for name, text, value in (
            ("steps", "Engine steps", self._num_steps),
            ("prefill_tokens", "Prompt tokens computed", self._prefill_tokens),
            ("decode_tokens", "Tokens decoded", self._decode_tokens),
            ("prompt_tokens", "Prompt tokens of requests that began", self._prompt_tokens),
            ("cached_tokens", "Prompt tokens found in the cache", self._cached_tokens),
        ):
            family = CounterMetricFamily(f"kvolt_worker_{name}", text, labels=("model",))
            family.add_metric((self.labels.model,), value)
            yield family
        for name, text, label, counts in (
            ("requests", "Requests by how they ended", "outcome", self._outcomes),
            ("kv_events", "KV blocks told stored or removed, and clearings", "kind", self.kv_event_counts),
        ):
            family = CounterMetricFamily(f"kvolt_worker_{name}", text, labels=("model", label))
            for kind, count in sorted(counts.items()):
                family.add_metric((self.labels.model, kind), count)
            yield family

    def _histogram(
        self, name: str, text: str, histogram: Histogram, labels: dict[str, str] | None = None
    ) -> HistogramMetricFamily:
        of = labels or {"model": self.labels.model}
        family = HistogramMetricFamily(name, text, labels=tuple(of))
        family.add_metric(tuple(of.values()), histogram.buckets(), histogram.total)
        return family

    @property
    def _dashboard_labels(self) -> dict[str, str]:
        own = self.labels
        return {
            "dynamo_namespace": own.namespace,
            "dynamo_component": own.component,
            "dynamo_endpoint": own.endpoint,
            "worker_id": own.instance,
            "model": own.model,
        }

    def _dashboard_names(self) -> Iterator[Metric]:
        of = self._dashboard_labels
        outcomes = self._outcomes
        for name, text, count in (
            ("requests", "Requests taken", outcomes.total() - outcomes[REFUSED] + self.num_open()),
            ("cancellation", "Requests whose caller gave up", outcomes[CANCELLED]),
        ):
            counter = CounterMetricFamily(f"dynamo_component_{name}", text, labels=tuple(of))
            counter.add_metric(tuple(of.values()), count)
            yield counter
        errors = CounterMetricFamily("dynamo_component_errors", "Errors", labels=(*of, "error_type"))
        errors.add_metric((*of.values(), "generate"), outcomes[FAILED])
        errors.add_metric((*of.values(), "invalid_message"), outcomes[REFUSED])
        yield errors
        used = sum(load.kv_used_blocks for load in self._loads.values())
        total = sum(load.kv_total_blocks for load in self._loads.values())
        for name, text, value in (
            ("inflight_requests", "Requests being answered", self.num_open()),
            ("uptime_seconds", "Time since the worker started", self.uptime_s()),
            ("total_blocks", "KV blocks of the device", total),
            (
                "gpu_cache_usage_percent",
                "Share of KV blocks in use, from 0 to 1",
                used / total if total else 0.0,
            ),
            ("kv_cache_hit_rate", "Share of recent prompt tokens found in the cache", self.hit_rate),
            ("model_load_time_seconds", "Time the engine took to start", self.load_time_s),
        ):
            gauge = GaugeMetricFamily(f"dynamo_component_{name}", text, labels=tuple(of))
            gauge.add_metric(tuple(of.values()), value)
            yield gauge
        text = "Time from a request to its end"
        yield self._histogram("dynamo_component_request_duration_seconds", text, self._request_s, of)
