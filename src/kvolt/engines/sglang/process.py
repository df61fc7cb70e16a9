"""The host process as the engine sees it, and the messages to it and from it.

Knows nothing of what the messages mean. Whatever ends the host ends all processes that it has started: it is at the
head of a process group.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from kvolt.engines.child_messages import FrameCutter, frame
from kvolt.engines.child_process import ChildProcess
from kvolt.engines.sglang.host.messages import Answer, Command, decode_answer

_MODULE = "kvolt.engines.sglang.host.host"


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


class HostProcess(ChildProcess):
    """See the module."""

    link: HostLink

    @classmethod
    async def start(cls, on_answer: Callable[[Answer], None]) -> HostProcess:
        """Cancelling leaves nothing behind."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            _, link = await loop.create_unix_connection(lambda: HostLink(on_answer), sock=ours)
            try:
                host = await cls.of_module(_MODULE, [theirs.fileno()], name="sglang", leads_group=True)
            except BaseException:
                link.close()
                raise
        host.link = link
        return host
