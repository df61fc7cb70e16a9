"""Text output of `kvolt trace analyze` and `kvolt trace sources`."""

from __future__ import annotations

from collections.abc import Sequence

from kvolt.bench.traces.analysis import TraceAnalysis
from kvolt.bench.traces.reuse import Distribution
from kvolt.bench.traces.sources import FileState, FoundTrace

_BARS = "▁▂▃▄▅▆▇█"
_BAR_COLUMNS = 60


def analysis_text(found: TraceAnalysis) -> str:
    rate = found.rate
    lines = [
        f"requests       {found.requests:,} in {_duration(found.duration_s)}",
        f"tokens         {found.input_tokens:,} in, {found.output_tokens:,} out",
        f"rate           {rate.mean:.2f}/s on average, {rate.peak:.2f}/s at most ({rate.window_s:g} s windows)",
        f"               {_bars(rate.windows)}",
        "",
        f"{'':<15}{'min':>9}{'mean':>11}{'p50':>9}{'p90':>9}{'p99':>9}{'max':>9}",
        _row("input tokens", found.input_length),
        _row("output tokens", found.output_length),
    ]
    if found.sessions is not None:
        lines += [_row("turns", found.sessions.turns)]
    if found.reuse is not None and found.reuse.distance is not None:
        lines += [_row("reuse distance", found.reuse.distance)]
    lines += ["", *_reuse_lines(found)]
    if found.sessions is not None:
        lines += [f"sessions       {found.sessions.count:,}"]
    return "\n".join(lines)


def _reuse_lines(found: TraceAnalysis) -> list[str]:
    reuse = found.reuse
    if reuse is None:
        return ["prefix reuse   not known: the trace has no hash ids"]
    size = " or ".join(str(size) for size in found.block_sizes)
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


def sources_text(found: Sequence[FoundTrace], folder: str | None) -> str:
    lines: list[str] = []
    for each in found:
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


def _local_state(found: FoundTrace, folder: str | None) -> str:
    if found.state is FileState.SAME:
        return f"{found.path}: verified"
    if found.state is FileState.DIFFERS:
        return f"{found.path}: checksum mismatch, download it again"
    return "not checked" if folder is None else "not found"
