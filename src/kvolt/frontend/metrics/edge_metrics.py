"""Prometheus metrics of the frontend's requests.

A token must not cost a call into a metrics library: histograms are lists of counts, updated in place and turned into
Prometheus families at each scrape.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvolt.runtime.histogram import SECONDS, Histogram

Labels = tuple[str, ...]

_PREFIX = "kvolt_frontend"

_SHORT = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

MAX_MODELS = 256
"""Label values for models; a name beyond them is counted as `other`."""


class ModelSeries:
    """The series of one model."""

    __slots__ = (
        "active",
        "cached_tokens",
        "gap",
        "input_tokens",
        "output_tokens",
        "output_tokens_total",
        "request_duration",
        "time_to_first_token",
    )

    def __init__(self) -> None:
        self.active = 0
        self.request_duration = Histogram(SECONDS)
        self.time_to_first_token = Histogram(SECONDS)
        self.gap = Histogram(_SHORT)
        self.input_tokens = Histogram(_TOKENS)
        self.output_tokens = Histogram(_TOKENS)
        self.cached_tokens = Histogram((0, *_TOKENS))
        self.output_tokens_total = 0


class FrontendMetrics:
    """All series of one frontend process. A collector for a Prometheus registry."""

    def __init__(self) -> None:
        self._models: dict[str, ModelSeries] = {}
        self.requests: Counter[Labels] = Counter()
        """By model, endpoint, request type, status, error type."""
        self.started: Counter[Labels] = Counter()
        """By model, endpoint, request type."""
        self.cancelled: Counter[Labels] = Counter()
        self.rejected: Counter[Labels] = Counter()
        """By model, endpoint."""
        self.disconnected = 0
        self.stages: defaultdict[str, Histogram] = defaultdict(lambda: Histogram(_SHORT))
        self._more: list[Callable[[], Iterator[Metric]]] = []

    def model(self, name: str) -> ModelSeries:
        series = self._models.get(name)
        if series is None:
            if len(self._models) >= MAX_MODELS:
                return self._models.setdefault("other", ModelSeries())
            series = self._models[name] = ModelSeries()
        return series

    def label(self, name: str) -> str:
        """A model's label: names that a client made up must not become series."""
        return name if name in self._models else "other"

    def add(self, collect: Callable[[], Iterator[Metric]]) -> None:
        """Series of others, under the same registry."""
        self._more.append(collect)

    def collect(self) -> Iterator[Metric]:
        labels = ("model", "endpoint", "request_type")
        yield _counter(
            f"{_PREFIX}_requests",
            "Requests that have ended",
            (*labels, "status", "error_type"),
            self.requests,
        )
        yield _counter(f"{_PREFIX}_requests_started", "Requests that have started", labels, self.started)
        yield _counter(
            f"{_PREFIX}_model_cancellation", "Requests cancelled by the client", labels, self.cancelled
        )
        yield _counter(
            f"{_PREFIX}_model_rejection",
            "Requests refused because of load",
            ("model", "endpoint"),
            self.rejected,
        )
        gone = GaugeMetricFamily(
            f"{_PREFIX}_disconnected_clients",
            "Connections closed by the client before the response was complete",
        )
        gone.add_metric((), self.disconnected)
        yield gone
        active = GaugeMetricFamily(f"{_PREFIX}_active_requests", "Requests in progress", labels=("model",))
        for model, series in self._models.items():
            active.add_metric((model,), series.active)
        yield active
        for name, help_text, pick in _HISTOGRAMS:
            family = HistogramMetricFamily(f"{_PREFIX}_{name}", help_text, labels=("model",))
            for model, series in self._models.items():
                histogram = pick(series)
                family.add_metric((model,), histogram.buckets(), histogram.total)
            yield family
        tokens = CounterMetricFamily(f"{_PREFIX}_output_tokens", "Tokens sent to clients", labels=("model",))
        for model, series in self._models.items():
            tokens.add_metric((model,), series.output_tokens_total)
        yield tokens
        stages = HistogramMetricFamily(
            f"{_PREFIX}_stage_duration_seconds",
            "Time of the frontend's stages of a request",
            labels=("stage",),
        )
        for stage, histogram in self.stages.items():
            stages.add_metric((stage,), histogram.buckets(), histogram.total)
        yield stages
        for collect in self._more:
            yield from collect()


_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelSeries], Histogram]], ...] = (
    (
        "request_duration_seconds",
        "Time from the request to the end of its response",
        lambda series: series.request_duration,
    ),
    (
        "time_to_first_token_seconds",
        "Time from the request to its first token",
        lambda series: series.time_to_first_token,
    ),
    ("inter_token_latency_seconds", "Time between two tokens of a choice", lambda series: series.gap),
    ("input_sequence_tokens", "Prompt tokens per request", lambda series: series.input_tokens),
    ("output_sequence_tokens", "Output tokens per request", lambda series: series.output_tokens),
    (
        "cached_tokens",
        "Cached prompt tokens per request",
        lambda series: series.cached_tokens,
    ),
)


def _counter(
    name: str, help_text: str, labels: Sequence[str], values: Counter[Labels]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help_text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family
