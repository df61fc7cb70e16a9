"""Report as a self-contained HTML file with tables and plots. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

from kvolt.bench.load.histogram import Histogram
from kvolt.bench.load.report import BenchReport
from kvolt.bench.load.report_text import LATENCY_NAMES, facts, latency_rows
from kvolt.bench.load.svg import Point, Series, plot

_MAX_DOTS = 2000
_MAX_RATES = 80
_LONG_S = 10.0
_CURVE = (*range(0, 100, 2), 99, 99.5, 99.9)

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #111; background: #fff; max-width: 1440px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.4em; overflow-wrap: anywhere; } h2 { font-size: 1.1em; margin-top: 2em; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2em 1.2em .2em 0; text-align: right; } thead th { border-bottom: 1px solid #bbb; }
th:first-child, td:first-child { text-align: left; }
.named td { text-align: left; vertical-align: top; overflow-wrap: anywhere; }
.named td:first-child { color: #555; white-space: nowrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(420px, 100%), 1fr)); gap: 1.8em 1.5em;
  margin-top: 2em; }
.warning { border-left: 4px solid #d97706; padding: .2em .8em; margin: .4em 0; background: #fff7e8; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: #555; }
svg .title { font-size: 13px; font-weight: 600; fill: #111; } svg .unit { font-weight: 400; fill: #777; }
svg .grid { stroke: #e4e4e4; } svg line.limit { stroke: #dc2626; stroke-dasharray: 4 3; }
svg text.limit { fill: #dc2626; }
@media (prefers-color-scheme: dark) { body { background: #16181c; color: #e6e6e6; } .warning { background: #33290f; }
  thead th { border-color: #555; } .named td:first-child { color: #aaa; }
  svg text { fill: #aaa; } svg .title { fill: #e6e6e6; } svg .grid { stroke: #333; } svg text.limit { fill: #f87171; } }
"""


def html_page(report: BenchReport, more: Sequence[str] = ()) -> str:
    """HTML page of a report. `more` are additional HTML sections before the settings."""
    title = f"{report.model}: {'interrupted ' if report.is_interrupted else ''}load of {report.url}"
    started = "on virtual time"
    if report.started_at:
        started = datetime.fromtimestamp(report.started_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    header, *rows = latency_rows(report)
    warnings = "".join(f'<p class="warning">{escape(warning)}</p>' for warning in report.warnings)
    errors = [(kind, str(count), report.messages.get(kind, "")) for kind, count in report.errors.items()]
    settings = [(name, str(value)) for name, value in report.settings.items() if value is not None]
    sections = [
        f"<h1>{escape(title)}</h1><p>{started}</p>{warnings}",
        table(None, facts(report)),
        "<h2>Latency (ms)</h2>",
        table(header, rows),
        f'<div class="plots">{"".join(_plots(report))}</div>',
        *more,
        f"<h2>Errors</h2>{table(('kind', 'number', 'first message'), errors)}" if errors else "",
        f"<h2>Settings</h2>{table(None, settings)}",
    ]
    return html_file(title, sections)


def html_file(title: str, sections: Sequence[str]) -> str:
    """HTML document with these HTML sections."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def table(header: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> str:
    """HTML table; without a header, rows are names and values."""
    head = f"<thead><tr>{_cells('th', header)}</tr></thead>" if header is not None else ""
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in rows)
    kind = ' class="named"' if header is None else ""
    return f'<div class="table"><table{kind}>{head}<tbody>{body}</tbody></table></div>'


def _cells(kind: str, texts: Sequence[str]) -> str:
    return "".join(f"<{kind}>{escape(text)}</{kind}>" for text in texts)


def _plots(report: BenchReport) -> list[str]:
    limits = report.sla or {}
    plots = []
    for name in ("ttft", "itl", "e2e"):
        data = report.histograms.get(name)
        if data is not None and data.counts:
            histogram = Histogram.from_data(data)
            values = histogram.percentiles(tuple(float(percent) for percent in _CURVE))
            points = [(float(percent), value * 1e3) for percent, value in zip(_CURVE, values, strict=True)]
            title = f"{LATENCY_NAMES[name]} by percentile".capitalize()
            plots.append(plot(title, "percentile", "ms", [Series(name, points)], _ms(limits.get(name))))
    dots: list[Point] = [
        (each.at_s, each.ttft * 1e3) for each in report.sampled[:_MAX_DOTS] if each.ttft is not None
    ]
    cloud = [Series("requests", dots, as_line=False)]
    plots.append(plot("First token, by when it was due", "s", "ms", cloud, _ms(limits.get("ttft"))))
    return plots + _timeline_plots(report)


def _timeline_plots(report: BenchReport) -> list[str]:
    line = report.timeline
    in_flight: list[Point] = []
    now = 0
    for number, (started, ended) in enumerate(zip(line.started, line.ended, strict=True)):
        now += started - ended
        in_flight.append(((number + 0.5) * line.width_s, float(max(0, now))))
    arrivals = Series("due", _rates(line.started, line.width_s))
    ends = Series("ended", _rates(line.ended, line.width_s))
    tokens = Series("tokens", _rates(line.tokens, line.width_s))
    return [
        plot("Output tokens", "s", "tokens/s", [tokens]),
        plot("Running requests", "s", "requests", [Series("running", in_flight)]),
        plot("Requests due and ended", "s", "requests/s", [arrivals, ends]),
    ]


def _rates(counts: Sequence[float], width_s: float) -> list[Point]:
    """Rates per second over intervals of at least one second, since shorter ones have too few requests."""
    joined = max(1, math.ceil(len(counts) / _MAX_RATES))
    if len(counts) * width_s > _LONG_S:
        joined = max(joined, math.ceil(1.0 / width_s))
    starts = range(0, len(counts), joined)
    parts = [(start, counts[start : start + joined]) for start in starts]
    return [((start + len(part) / 2) * width_s, sum(part) / (len(part) * width_s)) for start, part in parts]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
