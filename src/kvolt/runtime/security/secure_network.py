"""Network whose connections are mutual TLS: both ends show a certificate of the cluster.

A peer is unauthenticated until its handshake is complete. Until then it costs one socket and one handshake: their
number is limited, per process and per peer address, and each has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from kvolt.core.errors import ConfigError, ConnectFailed, ProtocolError
from kvolt.runtime.network import (
    Listener,
    ProtocolFactory,
    connect_error,
    join_address,
    listen_error,
    peer_group,
    split_address,
)
from kvolt.runtime.security.credentials import Credentials
from kvolt.runtime.security.identity import peer_identity
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 512
"""Incomplete handshakes of a process; connections beyond it are closed."""
MAX_HANDSHAKES_PER_PEER = 64
"""The same of one peer address (IPv6: of a /64)."""
_BACKLOG = 1024
_ACCEPT_PAUSE_S = 1.0
"""Pause in accepting after an error, such as too many open files."""


CountOutcome = Callable[[str], None]
"""Called with the outcome of each handshake of an accepted connection: `accepted`, `refused`, `incomplete`, or
`limit` if it was not begun."""


class SecureNetwork:
    """Network over TCP and TLS 1.3 with the credentials of this process."""

    def __init__(self, credentials: Credentials, count_outcome: CountOutcome = lambda outcome: None) -> None:
        self._credentials = credentials
        self._count_outcome = count_outcome

    async def listen(self, address: str, factory: ProtocolFactory) -> Listener:
        sockets = await _bind(address)
        return _SecureListener(sockets, factory, self._credentials, self._count_outcome)

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol:
        try:
            host, port = split_address(address)
        except ConfigError as error:  # malformed registration: to the caller it is an unreachable address
            raise ConnectFailed(error.message, address=address) from error
        loop = asyncio.get_running_loop()
        admission = _Admission(factory)
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(
                    lambda: admission, host, port, ssl=self._credentials.client_context
                )
        except TimeoutError:
            raise ConnectFailed(f"{address} did not answer within {timeout_s:g} s", address=address) from None
        except ssl.SSLError as error:
            raise _handshake_error(address, error) from error
        except (OSError, UnicodeError) as error:
            raise connect_error(address, error) from error
        if admission.refusal is not None:
            raise ConnectFailed(f"{address}: {admission.refusal.message}", address=address)
        assert admission.protocol is not None
        return admission.protocol


class _Admission(asyncio.Protocol):
    """Protocol of a connection until its handshake is complete, which makes the real one."""

    def __init__(self, factory: ProtocolFactory) -> None:
        self._factory = factory
        self.protocol: asyncio.Protocol | None = None
        self.refusal: ProtocolError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)  # uvloop's transports are of other classes
        try:
            peer_identity(stream)
        except ProtocolError as error:
            self.refusal = error
            stream.abort()
            return
        self.protocol = self._factory()
        stream.set_protocol(self.protocol)
        self.protocol.connection_made(stream)


class _SecureListener:
    """Accepts, and hands connections to their protocol when the handshake is complete."""

    def __init__(
        self,
        sockets: list[socket.socket],
        factory: ProtocolFactory,
        credentials: Credentials,
        count_outcome: CountOutcome,
    ) -> None:
        self._sockets = sockets
        self._factory = factory
        self._credentials = credentials
        self._count_outcome = count_outcome
        self._num_refused = 0
        self._handshakes: Counter[str] = Counter()
        """Incomplete handshakes by peer group."""
        self._task_group = TaskGroup("handshakes")
        self._accepting = TaskGroup("accept")
        name = sockets[0].getsockname()
        self._address = join_address(name[0], name[1])
        for sock in sockets:
            self._accepting.start(self._accept(sock), self._address)

    @property
    def address(self) -> str:
        return self._address

    async def close(self) -> None:
        await self._accepting.close()
        for sock in self._sockets:
            sock.close()
        await self._task_group.close()

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, name = await loop.sock_accept(sock)
            except ConnectionAbortedError:
                continue
            except OSError as error:  # out of descriptors or memory: accept would spin
                log.warning("accept paused: seconds=%s error=%s", _ACCEPT_PAUSE_S, error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            group = peer_group(str(name[0]))
            if len(self._task_group) >= MAX_HANDSHAKES or self._handshakes[group] >= MAX_HANDSHAKES_PER_PEER:
                connection.close()
                self._refuse(group, "limit", "too many incomplete handshakes")
                continue
            self._handshakes[group] += 1
            self._task_group.start(self._shake_hands(connection, join_address(*name[:2]), group), group)

    async def _shake_hands(self, sock: socket.socket, peer: str, group: str) -> None:
        loop = asyncio.get_running_loop()
        admission = _Admission(self._factory)
        try:
            sock.setblocking(False)
            await loop.connect_accepted_socket(
                lambda: admission,
                sock,
                ssl=self._credentials.server_context,
                ssl_handshake_timeout=HANDSHAKE_S,
            )
        except ssl.SSLError as error:
            self._refuse(peer, "refused", (error.reason or str(error)).lower().replace("_", " "))
        except (OSError, TimeoutError) as error:
            self._refuse(peer, "incomplete", f"handshake incomplete: {str(error) or 'connection closed'}")
        else:
            if admission.refusal is None:
                self._count_outcome("accepted")
            else:
                self._refuse(peer, "refused", admission.refusal.message)
        finally:
            self._handshakes[group] -= 1
            if not self._handshakes[group]:
                del self._handshakes[group]

    def _refuse(self, peer: str, outcome: str, reason: str) -> None:
        self._count_outcome(outcome)
        self._num_refused += 1
        if self._num_refused & (self._num_refused - 1) == 0:  # the 1st, 2nd, 4th ...: it may be an attack
            log.warning("connection refused: peer=%s reason=%s refused=%d", peer, reason, self._num_refused)


def _handshake_error(address: str, error: ssl.SSLError) -> ConnectFailed:
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = f"the certificate of {address} is not of this cluster: {error.verify_message}"
    else:
        problem = f"{address} did not complete a TLS handshake: {(error.reason or str(error)).lower()}"
    return ConnectFailed(
        problem, address=address, remedy="start all processes of the cluster with the same --cluster-key"
    )


async def _bind(address: str) -> list[socket.socket]:
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
