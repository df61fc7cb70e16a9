"""Comparison of two runs: changes with bootstrap confidence intervals. Pure, seeded.

The samples kept in each report are resampled many times; the interval is the middle 95 % of the changes. It covers the
variance within the two runs, not between days: for that, repeat each run several times.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.bench.load.report import BenchReport
from kvolt.bench.load.tally import LATENCIES

_CONFIDENCE = 0.95
_AT_ONCE = 50
_FEWEST = 5

Values = npt.NDArray[np.float64]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of both runs. `change` is relative: 0.1 means ten percent more in the second."""

    figure: str
    first: float
    second: float
    change: float | None
    low: float | None = None
    high: float | None = None
    """Bounds of the change; None if a run has only one value."""
    more_is_better: bool = False

    @property
    def verdict(self) -> str:
        if self.low is None or self.high is None:
            return ""
        if self.low <= 0.0 <= self.high:
            return "no significant difference"
        return "better" if (self.low > 0.0) == self.more_is_better else "worse"


def compare(first: BenchReport, second: BenchReport, seed: int = 0, num_draws: int = 1000) -> list[Change]:
    """Changes of latencies with intervals, then of metrics with one value per run."""
    rng = np.random.Generator(np.random.PCG64(seed))
    changes = []
    for name in LATENCIES:
        first_values, second_values = _values(first, name), _values(second, name)
        if min(len(first_values), len(second_values)) < _FEWEST:
            continue
        before, after = _statistics(first_values[None, :])[:, 0], _statistics(second_values[None, :])[:, 0]
        drawn = _drawn_changes(first_values, second_values, rng, num_draws)
        tail = 100.0 * (1.0 - _CONFIDENCE) / 2.0
        low, high = np.percentile(drawn, [tail, 100.0 - tail], axis=1)
        for at, statistic in enumerate(("mean", "p50", "p90", "p99")):
            changes.append(
                Change(
                    figure=f"{name} {statistic}",
                    first=float(before[at]),
                    second=float(after[at]),
                    change=_relative(float(before[at]), float(after[at])),
                    low=float(low[at]),
                    high=float(high[at]),
                )
            )
    return changes + _single_changes(first, second)


def differing_settings(first: BenchReport, second: BenchReport) -> dict[str, tuple[object, object]]:
    """Settings that differ between the two runs."""
    names = [*first.settings, *(name for name in second.settings if name not in first.settings)]
    differing: dict[str, tuple[object, object]] = {
        name: (first.settings.get(name), second.settings.get(name))
        for name in names
        if first.settings.get(name) != second.settings.get(name)
    }
    if first.model != second.model:
        differing["model"] = (first.model, second.model)
    return differing


def _values(report: BenchReport, name: str) -> Values:
    values = [getattr(each, name) for each in report.sampled]
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _statistics(rows: Values) -> Values:
    """Mean and percentiles of each row."""
    return np.vstack([rows.mean(axis=1), np.percentile(rows, [50.0, 90.0, 99.0], axis=1)])


def _drawn_changes(ours: Values, theirs: Values, rng: np.random.Generator, num_draws: int) -> Values:
    parts = []
    for start in range(0, num_draws, _AT_ONCE):
        shape = min(_AT_ONCE, num_draws - start)
        before = _statistics(ours[rng.integers(len(ours), size=(shape, len(ours)))])
        after = _statistics(theirs[rng.integers(len(theirs), size=(shape, len(theirs)))])
        parts.append(after / np.maximum(before, 1e-12) - 1.0)
    return np.hstack(parts)


def _single_changes(first: BenchReport, second: BenchReport) -> list[Change]:
    pairs = [
        ("requests/s", first.throughput.requests_per_s, second.throughput.requests_per_s, True),
        (
            "output tokens/s",
            first.throughput.output_tokens_per_s,
            second.throughput.output_tokens_per_s,
            True,
        ),
        ("failed requests", float(first.counts.failed), float(second.counts.failed), False),
    ]
    good = first.throughput.good_requests_per_s, second.throughput.good_requests_per_s
    if good[0] is not None and good[1] is not None:
        pairs.append(("good requests/s", good[0], good[1], True))
    return [
        Change(figure=name, first=before, second=after, change=_relative(before, after), more_is_better=more)
        for name, before, after, more in pairs
    ]


def _relative(before: float, after: float) -> float | None:
    if before == after:
        return 0.0
    return after / before - 1.0 if before else None
