"""TLS handshakes of an agent's TCP connections: both ends show a certificate of the cluster.

Unix sockets have none: the kernel names the user of the peer. Until its handshake is complete, a peer costs one socket
and one handshake: their number is limited, per process and per peer group, and each has a deadline.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE
from typing import Protocol

from kvolt.core.errors import ConnectFailed, KvoltError, Overloaded, ProtocolError
from kvolt.runtime.logs import is_logged
from kvolt.runtime.security.identity import ProcessRole, identity_of
from kvolt.transfer.peer.sockets import OnConnected
from kvolt.transfer.reads.progress import ProgressThread

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 512
"""Incomplete handshakes of accepted connections; connections beyond it are closed."""
MAX_HANDSHAKES_PER_GROUP = 64
"""The same of one peer address (IPv6: of a /64)."""
ROLES = frozenset((ProcessRole.WORKER, ProcessRole.POOL, ProcessRole.FRONTEND))
"""Roles whose processes may transfer blocks."""
KEY_REMEDY = "start all processes of the cluster with the same version and the same --cluster-key"

OnOpened = Callable[[ssl.SSLSocket | Exception], None]


class TlsContexts(Protocol):
    """`runtime.security.credentials.Credentials`. Contexts change when certificates are renewed."""

    @property
    def server_context(self) -> ssl.SSLContext: ...

    @property
    def client_context(self) -> ssl.SSLContext: ...


class Handshakes:
    """Handshakes of one agent. Progress thread only, except `outcomes`."""

    def __init__(self, progress: ProgressThread, contexts: TlsContexts) -> None:
        self._progress = progress
        self._contexts = contexts
        self.outcomes: Counter[str] = Counter()
        """Of accepted connections: `accepted`, `refused`, `incomplete`, or `limit` if the handshake was not begun."""
        self._incomplete: dict[_Handshake, str] = {}
        """Of accepted connections, with the group of each peer."""
        self._num_by_group: Counter[str] = Counter()
        self._num_refused = 0

    def accept(self, sock: socket.socket, group: str, on_accepted: Callable[[ssl.SSLSocket], None]) -> None:
        """Take ownership of a connection and hand it over when its peer is authenticated. Overloaded at the limit."""
        for num, limit in (
            (len(self._incomplete), MAX_HANDSHAKES),
            (self._num_by_group[group], MAX_HANDSHAKES_PER_GROUP),
        ):
            if num >= limit:
                self.outcomes["limit"] += 1
                raise Overloaded(
                    f"too many incomplete handshakes from {group}", queue="handshakes", limit=limit
                )

        def on_opened(result: ssl.SSLSocket | Exception) -> None:
            self._forget(handshake)
            if isinstance(result, Exception):
                self._refuse(group, result)
                return
            try:
                on_accepted(result)
            except Exception as error:
                result.close()
                self._refuse(group, error)
            else:
                self.outcomes["accepted"] += 1

        tls = self._contexts.server_context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        handshake = _Handshake(self._progress, tls, on_opened)
        self._incomplete[handshake] = group
        self._num_by_group[group] += 1
        handshake.start()

    def connect(self, sock: socket.socket, peer: str, on_done: OnConnected) -> Callable[[], None]:
        """Authenticate the peer of an outgoing connection. Takes ownership; returns a function that cancels."""

        def on_opened(result: ssl.SSLSocket | Exception) -> None:
            on_done(_connect_error(peer, result) if isinstance(result, Exception) else result)

        try:
            tls = self._contexts.client_context.wrap_socket(sock, do_handshake_on_connect=False)
        except OSError as error:  # gone already
            sock.close()
            on_done(_connect_error(peer, error))
            return lambda: None
        handshake = _Handshake(self._progress, tls, on_opened)
        handshake.start()
        return handshake.cancel

    def close(self) -> None:
        for handshake in list(self._incomplete):
            handshake.cancel()
            self._forget(handshake)

    def _forget(self, handshake: _Handshake) -> None:
        group = self._incomplete.pop(handshake)
        self._num_by_group[group] -= 1
        if not self._num_by_group[group]:
            del self._num_by_group[group]

    def _refuse(self, group: str, error: Exception) -> None:
        is_refusal = isinstance(error, ssl.SSLError | KvoltError) and not isinstance(error, ssl.SSLEOFError)
        self.outcomes["refused" if is_refusal else "incomplete"] += 1
        self._num_refused += 1
        if is_logged(self._num_refused):
            reason = _reason(error)
            log.warning("connection refused: peer=%s reason=%s refused=%d", group, reason, self._num_refused)


class _Handshake:
    """One handshake, with a deadline. `on_opened` is called once, unless it is cancelled."""

    def __init__(self, progress: ProgressThread, sock: ssl.SSLSocket, on_opened: OnOpened) -> None:
        self._progress = progress
        self._socket = sock
        self._on_opened = on_opened
        self._is_ended = False
        self._deadline = progress.call_at(progress.now() + HANDSHAKE_S, self._expire)

    def start(self) -> None:
        self._step(0)

    def cancel(self) -> None:
        if self._end():
            self._socket.close()

    def _step(self, events: int) -> None:
        try:
            self._socket.do_handshake()
            _check_identity(self._socket)
        except ssl.SSLWantReadError:
            self._progress.watch(self._socket.fileno(), EVENT_READ, self._step)
        except ssl.SSLWantWriteError:
            self._progress.watch(self._socket.fileno(), EVENT_WRITE, self._step)
        except (OSError, ProtocolError, ValueError) as error:  # ValueError: of a socket that was reset
            self._fail(error)
        else:
            if self._end():
                self._on_opened(self._socket)

    def _expire(self) -> None:
        self._fail(TimeoutError(f"no handshake within {HANDSHAKE_S:g} s"))

    def _fail(self, error: Exception) -> None:
        if self._end():
            self._socket.close()
            self._on_opened(error)

    def _end(self) -> bool:
        if self._is_ended:
            return False
        self._is_ended = True
        self._deadline.cancel()
        self._progress.unwatch(self._socket.fileno())
        return True


def _check_identity(sock: ssl.SSLSocket) -> None:
    """ProtocolError unless the verified peer is a process of kvolt that transfers blocks."""
    identity = identity_of(sock.getpeercert())
    if identity.role not in ROLES:
        raise ProtocolError(f"a {identity.role} may not transfer blocks", rule="identity")


def _connect_error(peer: str, error: Exception) -> ConnectFailed:
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = f"the certificate of {peer} is not of this cluster: {error.verify_message}"
    else:
        problem = f"{peer} did not complete a TLS handshake: {_reason(error)}"
    return ConnectFailed(
        f"{problem}; it may have another --cluster-key, or none", address=peer, remedy=KEY_REMEDY
    )


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return str(error) or "connection closed"
