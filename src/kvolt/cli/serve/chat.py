"""The chat of `kvolt serve --interactive`: a `kvolt chat` of its own process in the terminal of the supervisor.

A process and not a thread, because Ctrl-C is raised in a main thread only, and that one is the loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import sys
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from kvolt.runtime.stop import StopSignal, die_with_parent
from kvolt.runtime.tasks import Scope

_NUM_ASKED = 10
_ASK_EVERY_S = 0.5
_HELD_LINES = 50


class HeldOutput(io.StringIO):
    """A stream that can be told to keep what it gets to itself; the last lines of it come out afterwards.

    For what a supervisor has to say while its terminal belongs to somebody else.
    """

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out = out
        self._held: deque[str] | None = None

    def isatty(self) -> bool:
        return self._out.isatty()

    def write(self, text: str) -> int:
        if self._held is not None:
            self._held.append(text)
        else:
            self._out.write(text)
            self._out.flush()
        return len(text)

    def hold(self) -> None:
        self._held = deque(maxlen=_HELD_LINES)

    def release(self) -> None:
        held, self._held = self._held or (), None
        for text in held:
            self.write(text)


async def chat_in_terminal(arguments: Sequence[str], stop: StopSignal) -> int:
    """`kvolt chat ARGUMENTS` until the person leaves it; its exit code. A stop ends it early, with 0.

    Meanwhile Ctrl-C is the chat's: the terminal sends it to both of us.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    process = await asyncio.create_subprocess_exec(
        *die_with_parent([sys.executable, "-m", "kvolt", "chat", *arguments])
    )
    try:
        async with Scope("chat") as scope:
            scope.start(_end_with(stop, process), "stop")
            code = await process.wait()
            scope.cancel()
    finally:
        await _end(process)
        stop.install()
    if stop.requested:
        return 0
    return code if code >= 0 else 128 - code  # as a shell counts what a signal has ended


async def _end_with(stop: StopSignal, process: Process) -> None:
    await stop.wait()
    await _end(process)


async def _end(process: Process) -> None:
    """Politely first: the chat has to give the terminal back as it was.

    Again and again, since a signal in the moment before it waits for a key is not noticed until the next one.
    """
    for _ in range(_NUM_ASKED):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ASK_EVERY_S):
                await process.wait()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
