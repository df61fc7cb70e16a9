"""Rows of text of a twin's report, for terminal and HTML output. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvolt.bench.load.report_text import milliseconds
from kvolt.twin.misses import MEANINGS, Miss, Reason
from kvolt.twin.report import TwinReport

_NUM_PERIODS = 12
_MAX_WORKERS = 32


def cluster_rows(report: TwinReport) -> list[tuple[str, str]]:
    """Cluster, cost and utilization as names and values."""
    twin = report.twin
    workers = twin.workers
    rows = [
        ("workers", f"{len(workers)}, {twin.gpus_per_worker} GPU each, {twin.router}"),
        (
            "GPU-seconds",
            f"{twin.gpu_seconds:.1f}, busy {twin.busy_gpu_seconds:.1f} ({_percent(twin.busy_share)})",
        ),
    ]
    if report.counts.complete:
        per_request = twin.gpu_seconds / report.counts.complete
        rows.append(("GPU-seconds per complete request", f"{per_request:.3g}"))
    if len(workers) > 1:
        shares = [worker.busy_share for worker in workers]
        rows.append(
            ("busy, least and most loaded worker", f"{_percent(min(shares))}, {_percent(max(shares))}")
        )
    rows += [
        (f"hit rate, {tier}", f"{_percent(hits.share)} of input tokens ({hits.tokens})")
        for tier, hits in twin.hits.items()
    ]
    rows.append(("preemptions", str(twin.preemptions)))
    return rows


def period_rows(report: TwinReport) -> list[list[str]]:
    """Header and a few periods of equal length of the run."""
    line = report.twin.activity
    per_row = max(1, -(-len(line.busy) // _NUM_PERIODS))
    digits = 0 if per_row * line.width_s >= 1 else 2
    rows = [["from", "workers busy", "running", "waiting", "KV used"]]
    for start in range(0, len(line.busy), per_row):
        of = slice(start, start + per_row)
        rows.append(
            [
                f"{start * line.width_s:.{digits}f} s",
                _percent(_mean(line.busy[of])),
                f"{_mean(line.running[of]):.1f}",
                f"{_mean(line.waiting[of]):.1f}",
                _percent(_mean(line.kv_used[of])),
            ]
        )
    return rows


def worker_rows(report: TwinReport) -> list[list[str]]:
    """Header and one row per worker, up to a limit."""
    rows = [["worker", "requests", "prompt tokens computed", "busy"]]
    rows += [
        [worker.name, str(worker.requests), str(worker.prompt_tokens), _percent(worker.busy_share)]
        for worker in report.twin.workers[:_MAX_WORKERS]
    ]
    left = len(report.twin.workers) - _MAX_WORKERS
    return [*rows, [f"and {left} more", "", "", ""]] if left > 0 else rows


def reason_rows(report: TwinReport) -> list[list[str]]:
    """Header and reasons of SLA misses, most frequent first."""
    reasons = sorted(report.twin.misses.reasons.items(), key=lambda item: -item[1])
    return [["chief reason", "requests", "which means"]] + [
        [str(reason), str(number), MEANINGS[Reason(reason)]] for reason, number in reasons
    ]


def worst_rows(report: TwinReport) -> list[list[str]]:
    """Header and the worst requests; times in milliseconds."""
    header = ["request", "due", "worker", "missed", "reason", *(str(part) for part in _PARTS)]
    return [[*header, "input", "cached", "output", "preemptions"], *map(_worst_row, report.twin.misses.worst)]


_PARTS = (Reason.QUEUED, Reason.PROMPT, Reason.OTHERS, Reason.PREEMPTED, Reason.DECODE)


def _worst_row(miss: Miss) -> list[str]:
    return [
        str(miss.number),
        f"{miss.at_s:.1f} s",
        miss.worker,
        f"{miss.figure} {milliseconds(miss.value_s)} of {milliseconds(miss.limit_s)}",
        str(miss.reason),
        *(milliseconds(miss.parts.get(part, 0.0)) for part in _PARTS),
        str(miss.input_tokens),
        str(miss.cached_tokens),
        str(miss.output_tokens),
        str(miss.preemptions),
    ]


def _percent(share: float) -> str:
    return f"{100.0 * share:.1f} %"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
