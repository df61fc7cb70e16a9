"""Report of a sweep as a struct, rows of text, CSV and HTML. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from html import escape
from typing import Any

import msgspec

from kvolt.bench.load.page import html_file, table
from kvolt.bench.load.report import Setting
from kvolt.bench.load.report_text import milliseconds
from kvolt.bench.load.svg import Series, plot
from kvolt.twin.objectives import OBJECTIVES, pareto
from kvolt.twin.points import FORMAT, PointResult

_OTHER_OBJECTIVES = ("goodput", "ttft_p90", "itl_p90", "hit_rate", "busy_share", "failed")
"""Metrics shown besides the objectives."""


class SweepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a sweep, also the format of the JSON file."""

    format: str = FORMAT
    settings: dict[str, Setting]
    """Settings common to all points."""
    axes: dict[str, list[Any]]
    objectives: list[str]
    num_points: int
    """Number of requested points; `points` contains those that were run."""
    points: list[PointResult]
    pareto: list[str]
    """Digests of the Pareto-optimal points."""
    sla: dict[str, float] | None


def pareto_digests(points: Sequence[PointResult], objectives: Sequence[str]) -> list[str]:
    return [points[place].digest for place in pareto([point.figures for point in points], objectives)]


def point_rows(report: SweepReport, only_best: bool) -> list[list[str]]:
    """Header and points sorted by objectives, best first."""
    axes = list(report.axes)
    names = [*report.objectives, *(name for name in _OTHER_OBJECTIVES if name not in report.objectives)]
    names = [
        name
        for name in names
        if name in report.objectives or any(point.figures.get(name) for point in report.points)
    ]
    best = set(report.pareto)
    rows = [["", *axes, *names]]
    for point in sorted(report.points, key=lambda point: _order(point, report.objectives)):
        if point.digest in best or not only_best:
            mark = "*" if point.digest in best and not only_best else ""
            values = [_word(point.point.get(name)) for name in axes]
            rows.append([mark, *values, *(_number(name, point.figures.get(name)) for name in names)])
    return rows


def csv_text(report: SweepReport) -> str:
    """CSV of all points with all metrics, in grid order."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["pareto", *report.axes, *OBJECTIVES, "digest"])
    best = set(report.pareto)
    for point in report.points:
        values = [_word(point.point.get(name)) for name in report.axes]
        values_of_point = [point.figures.get(name) for name in OBJECTIVES]
        writer.writerow([int(point.digest in best), *values, *values_of_point, point.digest])
    return text.getvalue()


def sweep_page(report: SweepReport) -> str:
    title = f"sweep of {len(report.points)} clusters"
    missing = report.num_points - len(report.points)
    warning = f'<p class="warning">{missing} points were not run</p>' if missing else ""
    header, *best = point_rows(report, only_best=True)
    every_header, *every = point_rows(report, only_best=False)
    settings = [(name, str(value)) for name, value in report.settings.items() if value is not None]
    return html_file(
        title,
        [
            f"<h1>{escape(title)}</h1>{warning}",
            f"<h2>Pareto set: {len(best)}</h2>{table(header, best)}",
            f'<div class="plots">{"".join(_plots(report))}</div>',
            f"<h2>All points</h2>{table(every_header, every)}",
            f"<h2>Settings</h2>{table(None, settings)}",
        ],
    )


def _plots(report: SweepReport) -> list[str]:
    """Plots of each objective over the last one, which is the cost by default."""
    *others, cost = report.objectives
    best = set(report.pareto)
    plots = []
    for name in others:
        dots = [
            (x, y, point.digest in best)
            for point in report.points
            if (x := point.figures.get(cost)) is not None and (y := point.figures.get(name)) is not None
        ]
        series = [
            Series("all", [(x, y) for x, y, _ in dots], as_line=False),
            Series("pareto", sorted((x, y) for x, y, is_best in dots if is_best)),
        ]
        plots.append(plot(f"{name} over {cost}", cost, name, series))
    return plots


def _order(point: PointResult, objectives: Sequence[str]) -> tuple[tuple[bool, float], ...]:
    """Sort key; missing values last."""

    def key(name: str) -> tuple[bool, float]:
        value = point.figures.get(name)
        return value is None, 0.0 if value is None else -value if OBJECTIVES[name].more_is_better else value

    return tuple(key(name) for name in objectives)


def _word(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name.endswith(("share", "rate")):
        return f"{100.0 * value:.1f} %"
    if name.endswith(("_p50", "_p90", "_p99")):
        return f"{milliseconds(value)} ms"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
