"""Terminal output of `kvolt twin`: the tables of `kvolt bench` and those of the cluster."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from kvolt.cli.bench.screen import print_report, stdout_console, text_table
from kvolt.twin.report import TwinReport
from kvolt.twin.report_text import cluster_rows, period_rows, reason_rows, worst_rows

_SHOWN_WORST = 8


def print_twin(report: TwinReport) -> None:
    print_report(report)
    console = stdout_console()
    console.print()
    console.print(text_table([["", ""], *cluster_rows(report)], header=False))
    periods = period_rows(report)
    if len(periods) > 1:
        console.print()
        console.print(text_table(periods))
    reasons = reason_rows(report)
    if len(reasons) > 1:
        console.print()
        console.print(Text(f"missed the SLA: {report.twin.misses.missed}", style="bold"))
        console.print(text_table(reasons, header=False))
    worst = worst_rows(report)
    if len(worst) > 1:
        console.print()
        console.print(text_table(_narrow(worst[: _SHOWN_WORST + 1])))


def _narrow(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Drop columns that contain only zeros."""
    kept = [at for at in range(len(rows[0])) if any(row[at] not in ("0", "0.00") for row in rows[1:])]
    return [[row[at] for at in kept] for row in rows]
