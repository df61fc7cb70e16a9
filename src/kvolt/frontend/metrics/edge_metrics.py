"""Prometheus metrics of the frontend's requests.

A token must not cost a call into a metrics library: histograms are lists of counts, updated in place and turned into
Prometheus families at each scrape.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily, Metric

from kvolt.frontend.metrics.request_log import RequestLog
from kvolt.runtime.histogram import SECONDS, Histogram
from kvolt.runtime.metric_families import Labels, counter, gauge, histogram

_PREFIX = "kvolt_frontend"

_SHORT = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

MAX_MODELS = 256
"""Label values for models; a name beyond them is counted as `other`."""


@dataclass(slots=True)
class ModelSeries:
    """The series of one model."""

    active: int = 0
    request_duration: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    gap: Histogram = field(default_factory=lambda: Histogram(_SHORT))
    input_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))
    cached_tokens: Histogram = field(default_factory=lambda: Histogram((0, *_TOKENS)))
    output_tokens_total: int = 0


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
        self.request_log = RequestLog()
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
        for name, help_text, label_names, values in (
            ("requests", "Requests that have ended", (*labels, "status", "error_type"), self.requests),
            ("requests_started", "Requests that have started", labels, self.started),
            ("model_cancellation", "Requests cancelled by the client", labels, self.cancelled),
            ("model_rejection", "Requests refused because of load", labels[:2], self.rejected),
        ):
            yield counter(f"{_PREFIX}_{name}", help_text, label_names, values.items())
        yield GaugeMetricFamily(
            f"{_PREFIX}_disconnected_clients",
            "Connections closed by the client before the response was complete",
            value=self.disconnected,
        )
        models = [((name,), series) for name, series in self._models.items()]
        by_model = ("model",)
        active = ((at, series.active) for at, series in models)
        yield gauge(f"{_PREFIX}_active_requests", "Requests in progress", by_model, active)
        for name, help_text, pick in _HISTOGRAMS:
            picked = ((at, pick(series)) for at, series in models)
            yield histogram(f"{_PREFIX}_{name}", help_text, by_model, picked)
        sent = ((at, series.output_tokens_total) for at, series in models)
        yield counter(f"{_PREFIX}_output_tokens", "Tokens sent to clients", by_model, sent)
        yield histogram(
            f"{_PREFIX}_stage_duration_seconds",
            "Time of the frontend's stages of a request",
            ("stage",),
            (((stage,), each) for stage, each in self.stages.items()),
        )
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
    ("cached_tokens", "Cached prompt tokens per request", lambda series: series.cached_tokens),
)
