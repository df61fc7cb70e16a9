"""FrameConnection: framed messages, and file descriptors on Unix sockets, over a stream."""

from __future__ import annotations

import array
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE

from kvolt.core.errors import KvoltError, Overloaded, ProtocolError, WorkerLost
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.transfer.peer.sockets import host_of
from kvolt.transfer.peer.streams import stream_of
from kvolt.transfer.reads.progress import ProgressThread, Timer
from kvolt.transfer.reads.wire import MAX_FRAME_BYTES, FrameReader, Message, to_frame

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
_MAX_UNSENT_BYTES = 64 << 20
UNFINISHED_S = 60.0
"""Deadline for a started frame."""
_MAX_DESCRIPTORS = 16
"""Per read, and kept until their message arrives."""


class FrameConnection:
    """See the module. Progress thread only."""

    def __init__(
        self,
        progress: ProgressThread,
        sock: socket.socket,
        on_message: Callable[[Message], None],
        on_closed: Callable[[KvoltError], None],
        max_bytes: int = MAX_FRAME_BYTES,
        budget: ByteBudget | None = None,
    ) -> None:
        """`on_closed` is called once, but not for `close`. `max_bytes`: frame size limit. `budget`: for incomplete
        frames."""
        self._progress = progress
        self._stream = stream_of(sock)
        self._socket = sock
        self._on_message = on_message
        self._on_closed = on_closed
        self._reader = FrameReader(max_bytes)
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        """With the descriptor sent with the first byte, owned here."""
        self._unsent_bytes = 0
        self._descriptors: deque[int] = deque()
        self.is_unix = sock.family == socket.AF_UNIX
        self.peer_host = host_of(sock)
        self._budget = budget
        self._counted_bytes = 0
        self._frame_timer: Timer | None = None
        """Runs while a frame is incomplete."""
        self.is_open = True
        progress.watch(sock.fileno(), EVENT_READ, self._on_ready)

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """No-op if closed. Duplicates the descriptor. OSError if none is available."""
        if not self.is_open:
            return
        frame = to_frame(message)
        if self._unsent_bytes + len(frame) > _MAX_UNSENT_BYTES:
            self._fail(
                Overloaded("the peer does not read its messages", queue="transfer", limit=_MAX_UNSENT_BYTES)
            )
            return
        # Duplicate: the caller may close its descriptor before the peer reads.
        duplicate = None if descriptor is None else os.dup(descriptor)
        self._unsent_bytes += len(frame)
        self._unsent.append((memoryview(frame), duplicate))
        self._flush()

    def raise_frame_limit(self) -> None:
        """Accept frames of full size from now on."""
        self._reader.max_bytes = MAX_FRAME_BYTES

    def take_descriptor(self) -> int | None:
        """Next received descriptor; the caller closes it."""
        return self._descriptors.popleft() if self._descriptors else None

    def detach(self) -> socket.socket:
        """Hand over the socket; no sent data is buffered here."""
        self._detach()
        return self._socket

    def close(self) -> None:
        if self.is_open:
            self._detach()
            self._socket.close()

    def shed(self) -> None:
        """ByteBudget: this connection holds the most incomplete data."""
        self._fail(Overloaded("too much unfinished data from this address", queue="unfinished_messages"))

    def _detach(self) -> None:
        self.is_open = False
        self._reader.clear()  # free the buffer now
        self._count_unfinished(0, has_progress=True)
        self._progress.unwatch(self._socket.fileno())
        while self._descriptors:
            os.close(self._descriptors.popleft())
        while self._unsent:
            _, descriptor = self._unsent.popleft()
            if descriptor is not None:
                os.close(descriptor)

    def _fail(self, error: KvoltError) -> None:
        if self.is_open:
            self.close()
            self._on_closed(error)

    def _on_ready(self, events: int) -> None:
        if events & EVENT_WRITE:
            self._flush()
        if events & EVENT_READ and self.is_open:
            self._read()

    def _read(self) -> None:
        try:
            data = self._receive()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._fail(WorkerLost("connection to the peer lost", reason=str(error)))
            return
        if not data:
            self._fail(WorkerLost("the peer closed the connection", reason="closed"))
            return
        try:
            has_progress = False
            for message in self._reader.feed(data):
                has_progress = True
                self._on_message(message)
                if not self.is_open:
                    return
            self._count_unfinished(self._reader.buffered_bytes, has_progress)
            if not self.is_open:
                return
            if len(self._descriptors) > _MAX_DESCRIPTORS:
                raise ProtocolError("descriptors without a message", rule="described")
        except KvoltError as error:
            self._fail(error)
        except Exception as error:
            # Unexpected error: disconnect this peer only.
            log.warning("unexpected error while handling a peer's message", exc_info=True)
            self._fail(ProtocolError(f"cannot handle the message: {type(error).__name__}", rule="message"))

    def _count_unfinished(self, num_bytes: int, has_progress: bool) -> None:
        if self._frame_timer is not None and (has_progress or not num_bytes):
            self._frame_timer.cancel()
            self._frame_timer = None
        if num_bytes and self._frame_timer is None:
            self._frame_timer = self._progress.call_at(
                self._progress.now() + UNFINISHED_S, self._on_frame_timeout
            )
        if num_bytes != self._counted_bytes and self._budget is not None:
            self._counted_bytes = num_bytes
            self._budget.set_held_bytes(self, num_bytes)

    def _on_frame_timeout(self) -> None:
        self._fail(ProtocolError(f"incomplete frame after {UNFINISHED_S:g} s", rule="slow"))

    def _receive(self) -> bytes:
        if not self.is_unix:
            return self._stream.receive(_READ_BYTES)
        numbers = array.array("i")
        space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * numbers.itemsize)
        data, ancillary, _, _ = self._socket.recvmsg(_READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, value in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers.frombytes(value[: len(value) - len(value) % numbers.itemsize])
        self._descriptors.extend(numbers)
        return data

    def _flush(self) -> None:
        try:
            while self._unsent:
                data, descriptor = self._unsent[0]
                sent = self._send(data, descriptor)
                self._unsent_bytes -= sent
                self._unsent[0] = (data[sent:], None)
                if descriptor is not None:
                    os.close(descriptor)
                if sent == len(data):
                    self._unsent.popleft()
            self._stream.flush()
            is_sent = True
        except (BlockingIOError, InterruptedError):
            is_sent = False
        except OSError as error:
            self._fail(WorkerLost("connection to the peer lost", reason=str(error)))
            return
        self._progress.watch(
            self._socket.fileno(), EVENT_READ | (0 if is_sent else EVENT_WRITE), self._on_ready
        )

    def _send(self, data: memoryview, descriptor: int | None) -> int:
        if descriptor is None:
            return self._stream.send(data)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        return self._socket.sendmsg([data], rights, socket.MSG_NOSIGNAL)
