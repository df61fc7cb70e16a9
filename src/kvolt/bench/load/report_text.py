"""Rows of text of a report, for terminal, plain and HTML output. Pure."""

from __future__ import annotations

from kvolt.bench.load.compare import Change
from kvolt.bench.load.histogram import Summary
from kvolt.bench.load.report import BenchReport

LATENCY_NAMES = {
    "ttft": "time to first token",
    "ttst": "first to second token",
    "itl": "gap between tokens",
    "tpot": "time per output token",
    "e2e": "whole answer",
}

_NOTABLE_S = 0.005
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")


def latency_rows(report: BenchReport) -> list[list[str]]:
    """Header and one row per latency, in milliseconds."""
    rows = [["", *_COLUMNS]]
    for name, summary in report.latencies.items():
        values = (
            summary.mean, summary.p50, summary.p90, summary.p95, summary.p99, summary.p99_9, summary.max,
        )  # fmt: skip
        cells = [milliseconds(value) if summary.count else "-" for value in values]
        rows.append([f"{LATENCY_NAMES[name]} ({name})", *cells])
    return rows


def facts(report: BenchReport) -> list[tuple[str, str]]:
    """All values except latencies, as names and values."""
    counts, flow = report.counts, report.throughput
    requests = f"{counts.complete} complete, {counts.failed} failed"
    requests += f", {counts.interrupted} interrupted" if counts.interrupted else ""
    requests += f" (and {counts.warmup} warm-up)" if counts.warmup else ""
    offered = flow.offered_requests_per_s
    rows = [
        ("requests", requests),
        ("measured time", f"{flow.window_s:.2f} s"),
        ("requests/s", f"{flow.requests_per_s:.3g}"),
        *([("offered requests/s", f"{offered:.3g}")] if offered is not None else []),
        ("output tokens/s", f"{flow.output_tokens_per_s:.1f}"),
        (
            "output tokens/s per user",
            f"{report.user_tokens_per_s.mean:.1f} (p50 {report.user_tokens_per_s.p50:.1f})",
        ),
        ("tokens", f"{counts.input_tokens} in, {counts.output_tokens} out"),
    ]
    if counts.cached_tokens is not None and counts.input_tokens:
        rows.append(("input from cache", f"{100.0 * counts.cached_tokens / counts.input_tokens:.1f} %"))
    if flow.good_requests_per_s is not None:
        limits = ", ".join(f"{name} {milliseconds(limit)} ms" for name, limit in (report.sla or {}).items())
        share = "-" if flow.good_share is None else f"{100.0 * flow.good_share:.1f} %"
        rows.append(("goodput", f"{flow.good_requests_per_s:.3g} requests/s, {share} within {limits}"))
    rows.append(("lateness", _middle_and_tail(report.lateness)))
    if report.connecting.p99 > _NOTABLE_S:
        rows.append(("wait for a connection", _middle_and_tail(report.connecting)))
    return rows


def change_rows(changes: list[Change]) -> list[list[str]]:
    """Header and one row per metric; latencies in milliseconds."""
    rows = [["", "first", "second", "change", "95 % interval", ""]]
    for change in changes:
        is_latency = change.low is not None
        format_value = milliseconds if is_latency else _plain
        interval = (
            ""
            if change.low is None or change.high is None
            else f"{_signed(change.low)} to {_signed(change.high)}"
        )
        relative = "-" if change.change is None else _signed(change.change)
        name = f"{change.figure} (ms)" if is_latency else change.figure
        rows.append(
            [
                name,
                format_value(change.first),
                format_value(change.second),
                relative,
                interval,
                change.verdict,
            ]
        )
    return rows


def milliseconds(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _middle_and_tail(summary: Summary) -> str:
    return f"p50 {milliseconds(summary.p50)}, p99 {milliseconds(summary.p99)} ms"


def _signed(share: float) -> str:
    return f"{100.0 * share:+.1f} %"


def _plain(value: float) -> str:
    return f"{value:.4g}"
