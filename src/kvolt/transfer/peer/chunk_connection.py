"""ChunkConnection: the connection on which the chunks of a peer's blocks arrive.

Opened over TCP by the first read that needs it, after the link's own connection.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable

from kvolt.core.errors import ConnectFailed, KvoltError, ProtocolError, WorkerLost
from kvolt.transfer.peer.chunks import ChunkReceiver, ChunkSink
from kvolt.transfer.peer.connection import FrameConnection
from kvolt.transfer.peer.handshakes import Handshakes
from kvolt.transfer.peer.sockets import OnConnected, connect, host_port
from kvolt.transfer.reads import wire
from kvolt.transfer.reads.progress import ProgressThread

CONNECT_S = 10.0
"""Deadline for the Welcome message."""

Action = Callable[[], None]
OnError = Callable[[KvoltError], None]


class ActionQueue:
    """Actions that wait for a connection, each with its error callback."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Action, OnError]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def enqueue(self, action: Action, on_error: OnError) -> None:
        self._waiting.append((action, on_error))

    def run(self) -> None:
        """Run one at a time: each may find the peer gone, and then `fail` ends the rest."""
        while self._waiting:
            action, _ = self._waiting.popleft()
            action()

    def fail(self, error: KvoltError) -> None:
        while self._waiting:
            _, on_error = self._waiting.popleft()
            on_error(error)


class ConnectAttempt:
    """Connects to a peer, whose Welcome must arrive within CONNECT_S."""

    def __init__(
        self,
        progress: ProgressThread,
        address: wire.Address,
        on_timeout: OnError,
        handshakes: Handshakes | None,
    ) -> None:
        """`handshakes`: of TLS, for TCP; None: without TLS."""
        self._progress = progress
        self._address = address
        self._on_timeout = on_timeout
        self._handshakes = handshakes
        self._deadline = progress.call_at(progress.now() + CONNECT_S, self._expire)
        self._cancels: list[Callable[[], None]] = []

    def connect(self, use_unix: bool, on_done: OnConnected) -> None:
        """May be called again once it failed. `on_done` may be called before this returns."""

        def on_connected(result: socket.socket | ConnectFailed) -> None:
            if self._handshakes is None or use_unix or isinstance(result, ConnectFailed):
                on_done(result)
            else:
                peer = host_port(self._address)
                self._cancels.append(self._handshakes.connect(result, peer, on_done))

        self._cancels.append(connect(self._progress, self._address, use_unix, on_connected))

    def end(self) -> None:
        """The peer has answered, or no longer matters."""
        self._deadline.cancel()
        for cancel in self._cancels:
            cancel()

    def _expire(self) -> None:
        peer = host_port(self._address)
        self._on_timeout(ConnectFailed(f"no answer from {peer} within {CONNECT_S:g} s", address=peer))


class ChunkConnection:
    """See the module. Progress thread only."""

    def __init__(
        self,
        progress: ProgressThread,
        address: wire.Address,
        hello: wire.Hello,
        find_sink: Callable[[int], ChunkSink | None],
        on_lost: OnError,
        *,
        is_optional: bool,
        handshakes: Handshakes | None = None,
    ) -> None:
        """`find_sink`: as of ChunkReceiver. An optional connection that cannot be opened is not lost: it is
        unreachable, and what waits for it runs without."""
        self._progress = progress
        self._address = address
        self._hello = hello
        self._find_sink = find_sink
        self._on_lost = on_lost
        self._is_optional = is_optional
        self._handshakes = handshakes
        self._attempt: ConnectAttempt | None = None
        self._handshake: FrameConnection | None = None
        self._receiver: ChunkReceiver | None = None
        self._waiting = ActionQueue()
        self.is_unreachable = False

    @property
    def is_open(self) -> bool:
        return self._receiver is not None

    @property
    def is_awaited(self) -> bool:
        return bool(self._waiting)

    def when_open(self, action: Action, on_error: OnError) -> None:
        """Not while it is open or unreachable."""
        self._waiting.enqueue(action, on_error)
        if self._attempt is None:
            self._attempt = ConnectAttempt(self._progress, self._address, self._on_lost, self._handshakes)
            self._attempt.connect(False, self._on_connected)

    def close(self) -> None:
        """`fail` then ends what waits."""
        self._end_attempt()
        for connection in (self._handshake, self._receiver):
            if connection is not None:
                connection.close()

    def fail(self, error: KvoltError) -> None:
        self._waiting.fail(error)

    def _end_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.end()

    def _on_connected(self, result: socket.socket | ConnectFailed) -> None:
        if not isinstance(result, ConnectFailed):
            self._handshake = FrameConnection(
                self._progress, result, self._on_welcome, self._on_lost, wire.MAX_GREETING_BYTES
            )
            self._handshake.send(self._hello)
        elif self._is_optional:
            self._end_attempt()
            self.is_unreachable = True
            self._waiting.run()
        else:
            self._on_lost(result)

    def _on_welcome(self, message: wire.Message) -> None:
        if not isinstance(message, wire.Welcome) or self._handshake is None:
            raise ProtocolError(f"expected Welcome, got {type(message).__name__}", rule="hello")
        self._end_attempt()
        sock, self._handshake = self._handshake.detach(), None
        self._receiver = ChunkReceiver(
            self._progress,
            sock,
            self._find_sink,
            lambda error: self._on_lost(WorkerLost("chunk connection lost", reason=str(error))),
        )
        self._waiting.run()
