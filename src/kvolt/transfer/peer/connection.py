"""A connection between two agents: frames over a socket that never blocks, and descriptors where it can carry them."""

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
from kvolt.transfer.peer.progress import Progress, Timer
from kvolt.transfer.peer.sockets import host_of
from kvolt.transfer.peer.wire import MAX_FRAME_BYTES, FrameReader, Message, to_frame

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 18
_MAX_UNSENT_BYTES = 64 << 20
UNFINISHED_S = 60.0
"""For a frame to arrive whole."""
_MAX_DESCRIPTORS = 16
"""In one read, and kept for messages that have not come."""


class FrameConnection:
    """See the module. In the progress thread only."""

    def __init__(
        self,
        progress: Progress,
        link: socket.socket,
        on_message: Callable[[Message], None],
        on_closed: Callable[[KvoltError], None],
        most_bytes: int = MAX_FRAME_BYTES,
        budget: ByteBudget | None = None,
    ) -> None:
        """`on_closed` is called once, and nothing after it; not for a `close` of our own. `most_bytes`: of a frame.
        `budget`: for frames that have not come whole."""
        self._progress = progress
        self.socket = link
        self._on_message = on_message
        self._on_closed = on_closed
        self._reader = FrameReader(most_bytes)
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        """With the descriptor that goes with its first byte, which is ours to close."""
        self._num_unsent = 0
        self._descriptors: deque[int] = deque()
        self.is_unix = link.family == socket.AF_UNIX
        self.peer_host = host_of(link)
        self._budget = budget
        self._counted_bytes = 0
        self._late: Timer | None = None
        """Runs while a frame has not come whole."""
        self.is_open = True
        progress.watch(link.fileno(), EVENT_READ, self._on_ready)

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Nothing for one that is closed. The descriptor stays the caller's. OSError when there is none left."""
        if not self.is_open:
            return
        frame = to_frame(message)
        if self._num_unsent + len(frame) > _MAX_UNSENT_BYTES:
            self._lost(
                Overloaded("a peer does not read what it is told", queue="transfer", limit=_MAX_UNSENT_BYTES)
            )
            return
        # A copy: the caller's may be closed, and its number another file's, before the peer reads.
        copied = None if descriptor is None else os.dup(descriptor)
        self._num_unsent += len(frame)
        self._unsent.append((memoryview(frame), copied))
        self._flush()

    def let_in(self) -> None:
        """From now on frames may be of any size that there is."""
        self._reader.most_bytes = MAX_FRAME_BYTES

    def take_descriptor(self) -> int | None:
        """The next one that came; the caller closes it."""
        return self._descriptors.popleft() if self._descriptors else None

    def detach(self) -> socket.socket:
        """The socket, for somebody else to go on with: nothing of what was sent is left here."""
        self._leave()
        return self.socket

    def close(self) -> None:
        if self.is_open:
            self._leave()
            self.socket.close()

    def shed(self) -> None:
        """The budget for unfinished frames is exceeded, and this connection has the most of it."""
        self._lost(Overloaded("too much unfinished data from this address", queue="unfinished_messages"))

    def _leave(self) -> None:
        self.is_open = False
        self._reader.clear()  # now, and not when the garbage collector finds the connection
        self._count_unfinished(0, has_progress=True)
        self._progress.forget(self.socket.fileno())
        while self._descriptors:
            os.close(self._descriptors.popleft())
        while self._unsent:
            _, descriptor = self._unsent.popleft()
            if descriptor is not None:
                os.close(descriptor)

    def _lost(self, error: KvoltError) -> None:
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
            self._lost(WorkerLost("the connection to a peer broke", reason=str(error)))
            return
        if not data:
            self._lost(WorkerLost("a peer closed the connection", reason="closed"))
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
                raise ProtocolError("descriptors that belong to no message", rule="described")
        except KvoltError as error:
            self._lost(error)
        except Exception as error:
            # What nobody has thought of: this peer is let go, and the others go on.
            log.warning("what a peer said cannot be dealt with", exc_info=True)
            self._lost(
                ProtocolError(
                    f"what a peer said cannot be dealt with: {type(error).__name__}", rule="message"
                )
            )

    def _count_unfinished(self, num_bytes: int, has_progress: bool) -> None:
        if self._late is not None and (has_progress or not num_bytes):
            self._late.cancel()
            self._late = None
        if num_bytes and self._late is None:
            self._late = self._progress.at(self._progress.now() + UNFINISHED_S, self._is_late)
        if num_bytes != self._counted_bytes and self._budget is not None:
            self._counted_bytes = num_bytes
            self._budget.hold(self, num_bytes)

    def _is_late(self) -> None:
        self._lost(ProtocolError(f"a frame did not arrive whole within {UNFINISHED_S:g} s", rule="slow"))

    def _receive(self) -> bytes:
        if not self.is_unix:
            return self.socket.recv(_READ_BYTES)
        numbers = array.array("i")
        space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * numbers.itemsize)
        data, told, _, _ = self.socket.recvmsg(_READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, value in told:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers.frombytes(value[: len(value) - len(value) % numbers.itemsize])
        self._descriptors.extend(numbers)
        return data

    def _flush(self) -> None:
        try:
            while self._unsent:
                data, descriptor = self._unsent[0]
                sent = self._send(data, descriptor)
                self._num_unsent -= sent
                self._unsent[0] = (data[sent:], None)
                if descriptor is not None:
                    os.close(descriptor)
                if sent == len(data):
                    self._unsent.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._lost(WorkerLost("the connection to a peer broke", reason=str(error)))
            return
        self._progress.watch(
            self.socket.fileno(), EVENT_READ | (EVENT_WRITE if self._unsent else 0), self._on_ready
        )

    def _send(self, data: memoryview, descriptor: int | None) -> int:
        if descriptor is None:
            return self.socket.send(data, socket.MSG_NOSIGNAL)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        return self.socket.sendmsg([data], rights, socket.MSG_NOSIGNAL)
