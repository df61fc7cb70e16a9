"""Responses written from event loop callbacks, without a task per chunk.

A producer gets a `ResponseWriter`. The head is sent with the first chunk. Data written within one tick of the loop is
sent by one system call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from kvolt.runtime.http.protocol import LAST_CHUNK, Response

log = logging.getLogger(__name__)

EVENT_STREAM = "text/event-stream"
SSE_COMMENT = b":\n\n"
NUM_CHUNK_HEADS = 4096
CHUNK_HEADS = [b"%x\r\n" % size for size in range(NUM_CHUNK_HEADS)]


def _ignore() -> None:
    pass


def chunk_head(size: int) -> bytes:
    """Size line of a chunk."""
    return CHUNK_HEADS[size] if size < NUM_CHUNK_HEADS else b"%x\r\n" % size


class TickWrites:
    """Writers with data to send at the end of the current tick of the event loop.

    A transport sends each write immediately, by a system call. Combining the events of a tick, or head and end of a
    short response, saves calls.
    """

    __slots__ = ("_dirty", "_loop", "_now", "observe")

    def __init__(self, loop: asyncio.AbstractEventLoop, now: Callable[[], float] | None = None) -> None:
        self._loop = loop
        self._now = now or loop.time
        self.observe: Callable[[float], None] | None = None
        """Called with the duration of the writes of a tick."""
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
            except Exception:  # one broken transport must not affect the others
                log.exception("response not written")
        if self.observe is not None:
            self.observe(self._now() - started)


class ResponseWriter:
    """Output of one response. Writes to a disconnected client are ignored."""

    __slots__ = (
        "_ended",
        "_head",
        "_tick",
        "_transport",
        "_unsent",
        "chunked",
        "disconnected",
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
        """Whether chunked encoding is used; otherwise the body ends when the connection closes."""
        self.has_body = has_body
        self.disconnected = False
        """The client disconnected."""
        self.on_pause: Callable[[], None] = _ignore
        """Called when the client stops reading and the buffer is full."""
        self.on_resume: Callable[[], None] = _ignore
        """Called when the client reads again."""

    @property
    def head_sent(self) -> bool:
        return not self._head

    def add_header(self, name: str, value: str) -> None:
        """Add a header before the head is sent. Neither name nor value may come from a client."""
        if self._head:
            self._head = b"%b%b: %b\r\n\r\n" % (self._head[:-2], name.encode(), value.encode())

    def send_head(self) -> None:
        head, self._head = self._head, b""
        if head:
            self.write_framed(head)

    def write(self, data: bytes) -> None:
        """Write a chunk, with the head if it is the first. An empty chunk sends only the head."""
        if not self.has_body:
            return
        if self._head:
            self.send_head()
        if not data:
            return  # an empty chunk would end the body
        if self.chunked:
            data = b"%b%b\r\n" % (chunk_head(len(data)), data)
        self.write_framed(data)

    def write_framed(self, chunks: bytes) -> None:
        """Write data already framed with `chunk_head` and line ends, for producers that know the lengths."""
        if self._ended:
            return
        unsent = self._unsent
        if not unsent:
            self._tick.add(self)
        unsent.append(chunks)

    def end(self) -> None:
        """Write the last chunk. Idempotent."""
        if self._ended:
            return
        self.send_head()
        if self.chunked and self.has_body:
            self.write_framed(LAST_CHUNK)
        self._ended = True

    def flush(self) -> None:
        """Pass the data of this tick to the transport."""
        unsent = self._unsent
        if not unsent:
            return
        data = unsent[0] if len(unsent) == 1 else b"".join(unsent)
        unsent.clear()
        if not self.disconnected:
            self._transport.write(data)


class WrittenResponse(NamedTuple):
    """A response that is complete when `produce` returns. An error before the head is sent sets the status."""

    produce: Callable[[ResponseWriter], Awaitable[None]]
    status: int = 200
    headers: Mapping[str, str] = {}
    content_type: str = EVENT_STREAM


AnyResponse = Response | WrittenResponse
