"""The host process and its message socket, as the engine sees them.

The host leads a process group, so all of its processes end with it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from kvolt.engines.child_process import ChildProcess
from kvolt.engines.framing import FrameSplitter, encode_frame
from kvolt.engines.sglang.host.messages import Answer, Command, decode_answer

_MODULE = "kvolt.engines.sglang.host.host"


class Link(Protocol):
    """Connection to a host. Its messages go to the callback given at start."""

    lost: asyncio.Event
    """Set when the connection is lost."""

    def send(self, command: Command) -> None: ...

    def close(self) -> None: ...


class Host(Protocol):
    """Interface of a host; replaced in tests."""

    @property
    def link(self) -> Link: ...

    @property
    def last_lines(self) -> tuple[str, ...]:
        """Last lines of its output, for error messages."""
        ...

    async def wait_exit(self) -> str:
        """Wait until it and all of its processes have ended; returns how, in a few words."""
        ...

    def kill(self) -> None:
        """Kill it. Can be called repeatedly and after its end."""
        ...


NewHost = Callable[[Callable[[Answer], None]], Awaitable[Host]]
"""Starts a host that sends its messages to the callback."""


class HostLink(asyncio.Protocol):
    """The engine's end of the socket."""

    def __init__(self, on_answer: Callable[[Answer], None]) -> None:
        self._on_answer = on_answer
        self._cutter = FrameSplitter()
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
        """Send a command; ignored if the connection is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(command))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class HostProcess(ChildProcess):
    """See the module."""

    link: HostLink

    @classmethod
    async def start(cls, on_answer: Callable[[Answer], None]) -> HostProcess:
        """Start the process. Cancelling this stops it."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            _, link = await loop.create_unix_connection(lambda: HostLink(on_answer), sock=ours)
            try:
                host = await cls.start_module(_MODULE, [theirs.fileno()], name="sglang", leads_group=True)
            except BaseException:
                link.close()
                raise
        host.link = link
        return host
