"""ChildProcess: an engine process as seen by its parent: start, exit, and terminal output.

Knows no messages: the socket is among the descriptors passed to the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import deque
from collections.abc import Sequence
from typing import Self

from kvolt.runtime.stop import die_with_parent
from kvolt.runtime.supervisor.output import LineCutter

log = logging.getLogger(__name__)

_NUM_LAST_LINES = 30
_LINE_BYTES = 2000
_LAST_OUTPUT_S = 1.0


class _Output(asyncio.Protocol):
    """Logs the output of the process, and keeps the last lines."""

    def __init__(self, name: str) -> None:
        self.lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self.ended = asyncio.Event()
        self._name = name
        self._cutter = LineCutter(_LINE_BYTES)

    def data_received(self, data: bytes) -> None:
        self._log_lines(self._cutter.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._log_lines([self._cutter.end_line()])
        self.ended.set()

    def _log_lines(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            if text.strip():
                self.lines.append(text)
                log.info("%s: %s", self._name, text)


class ChildProcess:
    """See the module. Ends with this process in any case (`stop.die_with_parent`)."""

    def __init__(
        self, process: Process, output: _Output, pipe: asyncio.ReadTransport, *, leads_group: bool
    ) -> None:
        self._process = process
        self._output = output
        self._pipe = pipe
        self._leads_group = leads_group
        self._is_group_killed = False
        """Whether its group was killed after its own exit."""

    @classmethod
    async def start_module(
        cls, module: str, descriptors: Sequence[int], *, name: str, leads_group: bool = False
    ) -> Self:
        """Run a module with these descriptors, whose numbers are its arguments. Cancelling leaves no process
        behind.

        `name` prefixes its log lines. With `leads_group` it leads a process group that ends with it.
        """
        reads, writes = os.pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, writes)
            loop = asyncio.get_running_loop()
            pipe, output = await loop.connect_read_pipe(lambda: _Output(name), os.fdopen(reads, "rb", 0))
            argv = die_with_parent([sys.executable, "-m", module, *map(str, descriptors)])
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=DEVNULL,
                    stdout=writes,
                    stderr=writes,
                    pass_fds=descriptors,
                    start_new_session=leads_group,  # uvloop has no `process_group`
                )
            except BaseException:
                pipe.close()
                raise
        return cls(process, output, pipe, leads_group=leads_group)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal number; None while it runs."""
        return self._process.returncode

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of its output."""
        return tuple(self._output.lines)

    async def wait_exit(self) -> str:
        """Wait for the exit and for all output; returns a short description of the exit."""
        code = await self._process.wait()
        if self._leads_group:
            self.kill()
        with contextlib.suppress(TimeoutError):  # a grandchild may keep the pipe open
            async with asyncio.timeout(_LAST_OUTPUT_S):
                await self._output.ended.wait()
        self._pipe.close()
        if code >= 0:
            return f"exited with code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"

    def kill(self) -> None:
        """Kill it, and its group if it leads one. Idempotent.

        A process group id stays reserved while the group has members and may be reused afterwards, so the
        group is killed once after the exit and not again.
        """
        if self._is_group_killed:
            return
        self._is_group_killed = self.exit_code is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._leads_group:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
