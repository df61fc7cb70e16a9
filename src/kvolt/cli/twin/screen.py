"""Terminal output of `kvolt twin`: the tables of `kvolt bench` and those of the cluster."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.text import Text

from kvolt.cli.bench.screen import print_report, stdout_console, text_table
from kvolt.runtime.clock import SystemClock
from kvolt.twin.report import TwinReport
from kvolt.twin.report_text import cluster_rows, period_rows, reason_rows, worst_rows

_SHOWN_WORST = 8
_LINE_S = 5.0


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


@contextmanager
def progress(what: str, total: int, quiet: bool, done: int = 0) -> Iterator[Callable[[], None]]:
    """Progress on stderr: a bar on a terminal, else periodic lines. Call the yielded function for each item."""
    if quiet:
        yield lambda: None
        return
    if not sys.stderr.isatty():
        yield _Lines(what, total, done).step
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=total, completed=done)
        yield lambda: shown.update(task, advance=1)


class _Lines:
    def __init__(self, what: str, total: int, done: int) -> None:
        self._what = what
        self._total = total
        self._done = done
        self._now = SystemClock().monotonic
        self._printed_at = self._now()

    def step(self) -> None:
        self._done += 1
        now = self._now()
        if now - self._printed_at >= _LINE_S:
            self._printed_at = now
            print(f"{self._done} of {self._total} {self._what}", file=sys.stderr, flush=True)


@contextmanager
def ending(end: Callable[[], None]) -> Iterator[None]:
    """Context in which the first SIGINT or SIGTERM calls `end`; a second one has its default effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handlers: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        restore()
        end()

    for number in (signal.SIGINT, signal.SIGTERM):
        old_handlers[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()
