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

from kvolt.api.progress import LINE_S
from kvolt.runtime.stop import StopSignal
from kvolt.runtime.tasks import Scope


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
            await asyncio.sleep(LINE_S)
            print(line(), file=sys.stderr, flush=True)
    with Live(picture(), console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(every_s)
            live.update(picture(), refresh=True)


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
