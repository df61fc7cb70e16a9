"""Progress of long commands on stderr: a live picture on a terminal, lines elsewhere. Ctrl-C ends the work early."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from kvolt.runtime.clock import SystemClock
from kvolt.runtime.stop import StopSignal
from kvolt.runtime.tasks import Scope

_LINE_S = 5.0


async def run_until_signal(
    work: Awaitable[None], end: Callable[[], None], show: Coroutine[Any, Any, None] | None
) -> bool:
    """Run `work`, and `show` beside it; the first SIGINT or SIGTERM calls `end`. Returns whether there was one."""
    stop = StopSignal()
    stop.install()

    async def drive() -> None:
        await work
        scope.cancel()

    async def end_on_signal() -> None:
        await stop.wait()
        end()

    try:
        async with Scope("work") as scope:
            scope.start(end_on_signal(), "stop")
            if show is not None:
                scope.start(show, "progress")
            scope.start(drive(), "work")
    finally:
        stop.restore()
    return stop.requested


async def show_live(line: Callable[[], str], picture: Callable[[], RenderableType], every_s: float) -> None:
    """Show a picture on a terminal every `every_s`, else print a line every few seconds, until cancelled."""
    console = Console(stderr=True)
    if not console.is_terminal:
        while True:
            await asyncio.sleep(_LINE_S)
            print(line(), file=sys.stderr, flush=True)
    with Live(picture(), console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(every_s)
            live.update(picture(), refresh=True)


@contextmanager
def progress(what: str, total: int, quiet: bool, done: int = 0) -> Iterator[Callable[[], None]]:
    """Progress on stderr: a bar on a terminal, else periodic lines. Call the yielded function for each item."""
    if quiet:
        yield lambda: None
        return
    if not sys.stderr.isatty():
        yield _Lines(what, total, done).step
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
