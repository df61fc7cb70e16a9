"""TLS listener: accepts connections, and makes their protocol when the handshake is complete.

Until then a peer is a stranger: it costs one socket and one handshake. Their number is limited, per process and per
peer address, and each has a deadline. Connections beyond it wait for a handshake, because many clients may connect
from one address at the same time. A handshake that fails, or that is for a `StrangerProtocol`, occupies its place for
another second, which limits the rate at which an address makes this process compute for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import cast

from kvolt.core.errors import ProtocolError
from kvolt.runtime.logs import is_logged
from kvolt.runtime.network import join_address, listen_error, peer_group, split_address
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 512
"""Incomplete handshakes of a process; connections beyond it wait."""
MAX_HANDSHAKES_PER_PEER = 64
"""The same of one peer address (IPv6: of a /64)."""
MAX_WAITING = 1024
"""Connections of a process that wait for a handshake; those beyond it are closed."""
MAX_WAITING_PER_PEER = 512
"""The same of one peer address."""
FAILED_S = 1.0
"""Time for which a failed handshake counts as incomplete for its peer address."""
_WAIT_S = 10.0
_BACKLOG = 1024
_READ_BYTES = 32 * 1024
_ACCEPTS_PER_TURN = 64
_ACCEPT_PAUSE_S = 1.0
"""Pause in accepting after an error, such as too many open files."""


CountOutcome = Callable[[str], None]
"""Called with the outcome of each handshake of an accepted connection: `accepted`, `refused`, `incomplete`, or
`limit` if it was not begun; and with those of enrollment."""


ProtocolOf = Callable[[asyncio.Transport], asyncio.Protocol]
"""Makes the protocol of a connection whose handshake is complete; raises ProtocolError to refuse the peer."""


class StrangerProtocol(asyncio.Protocol):
    """Protocol of peers that need no certificate where others do."""


class Admission(asyncio.Protocol):
    """Protocol of a connection until its handshake is complete, which makes the real one."""

    def __init__(self, protocol_of: ProtocolOf) -> None:
        self._protocol_of = protocol_of
        self.protocol: asyncio.Protocol | None = None
        self.refusal: ProtocolError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)  # uvloop's transports are of other classes
        try:
            self.protocol = self._protocol_of(stream)
        except ProtocolError as error:
            self.refusal = error
            stream.abort()
            return
        stream.set_protocol(_Reader(self.protocol))
        self.protocol.connection_made(stream)


class _Reader(asyncio.BufferedProtocol):
    """Passes a TLS connection's events on to its protocol.

    Decrypted bytes are read into one buffer: without it, each read allocates 256 KiB for what may be a few tokens.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        self._receive = protocol.data_received
        self.eof_received = protocol.eof_received  # type: ignore[method-assign]
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]
        self.connection_lost = protocol.connection_lost  # type: ignore[method-assign]
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._receive(bytes(self._buffer[:nbytes]))


class TlsListener:
    """See the module."""

    def __init__(
        self,
        sockets: list[socket.socket],
        context: Callable[[], ssl.SSLContext],
        protocol_of: ProtocolOf,
        count_outcome: CountOutcome,
    ) -> None:
        """`context`: called for each connection, so that certificates can change."""
        self._sockets = sockets
        self._context = context
        self._protocol_of = protocol_of
        self._count_outcome = count_outcome
        self._num_refused = 0
        self._connections: Counter[str] = Counter()
        """Connections with an incomplete or no handshake, by peer group."""
        self._waiting: dict[socket.socket, None] = {}
        """Connections without a handshake."""
        self._free = asyncio.Semaphore(MAX_HANDSHAKES)
        self._free_by_group: dict[str, asyncio.Semaphore] = {}
        """Handshakes that may begin, by peer group."""
        self._task_group = TaskGroup("handshakes")
        self._loop = asyncio.get_running_loop()
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        name = sockets[0].getsockname()
        self._address = join_address(name[0], name[1])
        for sock in sockets:
            self._resume(sock)

    @property
    def address(self) -> str:
        return self._address

    async def close(self) -> None:
        for sock in self._sockets:
            if sock in self._paused:
                self._paused.pop(sock).cancel()
            else:
                self._loop.remove_reader(sock)
            sock.close()
        self._sockets = []
        await self._task_group.close()

    def _resume(self, sock: socket.socket) -> None:
        self._paused.pop(sock, None)
        self._loop.add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        # Not loop.sock_accept: cancelled at the wrong time, it loses a connection that it has accepted.
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, name = sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # out of descriptors or memory: accept would spin
                log.warning("accept paused: seconds=%s error=%s", _ACCEPT_PAUSE_S, error)
                self._loop.remove_reader(sock)
                self._paused[sock] = self._loop.call_later(_ACCEPT_PAUSE_S, self._resume, sock)
                return
            group = peer_group(str(name[0]))
            most = MAX_HANDSHAKES_PER_PEER + MAX_WAITING_PER_PEER
            if len(self._waiting) >= MAX_WAITING or self._connections[group] >= most:
                connection.close()
                self._refuse(group, "limit", "too many incomplete handshakes")
            else:
                self._admit(connection, join_address(*name[:2]), group)

    def _admit(self, sock: socket.socket, peer: str, group: str) -> None:
        self._connections[group] += 1
        self._waiting[sock] = None
        task = self._task_group.start(self._shake_hands(sock, peer, group), group)
        # Not in the task: if it is cancelled before its first step, it does not run at all.
        task.add_done_callback(lambda _: self._end(sock, group))

    def _end(self, sock: socket.socket, group: str) -> None:
        if sock in self._waiting:
            del self._waiting[sock]
            sock.close()
        self._connections[group] -= 1
        if not self._connections[group]:
            del self._connections[group]
            self._free_by_group.pop(group, None)

    async def _shake_hands(self, sock: socket.socket, peer: str, group: str) -> None:
        free = self._free_by_group.setdefault(group, asyncio.Semaphore(MAX_HANDSHAKES_PER_PEER))
        try:
            async with asyncio.timeout(_WAIT_S):
                await free.acquire()
        except TimeoutError:
            self._refuse(peer, "incomplete", "handshake incomplete: too many of this address")
            return
        try:
            if not await self._admit_peer(sock, peer):
                await asyncio.sleep(FAILED_S)
        finally:
            free.release()

    async def _admit_peer(self, sock: socket.socket, peer: str) -> bool:
        """Shake hands and count the outcome; whether the peer was accepted, and not as a stranger."""
        admission = Admission(self._protocol_of)
        try:
            async with AsyncExitStack() as slots:
                async with asyncio.timeout(_WAIT_S):
                    await slots.enter_async_context(self._free)
                await self._begin(sock, admission)
        except ssl.SSLError as error:
            self._refuse(peer, "refused", (error.reason or str(error)).lower().replace("_", " "))
            return False
        except (OSError, TimeoutError) as error:
            self._refuse(peer, "incomplete", f"handshake incomplete: {str(error) or 'connection closed'}")
            return False
        if admission.refusal is not None:
            self._refuse(peer, "refused", admission.refusal.message)
            return False
        self._count_outcome("accepted")
        return not isinstance(admission.protocol, StrangerProtocol)

    async def _begin(self, sock: socket.socket, admission: Admission) -> None:
        context = self._context()
        sock.setblocking(False)
        del self._waiting[sock]  # the loop closes it from now on
        await self._loop.connect_accepted_socket(
            lambda: admission, sock, ssl=context, ssl_handshake_timeout=HANDSHAKE_S
        )

    def _refuse(self, peer: str, outcome: str, reason: str) -> None:
        self._count_outcome(outcome)
        self._num_refused += 1
        if is_logged(self._num_refused):
            log.warning("connection refused: peer=%s reason=%s refused=%d", peer, reason, self._num_refused)


async def bind(address: str, reuse_port: bool = False) -> list[socket.socket]:
    """Listening sockets for all addresses of a host name, on one port."""
    host, port = split_address(address)
    loop = asyncio.get_running_loop()
    sockets: list[socket.socket] = []
    try:
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, target in dict.fromkeys(infos):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((target[0], sockets[0].getsockname()[1] if port == 0 and len(sockets) > 1 else port))
            sock.listen(_BACKLOG)
            sock.setblocking(False)
    except OSError as error:
        for sock in sockets:
            with suppress(OSError):
                sock.close()
        raise listen_error(address, error) from error
    return sockets
