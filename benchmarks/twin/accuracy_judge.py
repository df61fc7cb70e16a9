"""Comparison of a twin with real runs: figures, spreads, verdicts. Pure.

A latency is accepted within 10 % of the median of the real runs, or within their range; the hit rate within one
percentage point.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from benchmarks.harness import Figure, Spread, spread

from kvolt.bench.load.report import BenchReport

GOAL_SHARE = 0.10
GOAL_POINTS = 1.0
_TOGETHER_SHARE = 0.02
"""Share of tokens that may arrive together with the one before: a generator that is late reads two at once."""
NEAR, IN_SPREAD, MISSED, NOT_JUDGED = "within the goal", "within the spread", "missed", ""


def _latency(text: str) -> Figure:
    name, statistic = text.split()
    return Figure(f"{text} ms", lambda report: 1e3 * getattr(report.latencies[name], statistic), ",.1f")


def hit_rate(report: BenchReport) -> float:
    """Percentage of prompt tokens found in a cache; ValueError if the server did not report it."""
    if report.counts.cached_tokens is None:
        raise ValueError("the report has no cached tokens: the server does not report them")
    return 100 * report.counts.cached_tokens / max(1, report.counts.input_tokens)


HITS = Figure("hit rate %", hit_rate)
JUDGED = (*map(_latency, ("ttft p50", "ttft p90", "itl p50", "itl p90")), HITS)
OTHERS = tuple(map(_latency, ("ttft mean", "itl mean", "tpot p50", "e2e p50", "e2e p90")))


class Line(msgspec.Struct, frozen=True):
    """One figure of the twin beside the real runs."""

    figure: str
    twin: float
    real: Spread
    difference: float
    """Difference of the twin from the median: relative, or in percentage points for the hit rate."""
    verdict: str

    @property
    def cells(self) -> tuple[str, ...]:
        form = ".2f" if self.figure == HITS.title else ",.1f"
        apart = f"{self.difference:+.1f} points" if self.figure == HITS.title else f"{self.difference:+.1%}"
        return self.figure, f"{self.twin:{form}}", self.real.text(form), apart, self.verdict


HEAD = ("figure", "twin", "real: median (lowest..highest)", "twin over median", "verdict")


def judge(twin: BenchReport, real: Sequence[BenchReport], *, may_merge: bool = False) -> list[Line]:
    """A line for each figure. ValueError for runs that did not do the same work.

    `may_merge` accepts runs in which tokens arrived together.
    """
    for report in real:
        _check_same_work(twin, report, may_merge)
    return [
        _line(figure, figure.value(twin), spread([figure.value(report) for report in real]))
        for figure in (*JUDGED, *OTHERS)
    ]


def _line(figure: Figure, twin: float, real: Spread) -> Line:
    difference = twin - real.median if figure is HITS else twin / real.median - 1.0
    if figure not in JUDGED:
        verdict = NOT_JUDGED
    elif abs(difference) <= (GOAL_POINTS if figure is HITS else GOAL_SHARE):
        verdict = NEAR
    else:
        verdict = IN_SPREAD if figure is not HITS and real.low <= twin <= real.high else MISSED
    return Line(figure.title, twin, real, difference, verdict)


def _check_same_work(twin: BenchReport, real: BenchReport, may_merge: bool) -> None:
    counts, twin_counts = (
        (each.counts.complete, each.counts.input_tokens, each.counts.output_tokens) for each in (real, twin)
    )
    if real.is_interrupted or counts != twin_counts:
        cut = " (interrupted)" if real.is_interrupted else ""
        raise ValueError(
            f"requests, prompt and output tokens: {counts}{cut} in a real run, {twin_counts} in the twin"
        )
    if not may_merge and real.counts.events < (1.0 - _TOGETHER_SHARE) * real.counts.output_tokens:
        raise ValueError(
            f"{real.counts.output_tokens:,} tokens came in {real.counts.events:,} events of a real run: "
            "its gaps are not those between tokens"
        )
