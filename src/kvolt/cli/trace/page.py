"""Text output of `kvolt trace analyze` and `kvolt trace sources`."""

from __future__ import annotations

from collections.abc import Sequence

from kvolt.bench.traces.analysis import TraceAnalysis
from kvolt.bench.traces.reuse import Distribution
from kvolt.bench.traces.sources import FileState, FoundTrace

_BARS = "▁▂▃▄▅▆▇█"
_BAR_COLUMNS = 60


def analysis_text(analysis: TraceAnalysis) -> str:
    rate = analysis.rate
    lines = [
        f"requests       {analysis.requests:,} in {_duration(analysis.duration_s)}",
        f"tokens         {analysis.input_tokens:,} in, {analysis.output_tokens:,} out",
        f"rate           {rate.mean:.2f}/s on average, {rate.peak:.2f}/s at most ({rate.window_s:g} s windows)",
        f"               {_bars(rate.windows)}",
        "",
        f"{'':<15}{'min':>9}{'mean':>11}{'p50':>9}{'p90':>9}{'p99':>9}{'max':>9}",
        _row("input tokens", analysis.input_length),
        _row("output tokens", analysis.output_length),
    ]
    if analysis.sessions is not None:
        lines += [_row("turns", analysis.sessions.turns)]
    if analysis.reuse is not None and analysis.reuse.distance is not None:
        lines += [_row("reuse distance", analysis.reuse.distance)]
    lines += ["", *_reuse_lines(analysis)]
    if analysis.sessions is not None:
        lines += [f"sessions       {analysis.sessions.count:,}"]
    return "\n".join(lines)


def _reuse_lines(analysis: TraceAnalysis) -> list[str]:
    reuse = analysis.reuse
    if reuse is None:
        return ["prefix reuse   not known: the trace has no hash ids"]
    size = " or ".join(str(size) for size in analysis.block_sizes)
    lines = [
        f"blocks         {reuse.blocks:,} of {size} tokens, {reuse.distinct_blocks:,} different",
        f"prefix reuse   {reuse.hit_rate:.1%} of blocks, {reuse.token_hit_rate:.1%} of tokens, "
        f"in {reuse.requests_with_reuse:.1%} of requests",
    ]
    lines += [f"  LRU {each.blocks:>9,}{each.hit_rate:>8.1%}" for each in reuse.lru]
    return [*lines, f"  unbounded    {reuse.hit_rate:>8.1%}"]


def _row(name: str, values: Distribution) -> str:
    whole = "".join(f"{value:>9,.0f}" for value in (values.p50, values.p90, values.p99, values.max))
    return f"{name:<15}{values.min:>9,.0f}{values.mean:>11,.1f}{whole}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"


def _bars(values: Sequence[float]) -> str:
    """One-line bar chart; adjacent values share a column by their mean."""
    per_column = -(-len(values) // _BAR_COLUMNS)
    columns = [values[at : at + per_column] for at in range(0, len(values), per_column)]
    means = [sum(column) / len(column) for column in columns]
    most = max(means) or 1.0
    return "".join(_BARS[round(mean / most * (len(_BARS) - 1))] for mean in means)


def sources_text(traces: Sequence[FoundTrace], folder: str | None) -> str:
    lines: list[str] = []
    for each in traces:
        trace = each.trace
        lines += [
            f"{trace.name}: {trace.about}",
            f"  requests  {trace.requests:,}",
            f"  from      {trace.repository}, {trace.path}",
            f"  fetch     {trace.url}",
            f"  licence   {trace.licence}",
            f"  sha256    {trace.sha256}",
            f"  local     {_local_state(each, folder)}",
            "",
        ]
    if folder is None:
        lines += ["Set KVOLT_TRACES to the directory of downloaded traces to verify them."]
    else:
        lines += [f"Searched in KVOLT_TRACES={folder}, by content."]
    return "\n".join(lines)


def _local_state(trace: FoundTrace, folder: str | None) -> str:
    if trace.state is FileState.SAME:
        return f"{trace.path}: verified"
    if trace.state is FileState.DIFFERS:
        return f"{trace.path}: checksum mismatch, download it again"
    return "not checked" if folder is None else "not found"
