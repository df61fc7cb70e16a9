"""ChildProcess: an engine's process as who has started it sees it: its start, its end, what it writes to its terminal.

Knows nothing of what is said to it: a socket for that is among the descriptors that it is given.
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
    """Reads what the processes write, to its end; logs it, and keeps the last of it."""

    def __init__(self, name: str) -> None:
        self.lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self.ended = asyncio.Event()
        self._name = name
        self._cutter = LineCutter(_LINE_BYTES)

    def data_received(self, data: bytes) -> None:
        self._take(self._cutter.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        self._take([self._cutter.take()])
        self.ended.set()

    def _take(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            if text.strip():
                self.lines.append(text)
                log.info("%s: %s", self._name, text)


class ChildProcess:
    """See the module. It ends with this process, however that ends (`stop.die_with_parent`)."""

    def __init__(
        self, process: Process, output: _Output, pipe: asyncio.ReadTransport, *, leads_group: bool
    ) -> None:
        self._process = process
        self._output = output
        self._pipe = pipe
        self._leads_group = leads_group
        self._is_swept = False
        """Whether all of its group was ended after its own end."""

    @classmethod
    async def of_module(
        cls, module: str, descriptors: Sequence[int], *, name: str, leads_group: bool = False
    ) -> Self:
        """Runs a module with these descriptors, whose numbers are its arguments. Cancelling leaves nothing behind.

        `name`: under which its output is logged. `leads_group`: it is at the head of a process group, and whatever
        ends it ends all that it has started."""
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
                    start_new_session=leads_group,  # uvloop knows no `process_group`
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
        """Negative for a signal's number; None while it runs."""
        return self._process.returncode

    @property
    def last_lines(self) -> tuple[str, ...]:
        """What it wrote last, for people."""
        return tuple(self._output.lines)

    async def ended(self) -> str:
        """Wait for its end; how it came, in a few words. All it wrote is there then."""
        code = await self._process.wait()
        if self._leads_group:
            self.kill()
        with contextlib.suppress(TimeoutError):  # a helper of it may hold the pipe
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
        """End it now, and all of its group where it leads one. Again and after its end: no error.

        Its number is kept for its group while that has anybody left, and may be another's after that: so the group is
        told once after the end, and not again."""
        if self._is_swept:
            return
        self._is_swept = self.exit_code is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._leads_group:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
