"""Comparison of a twin with real runs: figures, spreads, verdicts. Pure.

A figure is accepted within 10 % of the median of the real runs, or within their range; the hit rate within one
percentage point.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from kvolt.bench.load.report import BenchReport

GOAL_SHARE = 0.10
GOAL_POINTS = 0.01
_TOGETHER_SHARE = 0.02
"""Maximum share of tokens that arrive together with the previous one: a late generator reads two at once."""


class Verdict(StrEnum):
    NEAR = "within the goal"
    IN_SPREAD = "within the spread"
    MISSED = "missed"
    NOT_JUDGED = ""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A number in a report."""

    name: str
    of: Callable[[BenchReport], float]
    is_share: bool = False
    """Reported and judged in percentage points; all others are times."""
    is_judged: bool = True


def _latency(name: str, percentile: str, *, is_judged: bool = True) -> Figure:
    return Figure(
        name=f"{name} {percentile}",
        of=lambda report: float(getattr(report.latencies[name], percentile)),
        is_judged=is_judged,
    )


def hit_rate(report: BenchReport) -> float:
    """Share of prompt tokens found in a cache; ValueError if the server did not report it."""
    if report.counts.cached_tokens is None:
        raise ValueError("the report has no cached tokens: the server does not tell them")
    return report.counts.cached_tokens / max(1, report.counts.input_tokens)


FIGURES = (
    _latency("ttft", "p50"),
    _latency("ttft", "p90"),
    _latency("itl", "p50"),
    _latency("itl", "p90"),
    Figure(name="hit rate", of=hit_rate, is_share=True),
    _latency("ttft", "mean", is_judged=False),
    _latency("itl", "mean", is_judged=False),
    _latency("tpot", "p50", is_judged=False),
    _latency("e2e", "p50", is_judged=False),
    _latency("e2e", "p90", is_judged=False),
)
"""Figures with a goal first; the others are reported without a verdict."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of the twin and of the real runs."""

    figure: str
    is_share: bool
    twin: float
    real: tuple[float, ...]
    median: float
    difference: float
    """Difference of the twin from the median: relative, or in percentage points for shares."""
    verdict: Verdict


def judge(twin: BenchReport, real: Sequence[BenchReport], *, may_merge: bool = False) -> list[Line]:
    """Compare each figure. Raises ValueError for runs that did not do the same work.

    `may_merge` accepts runs in which tokens arrived together.
    """
    if not real:
        raise ValueError("there is no real run to compare with")
    for report in real:
        _check_same_work(twin, report, may_merge)
    return [_line(figure, figure.of(twin), [figure.of(report) for report in real]) for figure in FIGURES]


def _check_same_work(twin: BenchReport, real: BenchReport, may_merge: bool) -> None:
    counts = (real.counts.complete, real.counts.input_tokens, real.counts.output_tokens)
    twin_counts = (twin.counts.complete, twin.counts.input_tokens, twin.counts.output_tokens)
    if real.is_interrupted or counts != twin_counts:
        raise ValueError(
            "requests, prompt and output tokens were "
            f"{counts[0]:,}, {counts[1]:,}, {counts[2]:,}{' (cut)' if real.is_interrupted else ''} in a real run and "
            f"{twin_counts[0]:,}, {twin_counts[1]:,}, {twin_counts[2]:,} in the twin"
        )
    if not may_merge and real.counts.events < (1.0 - _TOGETHER_SHARE) * real.counts.output_tokens:
        raise ValueError(
            f"{real.counts.output_tokens:,} tokens came in {real.counts.events:,} events of a real run: "
            "its gaps are not those between tokens"
        )


def _line(figure: Figure, twin: float, real: Sequence[float]) -> Line:
    median = statistics.median(real)
    difference = twin - median if figure.is_share else (twin - median) / median
    return Line(
        figure=figure.name,
        is_share=figure.is_share,
        twin=twin,
        real=tuple(real),
        median=median,
        difference=difference,
        verdict=_verdict(figure, twin, real, difference),
    )


def _verdict(figure: Figure, twin: float, real: Sequence[float], difference: float) -> Verdict:
    if not figure.is_judged:
        return Verdict.NOT_JUDGED
    if abs(difference) <= (GOAL_POINTS if figure.is_share else GOAL_SHARE):
        return Verdict.NEAR
    if not figure.is_share and min(real) <= twin <= max(real):
        return Verdict.IN_SPREAD
    return Verdict.MISSED


# --- as text

HEAD = ("figure", "twin", "real: median (lowest..highest)", "twin over median", "verdict")


def row_of(line: Line) -> tuple[str, str, str, str, str]:
    form = _percent if line.is_share else _ms
    spread = f"{form(line.median)} ({form(min(line.real))}..{form(max(line.real))})"
    difference = f"{100 * line.difference:+.1f} {'points' if line.is_share else '%'}"
    return line.figure, form(line.twin), spread, difference, line.verdict


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
