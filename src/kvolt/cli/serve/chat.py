"""Chat of `kvolt serve --interactive`: a `kvolt chat` process in the supervisor's terminal.

A separate process, since Ctrl-C is raised in the main thread only, which runs the supervisor's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import signal
import sys
from collections import deque
from collections.abc import Sequence
from typing import TextIO

from kvolt.runtime.stop import StopSignal
from kvolt.runtime.supervisor.process import ChildProcess, end_child
from kvolt.runtime.tasks import Scope

_NUM_TERMINATE_ATTEMPTS = 10
_TERMINATE_INTERVAL_S = 0.5
_HELD_LINES = 50


class HeldOutput(io.StringIO):
    """Output stream that buffers its last lines while the chat uses the terminal."""

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
    """Run `kvolt chat ARGUMENTS` until the user leaves; return its exit code, or 0 if `stop` ends it.

    While it runs, the supervisor ignores Ctrl-C, which the terminal sends to both processes.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, lambda: None)
    chat = await ChildProcess.start([sys.executable, "-m", "kvolt", "chat", *arguments], None)
    try:
        async with Scope("chat") as scope:
            scope.start(_end_with(stop, chat), "stop")
            await chat.wait_exit()
            scope.cancel()
    finally:
        await _end(chat)
        stop.install()
    code = chat.exit_code
    if stop.requested or code is None:
        return 0
    return code if code >= 0 else 128 - code  # 128 + signal, as in a shell


async def _end_with(stop: StopSignal, chat: ChildProcess) -> None:
    await stop.wait()
    await _end(chat)


async def _end(chat: ChildProcess) -> None:
    """Terminate the chat, and kill it if it does not end.

    SIGTERM lets the chat restore the terminal. It is repeated, since a signal just before a key wait is noticed only
    at the next signal.
    """
    for _ in range(_NUM_TERMINATE_ATTEMPTS):
        if chat.exit_code is not None:
            return
        chat.terminate()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TERMINATE_INTERVAL_S):
                await chat.wait_exit()
    await end_child(chat)
