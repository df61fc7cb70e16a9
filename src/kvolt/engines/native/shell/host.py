"""Where an engine core runs: a process of its own, or a thread of the shell's.

Owns its start, its end and what it writes to its terminal. Knows nothing of what is said over the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from asyncio.subprocess import DEVNULL, Process
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvolt.engines.native.shell.engine_loop import Pipe, ShellGone
from kvolt.engines.native.shell.process import serve
from kvolt.runtime.stop import die_with_parent
from kvolt.runtime.supervisor_output import LineCutter

log = logging.getLogger(__name__)

_MODULE = "kvolt.engines.native.shell.process"
_LAST_OUTPUT_S = 1.0
_NUM_LAST_LINES = 20
_LINE_BYTES = 2000


class Host(Protocol):
    """A core that was started."""

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal's number; None while it runs, and for a thread."""
        ...

    @property
    def last_lines(self) -> tuple[str, ...]:
        """What it wrote last, for people."""
        ...

    async def ended(self) -> str:
        """Wait for its end; how it came, in a few words. All it wrote is there then."""
        ...

    def kill(self) -> None:
        """End it now, as far as that is possible. Again and after its end: no error."""
        ...


class _Output(asyncio.Protocol):
    """Reads what a process writes, to its end; logs it, and keeps the last of it."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self.ended = asyncio.Event()
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
                log.info("engine process: %s", text)


class ProcessHost:
    """It ends with this process, however that ends: see `stop.die_with_parent`, and the process's own watch."""

    def __init__(self, process: Process, output: _Output, pipe: asyncio.ReadTransport) -> None:
        self._process = process
        self._output = output
        self._pipe = pipe

    @classmethod
    async def start(cls, end: socket.socket, memory_fds: Sequence[int]) -> ProcessHost:
        """Takes over `end`, also when it fails. Cancelling leaves nothing behind."""
        reads, writes = os.pipe()
        with end, contextlib.ExitStack() as undo:
            undo.callback(os.close, writes)
            pipe, output = await asyncio.get_running_loop().connect_read_pipe(
                _Output, os.fdopen(reads, "rb", 0)
            )
            kept = [end.fileno(), *memory_fds]
            argv = [sys.executable, "-m", _MODULE, *map(str, kept)]
            try:
                process = await asyncio.create_subprocess_exec(
                    *die_with_parent(argv), stdin=DEVNULL, stdout=writes, stderr=writes, pass_fds=kept
                )
            except BaseException:
                pipe.close()
                raise
        return cls(process, output, pipe)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    @property
    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._output.lines)

    async def ended(self) -> str:
        code = await self._process.wait()
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
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


class ThreadHost:
    """It cannot be killed: it ends after the step that it is at. A daemon, so that no exit waits for it."""

    exit_code = None
    last_lines: tuple[str, ...] = ()

    def __init__(self, end: socket.socket, memory_fds: Sequence[int]) -> None:
        """Takes over `end`."""
        self._end = end
        self._memory_fds = [os.dup(each) for each in memory_fds]  # they may outlive the shell's
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="native-engine", daemon=True)
        self._thread.start()

    async def ended(self) -> str:
        await self._ended.wait()
        self._thread.join(_LAST_OUTPUT_S)  # it has nothing left to do but to return
        return "ended"

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        pipe = Pipe(self._end)
        try:
            serve(pipe, pipe.receive_start(), self._memory_fds)
        except ShellGone:
            pass
        except BaseException:
            log.exception("the engine's thread failed")
        finally:
            pipe.close()
            for descriptor in self._memory_fds:
                os.close(descriptor)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended.set)
