"""A connection between two agents: frames over a socket that never blocks, and descriptors where it can carry them."""

from __future__ import annotations

import array
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE

from kvolt.core.errors import ConnectFailed, KvoltError, Overloaded, WorkerLost
from kvolt.transfer.progress import Progress
from kvolt.transfer.wire import Address, FrameReader, Message, to_frame

_READ_BYTES = 1 << 18
_MAX_UNSENT_BYTES = 64 << 20
_MAX_DESCRIPTORS = 16
"""In one read."""


class FrameConnection:
    """See the module. In the progress thread only."""

    def __init__(
        self,
        progress: Progress,
        link: socket.socket,
        on_message: Callable[[Message], None],
        on_closed: Callable[[KvoltError], None],
    ) -> None:
        """`on_closed` is called once, and nothing after it; not for a `close` of our own."""
        self._progress = progress
        self.socket = link
        self._on_message = on_message
        self._on_closed = on_closed
        self._reader = FrameReader()
        self._unsent: deque[tuple[memoryview, int | None]] = deque()
        """With the descriptor that goes with its first byte."""
        self._num_unsent = 0
        self._descriptors: deque[int] = deque()
        self.is_unix = link.family == socket.AF_UNIX
        self.is_open = True
        progress.watch(link.fileno(), EVENT_READ, self._on_ready)

    def send(self, message: Message, descriptor: int | None = None) -> None:
        """Nothing for one that is closed."""
        if not self.is_open:
            return
        frame = to_frame(message)
        self._num_unsent += len(frame)
        if self._num_unsent > _MAX_UNSENT_BYTES:
            self._lost(
                Overloaded("a peer does not read what it is told", queue="transfer", limit=_MAX_UNSENT_BYTES)
            )
            return
        self._unsent.append((memoryview(frame), descriptor))
        self._flush()

    def take_descriptor(self) -> int | None:
        """The next one that came; the caller closes it."""
        return self._descriptors.popleft() if self._descriptors else None

    def detach(self) -> socket.socket:
        """The socket, for somebody else to go on with: nothing of what was sent is left here."""
        self.is_open = False
        self._progress.forget(self.socket.fileno())
        return self.socket

    def close(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._progress.forget(self.socket.fileno())
        self.socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

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
            for message in self._reader.feed(data):
                if not self.is_open:
                    return
                self._on_message(message)
        except KvoltError as error:
            self._lost(error)

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
                if sent == len(data):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = (data[sent:], None)
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


def connect(
    progress: Progress, to: Address, use_unix: bool, on_done: Callable[[socket.socket | ConnectFailed], None]
) -> None:
    """Open a connection; `on_done` is told how it went, once, perhaps before this returns."""
    where = f"\0{to.unix}" if use_unix else (to.host, to.port)
    named = to.unix if use_unix else f"{to.host}:{to.port}"
    try:
        link = socket.socket(
            socket.AF_UNIX if use_unix else _family(to.host), socket.SOCK_STREAM | socket.SOCK_CLOEXEC
        )
    except OSError as error:
        on_done(ConnectFailed(f"no connection to {named}: {error}", address=named))
        return
    link.setblocking(False)
    if not use_unix:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def failed(code: int) -> None:
        link.close()
        on_done(ConnectFailed(f"no connection to {named}: {os.strerror(code)}", address=named))

    def tried(events: int) -> None:
        progress.forget(link.fileno())
        code = link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            failed(code)
        else:
            on_done(link)

    try:
        code = link.connect_ex(where)
    except OSError as error:  # a name that is none
        link.close()
        on_done(ConnectFailed(f"no connection to {named}: {error}", address=named))
        return
    if not code:
        on_done(link)
    elif code in (errno.EINPROGRESS, errno.EAGAIN):
        progress.watch(link.fileno(), EVENT_WRITE, tried)
    else:
        failed(code)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
