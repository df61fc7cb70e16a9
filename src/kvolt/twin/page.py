"""HTML page of a twin's report: the page of `kvolt bench` with details of the cluster. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvolt.bench.load.page import html_page, table
from kvolt.bench.load.svg import Series, plot
from kvolt.twin.report import TwinReport
from kvolt.twin.report_text import cluster_rows, reason_rows, worker_rows, worst_rows


def twin_page(report: TwinReport) -> str:
    header, *workers = worker_rows(report)
    sections = [
        f"<h2>Cluster</h2>{table(None, cluster_rows(report))}",
        f'<div class="plots">{"".join(_plots(report))}</div>',
        f"<h2>Workers</h2>{table(header, workers)}",
        *_misses(report),
    ]
    return html_page(report, sections)


def _plots(report: TwinReport) -> list[str]:
    line = report.twin.activity
    times = [(number + 0.5) * line.width_s for number in range(len(line.busy))]

    def series(name: str, values: Sequence[float], scale: float = 1.0) -> Series:
        return Series(name, [(at_s, scale * value) for at_s, value in zip(times, values, strict=True)])

    return [
        plot(
            "Workers busy, KV blocks used",
            "s",
            "%",
            [series("busy", line.busy, 100), series("KV", line.kv_used, 100)],
        ),
        plot(
            "Requests at workers",
            "s",
            "requests",
            [series("running", line.running), series("waiting", line.waiting)],
        ),
    ]


def _misses(report: TwinReport) -> list[str]:
    header, *reasons = reason_rows(report)
    if not reasons:
        return []
    sections = [f"<h2>Missed the SLA: {report.twin.misses.missed}</h2>{table(header, reasons)}"]
    header, *worst = worst_rows(report)
    if worst:
        sections.append(f"<h2>Worst requests (ms)</h2>{table(header, worst)}")
    return sections
