"""The host process as the engine sees it: its start, its messages, its end, and what it writes to its terminal.

Knows nothing of what the messages mean. Whatever ends it ends all processes that it has started: it is at the head of
a process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from kvolt.engines.native.shell.messages import FrameCutter, frame
from kvolt.engines.sglang.messages import Answer, Command, decode_answer
from kvolt.runtime.stop import die_with_parent
from kvolt.runtime.supervisor_output import LineCutter

log = logging.getLogger(__name__)

_MODULE = "kvolt.engines.sglang.host"
_NUM_LAST_LINES = 30
_LINE_BYTES = 2000
_LAST_OUTPUT_S = 1.0


class Link(Protocol):
    """Messages to a host; those that it sends go where it was told at its start."""

    lost: asyncio.Event
    """It says nothing any more."""

    def send(self, command: Command) -> None: ...

    def close(self) -> None: ...


class Host(Protocol):
    """What the engine needs of a host; tests have others than a process."""

    @property
    def link(self) -> Link: ...

    @property
    def last_lines(self) -> tuple[str, ...]:
        """What it wrote last, for people."""
        ...

    async def ended(self) -> str:
        """Wait for its end; how it came, in a few words. Nothing that it has started is left then."""
        ...

    def kill(self) -> None:
        """End it now. Again and after its end: no error."""
        ...


NewHost = Callable[[Callable[[Answer], None]], Awaitable[Host]]
"""Starts one, whose messages are handed to the function."""


class HostLink(asyncio.Protocol):
    """The engine's end of the socket."""

    def __init__(self, on_answer: Callable[[Answer], None]) -> None:
        self._on_answer = on_answer
        self._cutter = FrameCutter()
        self._transport: asyncio.Transport | None = None
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for message in self._cutter.feed(data):
            self._on_answer(decode_answer(message))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def send(self, command: Command) -> None:
        """Nothing is sent where nobody is there."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(command))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _Output(asyncio.Protocol):
    """Reads what the processes write, to its end; logs it, and keeps the last of it."""

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
                log.info("sglang: %s", text)


class HostProcess:
    """See the module."""

    def __init__(
        self, process: Process, link: HostLink, output: _Output, pipe: asyncio.ReadTransport
    ) -> None:
        self._process = process
        self._output = output
        self._pipe = pipe
        self._link = link

    @classmethod
    async def start(cls, on_answer: Callable[[Answer], None]) -> HostProcess:
        """Cancelling leaves nothing behind."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        reads, writes = os.pipe()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(os.close, writes)
            ours.setblocking(False)
            _, link = await loop.create_unix_connection(lambda: HostLink(on_answer), sock=ours)
            pipe, output = await loop.connect_read_pipe(_Output, os.fdopen(reads, "rb", 0))
            argv = die_with_parent([sys.executable, "-m", _MODULE, str(theirs.fileno())])
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=DEVNULL,
                    stdout=writes,
                    stderr=writes,
                    pass_fds=(theirs.fileno(),),
                    process_group=0,
                )
            except BaseException:
                link.close()
                pipe.close()
                raise
        return cls(process, link, output, pipe)

    @property
    def link(self) -> HostLink:
        return self._link

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_lines(self) -> tuple[str, ...]:
        return tuple(self._output.lines)

    async def ended(self) -> str:
        code = await self._process.wait()
        self.kill()
        with contextlib.suppress(TimeoutError):
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
        """All of the group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
