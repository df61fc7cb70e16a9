"""A response written from callbacks of the event loop: no task runs per chunk.

The producer gets a `ResponseWriter` and writes when it has something; the head leaves with the first
chunk. What is written within a tick leaves the process in one call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from kvolt.runtime.http.protocol import LAST_CHUNK

log = logging.getLogger(__name__)

NUM_CHUNK_HEADS = 4096
CHUNK_HEADS = [b"%x\r\n" % size for size in range(NUM_CHUNK_HEADS)]


def _nothing() -> None:
    pass


def chunk_head(size: int) -> bytes:
    """The line before a chunk of that many bytes."""
    return CHUNK_HEADS[size] if size < NUM_CHUNK_HEADS else b"%x\r\n" % size


class TickWrites:
    """Writers that have something to send at the end of this tick of the event loop.

    A transport sends what it is given at once, in a system call of its own; several events of a tick, and
    head and end of a short answer, are worth waiting for.
    """

    __slots__ = ("_dirty", "_loop", "_now", "observe")

    def __init__(self, loop: asyncio.AbstractEventLoop, now: Callable[[], float] | None = None) -> None:
        self._loop = loop
        self._now = now or loop.time
        self.observe: Callable[[float], None] | None = None
        """Told how long the writing of a tick took."""
        self._dirty: list[ResponseWriter] = []

    def add(self, writer: ResponseWriter) -> None:
        if not self._dirty:
            self._loop.call_soon(self._flush)
        self._dirty.append(writer)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        started = self._now()
        for writer in dirty:
            try:
                writer.flush()
            except Exception:  # a transport that cannot be written to; the others' have nothing to do with it
                log.exception("a response could not be written")
        if self.observe is not None:
            self.observe(self._now() - started)


class ResponseWriter:
    """One response's way out. Writing to a client that has gone is no error: nothing happens."""

    __slots__ = (
        "_ended",
        "_head",
        "_tick",
        "_transport",
        "_unsent",
        "chunked",
        "gone",
        "has_body",
        "on_pause",
        "on_resume",
    )

    def __init__(
        self, transport: asyncio.Transport, tick: TickWrites, head: bytes, chunked: bool, has_body: bool
    ) -> None:
        self._transport = transport
        self._tick = tick
        self._head = head
        self._unsent: list[bytes] = []
        self._ended = False
        self.chunked = chunked
        """Else the body is written as it is, and ends with the connection."""
        self.has_body = has_body
        self.gone = False
        """The client has hung up."""
        self.on_pause: Callable[[], None] = _nothing
        """The client does not read."""
        self.on_resume: Callable[[], None] = _nothing
        """It has."""

    @property
    def head_sent(self) -> bool:
        return not self._head

    def add_header(self, name: str, value: str) -> None:
        """While the head waits. Both are the server's own words."""
        if self._head:
            self._head = b"%b%b: %b\r\n\r\n" % (self._head[:-2], name.encode(), value.encode())

    def send_head(self) -> None:
        head, self._head = self._head, b""
        if head:
            self.write_framed(head)

    def write(self, data: bytes) -> None:
        """A chunk; the head before it if it is the first. An empty one sends the head alone."""
        if not self.has_body:
            return
        if self._head:
            self.send_head()
        if not data:
            return  # a chunk of no bytes would end the body
        if self.chunked:
            data = b"%b%b\r\n" % (chunk_head(len(data)), data)
        self.write_framed(data)

    def write_framed(self, chunks: bytes) -> None:
        """What is framed already, by `chunk_head` and a line end: for producers that know their lengths."""
        if self._ended:
            return
        unsent = self._unsent
        if not unsent:
            self._tick.add(self)
        unsent.append(chunks)

    def end(self) -> None:
        """The last chunk. Safe to repeat."""
        if self._ended:
            return
        self.send_head()
        if self.chunked and self.has_body:
            self.write_framed(LAST_CHUNK)
        self._ended = True

    def flush(self) -> None:
        """Hand over to the transport what was written in this tick."""
        unsent = self._unsent
        if not unsent:
            return
        data = unsent[0] if len(unsent) == 1 else b"".join(unsent)
        unsent.clear()
        if not self.gone:
            self._transport.write(data)


class WrittenResponse(NamedTuple):
    """Over when `produce` returns. What it raises before the head was sent gets a status of its own."""

    produce: Callable[[ResponseWriter], Awaitable[None]]
    status: int = 200
    headers: Mapping[str, str] = {}
    content_type: str = "text/event-stream"
