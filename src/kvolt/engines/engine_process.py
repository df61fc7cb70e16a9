"""Process of an engine as its parent sees it: start, messages, terminal output and exit.

Parent and process exchange frames (`framing`) over a socket pair; the message types belong to the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self, cast

from kvolt.engines.framing import FrameSplitter, encode_frame
from kvolt.runtime.supervisor.output import LineReader
from kvolt.runtime.supervisor.process import Child, ChildProcess

log = logging.getLogger(__name__)

_NUM_LAST_LINES = 30
_LINE_BYTES = 2000
_LAST_MESSAGES_S = 1.0


class EngineHost(Child, Protocol):
    """What runs the engine: a process, or a stand-in."""

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal number; None while it runs, and for a stand-in."""

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of its output."""


class _LogOutput(LineReader):
    """Logs the output of the process, and keeps the last lines."""

    def __init__(self, name: str) -> None:
        super().__init__(_LINE_BYTES)
        self.lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._name = name

    def handle_lines(self, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            if text.strip():
                self.lines.append(text)
                log.info("%s: %s", self._name, text)


class EngineProcess(ChildProcess):
    """See the module."""

    output: _LogOutput

    @classmethod
    async def start_module(
        cls, module: str, descriptors: Sequence[int], *, name: str, leads_group: bool = False
    ) -> Self:
        """Run a module with these descriptors, whose numbers are its arguments. `name` prefixes its log lines."""
        argv = [sys.executable, "-m", module, *map(str, descriptors)]
        return await cls.start(argv, _LogOutput(name), pass_fds=descriptors, leads_group=leads_group)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of its output."""
        return tuple(self.output.lines)


class MessageLink(asyncio.Protocol):
    """The parent's end of the socket."""

    def __init__(self, on_message: Callable[[memoryview], None]) -> None:
        """`on_message` decodes and handles a message."""
        self.lost = asyncio.Event()
        self._on_message = on_message
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None

    async def connect(self, end: socket.socket) -> None:
        """Takes ownership of `end`."""
        end.setblocking(False)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)
        except BaseException:
            end.close()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for message in self._splitter.feed(data):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def send(self, message: Any) -> None:
        """Send a message; ignored if the connection is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def exit_report(host: EngineHost, link_lost: asyncio.Event) -> tuple[str, str]:
    """Wait for the exit and for the last messages. Returns how it ended, and its last output, for an error message."""
    how = await host.wait_exit()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LAST_MESSAGES_S):
            await link_lost.wait()
    lines = "".join(f"\n  {line}" for line in host.last_lines)
    return how, f"; last output:{lines}" if lines else ""
