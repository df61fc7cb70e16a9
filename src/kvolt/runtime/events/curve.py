"""CURVE of the `zmq` event plane: who may subscribe, and which publishers a subscriber trusts.

    publisher    key pair of its own, new at each start; its public key is in its registration in discovery
    subscriber   key pair derived from the first event secret, which all processes of the cluster know

A publisher accepts subscribers whose key derives from any of its event secrets, so that secrets can be replaced machine
by machine. Only processes of the cluster can register, so a publisher's public key is authentic.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import zmq
from zmq.utils import z85

log = logging.getLogger(__name__)

OVERHEAD_BYTES = 128
"""Bound of what encryption adds to a message part."""
_HANDSHAKE_MS = 5_000
"""Timeout of a handshake, and how long a refused subscriber waits before it tries again."""
_DOMAIN = b"kvolt"
_ENDPOINT = "inproc://zeromq.zap.01"
_REQUESTS_PER_TURN = 64
_MAX_REQUEST_BYTES = 4096


class EventSecrets(Protocol):
    """Where the event plane gets its secrets (`security.credentials.Credentials`)."""

    @property
    def event_secrets(self) -> tuple[bytes, ...]:
        """Subscribers use the first; publishers accept all."""
        ...

    def on_renewed(self, listener: Callable[[], None]) -> None: ...


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, in Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def create(cls) -> KeyPair:
        return cls(*zmq.curve_keypair())

    @classmethod
    def of_secret(cls, secret: bytes) -> KeyPair:
        """The key pair of subscribers that have the event secret."""
        key = z85.encode(hashlib.blake2b(secret, digest_size=32, person=b"kvolt-subscribe").digest())
        return cls(zmq.curve_public(key), key)


def secure_publisher(socket: zmq.Socket[bytes], keys: KeyPair) -> None:
    """Options of a socket before it is bound. Subscribers need the approval of an `Authenticator`."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
    # By default zmq accepts all keys while no authenticator answers.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def secure_connections(socket: zmq.Socket[bytes], keys: KeyPair, publisher_key: str) -> None:
    """Options of a socket for its next connections. Raises ZMQError if the publisher's key is malformed."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, publisher_key.encode())
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


class Authenticator:
    """Answers zmq's question whether a subscriber's key is accepted (ZAP, RFC 27), for all sockets of a context.

    Created before the first publisher's socket, closed after the last. A connection asks once and waits, so there are
    at most as many requests as incomplete handshakes.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secrets: Sequence[bytes],
        count_refused: Callable[[], None],
    ) -> None:
        self._count_refused = count_refused
        self._num_refused = 0
        self._next_drain: asyncio.Handle | None = None
        self._loop = asyncio.get_running_loop()
        self.accept(secrets)
        self._socket = context.socket(zmq.REP)
        try:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
            self._socket.bind(_ENDPOINT)
            self._descriptor = self._socket.fileno()
            self._loop.add_reader(self._descriptor, self._drain)
        except BaseException:
            self._socket.close(linger=0)
            raise

    def accept(self, secrets: Sequence[bytes]) -> None:
        """Accept subscribers that have one of these secrets. Existing connections continue."""
        self._accepted = frozenset(z85.decode(KeyPair.of_secret(each).public) for each in secrets)

    def close(self) -> None:
        if self._next_drain is not None:
            self._next_drain.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)

    def _drain(self) -> None:
        if self._next_drain is not None:
            self._next_drain.cancel()
            self._next_drain = None
        for _ in range(_REQUESTS_PER_TURN):
            try:
                request = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._socket.send_multipart(self._reply(request), zmq.NOBLOCK)
        self._next_drain = self._loop.call_soon(self._drain)

    def _reply(self, request: Sequence[bytes]) -> list[bytes]:
        """`request`: version, request id, domain, address, identity, mechanism, key."""
        version, request_id, _, address = [*request, b"", b"", b"", b""][:4]
        if len(request) == 7 and request[5] == b"CURVE" and request[6] in self._accepted:
            return [version, request_id, b"200", b"OK", b"", b""]
        self._refuse(address.decode(errors="replace"))
        # 400 would make zmq drop the connection for ever; after 300 the handshake times out, and the subscriber tries
        # again: this process may be about to read the key that it misses.
        return [version, request_id, b"300", b"unknown key", b"", b""]

    def _refuse(self, address: str) -> None:
        self._count_refused()
        self._num_refused += 1
        if self._num_refused & (self._num_refused - 1) == 0:  # the 1st, 2nd, 4th ...: subscribers try again
            log.warning(
                "event subscriber refused: address=%.100s reason=unknown key refused=%d",
                address,
                self._num_refused,
            )
