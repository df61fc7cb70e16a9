"""The report as one HTML file that needs nothing else: tables, and plots inside it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

from kvolt.bench.load.histogram import Histogram
from kvolt.bench.load.report import Report
from kvolt.bench.load.svg import Point, Series, plot
from kvolt.bench.load.wording import LATENCY_NAMES, facts, latency_rows

_MAX_DOTS = 2000
_CURVE = (*range(0, 100, 2), 99, 99.5, 99.9)

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #111; background: #fff; max-width: 1340px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin-top: 2em; }
table { border-collapse: collapse; } th, td { padding: .2em .9em .2em 0; text-align: right; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 1px solid #bbb; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1.5em; }
.warning { border-left: 4px solid #d97706; padding: .2em .8em; margin: .4em 0; background: #fff7e8; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: #444; } svg .title { font-size: 13px; fill: #111; }
svg .grid { stroke: #e4e4e4; } svg .limit { stroke: #dc2626; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #e6e6e6; } .warning { background: #33290f; }
  svg text { fill: #aaa; } svg .title { fill: #e6e6e6; } svg .grid { stroke: #333; } }
"""


def html_page(report: Report) -> str:
    title = f"{report.model}: {'cut ' if report.was_cut else ''}load of {report.url}"
    begun = datetime.fromtimestamp(report.started_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    header, *rows = latency_rows(report)
    warnings = "".join(f'<p class="warning">{escape(warning)}</p>' for warning in report.warnings)
    errors = [(kind, str(count), report.messages.get(kind, "")) for kind, count in report.errors.items()]
    settings = [(name, str(value)) for name, value in report.settings.items() if value is not None]
    sections = [
        f"<h1>{escape(title)}</h1><p>{begun}</p>{warnings}",
        _table(None, facts(report)),
        "<h2>Latency (ms)</h2>",
        _table(header, rows),
        f'<div class="plots">{"".join(_plots(report))}</div>',
        f"<h2>Errors</h2>{_table(('kind', 'number', 'first message'), errors)}" if errors else "",
        f"<h2>Settings</h2>{_table(None, settings)}",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def _table(header: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> str:
    head = f"<thead><tr>{_cells('th', header)}</tr></thead>" if header is not None else ""
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    return f"<table>{head}<tbody>{body}</tbody></table>"


def _cells(kind: str, texts: Sequence[str]) -> str:
    return "".join(f"<{kind}>{escape(text)}</{kind}>" for text in texts)


def _plots(report: Report) -> list[str]:
    limits = report.sla or {}
    plots = []
    for name in ("ttft", "itl", "e2e"):
        data = report.histograms.get(name)
        if data is not None and data.counts:
            histogram = Histogram.from_data(data)
            values = histogram.percentiles(tuple(float(percent) for percent in _CURVE))
            points = [(float(percent), value * 1e3) for percent, value in zip(_CURVE, values, strict=True)]
            title = f"{LATENCY_NAMES[name]} by percentile"
            plots.append(plot(title, "percentile", "ms", [Series(name, points)], _ms(limits.get(name))))
    dots: list[Point] = [
        (kept.at_s, kept.ttft * 1e3) for kept in report.kept[:_MAX_DOTS] if kept.ttft is not None
    ]
    cloud = [Series("requests", dots, as_line=False)]
    plots.append(plot("First token, by when it was due", "s", "ms", cloud, _ms(limits.get("ttft"))))
    return plots + _timeline_plots(report)


def _timeline_plots(report: Report) -> list[str]:
    line = report.timeline
    times = [(number + 0.5) * line.width_s for number in range(len(line.tokens))]
    rates = [number / line.width_s for number in line.tokens]
    in_flight: list[Point] = []
    now = 0
    for at_s, started, ended in zip(times, line.started, line.ended, strict=True):
        now += started - ended
        in_flight.append((at_s, float(max(0, now))))
    arrivals = [number / line.width_s for number in line.started]
    ends = [number / line.width_s for number in line.ended]
    return [
        plot(
            "Output tokens per second",
            "s",
            "tokens/s",
            [Series("tokens", list(zip(times, rates, strict=True)))],
        ),
        plot("Requests under way", "s", "requests", [Series("under way", in_flight)]),
        plot(
            "Requests per second",
            "s",
            "requests/s",
            [
                Series("due", list(zip(times, arrivals, strict=True))),
                Series("ended", list(zip(times, ends, strict=True))),
            ],
        ),
    ]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
