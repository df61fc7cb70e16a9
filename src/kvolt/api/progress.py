"""Progress of a known number of items on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from kvolt.runtime.clock import SystemClock

LINE_S = 5.0
"""Interval of progress lines where stderr is not a terminal."""


@contextmanager
def progress(what: str, total: int, quiet: bool, done: int = 0) -> Iterator[Callable[[], None]]:
    """Progress on stderr: a bar on a terminal, else periodic lines. Call the yielded function for each item."""
    if quiet or sys.stderr is None:  # as in a program without a console
        yield lambda: None
        return
    if not sys.stderr.isatty():
        lines = _Lines(what, total, done)
        yield lines.step
        lines.finish()
        return
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
        self._num_printed: int | None = None

    def step(self) -> None:
        self._done += 1
        now = self._now()
        if now - self._printed_at >= LINE_S:
            self._printed_at = now
            self._print()

    def finish(self) -> None:
        """Print the end of what was printed before."""
        if self._num_printed not in (None, self._done):
            self._print()

    def _print(self) -> None:
        self._num_printed = self._done
        print(f"{self._done} of {self._total} {self._what}", file=sys.stderr, flush=True)
