"""Statistics of a run, in bounded memory. Pure.

Latencies and gaps between tokens are those of complete responses; failures are counted by kind, with the first message
of each.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvolt.bench.load.histogram import Histogram, HistogramData, Summary
from kvolt.bench.load.sample import Failure, Sample
from kvolt.bench.load.sla import Sla

MAX_SAMPLES = 5000
"""Size of the uniform sample of responses kept for plots and comparisons."""
_RATE_UNITS = 1e3
_MAX_KINDS = 64

LATENCIES = ("ttft", "ttst", "itl", "tpot", "e2e")


class SampledResponse(msgspec.Struct, frozen=True, array_like=True):
    """Metrics of one sampled response, in seconds."""

    at_s: float
    ttft: float | None
    ttst: float | None
    itl: float | None
    tpot: float | None
    e2e: float


class Tally:
    """Accumulates samples."""

    def __init__(self, sla: Sla | None, draw: Callable[[], float]) -> None:
        self.sla = sla
        self._draw = draw
        self.latencies = {name: Histogram() for name in LATENCIES}
        self.on_gap = self.latencies["itl"].record
        self.user_rate = Histogram(_RATE_UNITS)
        self.lateness = Histogram()
        self.connecting = Histogram()
        """Time from the actual start of a request until it was written."""
        self.timeline = Timeline()
        self.sampled: list[SampledResponse] = []
        self.errors: dict[str, int] = {}
        self.messages: dict[str, str] = {}
        self.num_complete = self.num_failed = self.num_interrupted = self.num_good = self.num_warmup = 0
        self.input_tokens = self.output_tokens = self.cached_tokens = 0
        self.reports_cached = False
        self.num_events = 0
        self.num_started = 0
        self.first_due_s: float | None = None
        self.last_due_s = 0.0
        self.last_end_s = 0.0

    @property
    def num_ended(self) -> int:
        return self.num_complete + self.num_failed + self.num_interrupted

    @property
    def window_s(self) -> float:
        """Time from the first counted request's due time to the end of the last one."""
        return 0.0 if self.first_due_s is None else max(0.0, self.last_end_s - self.first_due_s)

    @property
    def offered_per_s(self) -> float | None:
        """Requests over the time from the first counted due time to the last one; None for a single one."""
        span_s = 0.0 if self.first_due_s is None else self.last_due_s - self.first_due_s
        return self.num_started / span_s if span_s > 0 else None

    def started(self, due_s: float) -> None:
        """Count the start of a request."""
        if self.first_due_s is None:
            self.first_due_s = due_s
        self.num_started += 1
        self.last_due_s = max(self.last_due_s, due_s)
        self.timeline.started(due_s)

    def add(self, sample: Sample) -> None:
        """Count the end of a request."""
        self.last_end_s = max(self.last_end_s, sample.end_s)
        self.timeline.ended(sample.end_s, sample.error is not None)
        self.lateness.record(sample.lateness_s)
        if sample.error == Failure.INTERRUPTED:
            self.num_interrupted += 1
        elif sample.error is not None:
            self.num_failed += 1
            kind = sample.error if len(self.errors) < _MAX_KINDS or sample.error in self.errors else "other"
            self.errors[kind] = self.errors.get(kind, 0) + 1
            self.messages.setdefault(kind, sample.message or "")
        else:
            self._add_complete(sample)

    def _add_complete(self, sample: Sample) -> None:
        latencies = sample.latencies()
        self.num_complete += 1
        self.num_good += self.sla is None or self.sla.is_met(latencies)
        self.input_tokens += sample.input_tokens
        self.output_tokens += sample.output_tokens
        self.num_events += sample.num_events
        if sample.cached_tokens is not None:
            self.reports_cached = True
            self.cached_tokens += sample.cached_tokens
        for name in ("ttft", "ttst", "tpot", "e2e"):
            value = latencies[name]
            if value is not None:
                self.latencies[name].record(value)
        if (rate := sample.tokens_per_s) is not None:
            self.user_rate.record(rate)
        if sample.sent_s is not None:
            self.connecting.record(sample.sent_s - sample.started_s)
        if sample.first_s is not None and sample.last_s is not None:
            self.timeline.tokens(sample.output_tokens, sample.first_s, sample.last_s)
        self._sample(sample, latencies)

    def _sample(self, sample: Sample, latencies: dict[str, float | None]) -> None:
        """Reservoir sampling: each response is kept with equal probability."""
        at = len(self.sampled)
        if at >= MAX_SAMPLES:
            at = int(self._draw() * self.num_complete)
            if at >= MAX_SAMPLES:
                return
        else:
            self.sampled.append(SampledResponse(0, None, None, None, None, 0))
        self.sampled[at] = SampledResponse(
            sample.from_s,
            latencies["ttft"],
            latencies["ttst"],
            latencies["itl"],
            latencies["tpot"],
            sample.e2e_s,
        )

    def summaries(self) -> dict[str, Summary]:
        return {name: histogram.summary() for name, histogram in self.latencies.items()}

    def histograms(self) -> dict[str, HistogramData]:
        return {name: histogram.data() for name, histogram in self.latencies.items()}


MAX_INTERVALS = 512
_FIRST_WIDTH_S = 0.25


class TimelineData(msgspec.Struct, frozen=True, kw_only=True):
    """Sums per interval since the start of the run."""

    width_s: float
    started: list[int]
    ended: list[int]
    failed: list[int]
    tokens: list[float]


class Timeline:
    """Counts starts and ends of requests, and spreads output tokens over their arrival period."""

    def __init__(self) -> None:
        self._width_s = _FIRST_WIDTH_S
        self._started: list[float] = []
        self._ended: list[float] = []
        self._failed: list[float] = []
        self._tokens: list[float] = []

    def started(self, at_s: float) -> None:
        interval = self._interval(at_s)  # first, since it may replace the lists
        self._started[interval] += 1

    def ended(self, at_s: float, failed: bool) -> None:
        interval = self._interval(at_s)
        self._ended[interval] += 1
        self._failed[interval] += failed

    def tokens(self, number: int, first_s: float, last_s: float) -> None:
        end = self._interval(last_s)
        begin = self._interval(first_s)
        each = number / (end - begin + 1)
        for interval in range(begin, end + 1):
            self._tokens[interval] += each

    def data(self) -> TimelineData:
        return TimelineData(
            width_s=self._width_s,
            started=[int(number) for number in self._started],
            ended=[int(number) for number in self._ended],
            failed=[int(number) for number in self._failed],
            tokens=[round(number, 3) for number in self._tokens],
        )

    def _interval(self, at_s: float) -> int:
        at_s = max(0.0, at_s)
        while at_s / self._width_s >= MAX_INTERVALS:
            self._width_s *= 2
            self._started, self._ended = _paired(self._started), _paired(self._ended)
            self._failed, self._tokens = _paired(self._failed), _paired(self._tokens)
        interval = int(at_s / self._width_s)
        for counts in (self._started, self._ended, self._failed, self._tokens):
            counts.extend([0] * (interval + 1 - len(counts)))
        return interval


def _paired(counts: list[float]) -> list[float]:
    return [sum(counts[at : at + 2]) for at in range(0, len(counts), 2)]
