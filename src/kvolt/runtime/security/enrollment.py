"""Enrollment: a join server issues certificates to processes without the cluster key.

A protocol of its own on the join port, chosen by ALPN, so that a peer without a certificate reaches neither the request
plane nor any endpoint:

    server -> Welcome          certificate of the authority, whose fingerprint the join token has
    client -> EnrollRequest    signing request, with a join token or over a connection with its present certificate
    server -> Enrolled         certificate, trusted certificates
              Refused          reason

A token is for one private key: the process may repeat its request if the response was lost, and any other use is
refused. The name in the certificate ends with part of the token's id, so a process cannot take the name of another.
A process with a certificate renews its own identity only. A connection has one request and few seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from struct import Struct as Packing
from typing import Annotated, Any, cast

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from msgspec import Meta

from kvolt.core.errors import AccessDenied, ConfigError, ProtocolError
from kvolt.runtime.clock import Clock
from kvolt.runtime.logs import is_logged
from kvolt.runtime.network import join_address, peer_group
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.identity import Identity, ProcessRole, peer_identity
from kvolt.runtime.security.join_token import CLOCK_SKEW_S, JoinToken, check_token, parse_token
from kvolt.runtime.security.tls_listener import StrangerProtocol
from kvolt.runtime.security.used_tokens import UsedToken, UsedTokens
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 8 * 1024
MAX_RESPONSE_BYTES = 64 * 1024
CONNECTION_S = 10.0
"""Lifetime of a connection."""
MAX_CONNECTIONS = 64
MAX_CONNECTIONS_PER_PEER = 16
"""The same of one peer address (IPv6: of a /64)."""
LENGTH = Packing("<I")
_MAX_NAME_CHARS = 64
SERVER_ROLES = (ProcessRole.FRONTEND, ProcessRole.ROUTER)
"""Roles of join servers that enroll: a worker must not collect the tokens of others."""


class Welcome(msgspec.Struct, frozen=True):
    authority: bytes
    """Certificate of the authority, DER."""


class EnrollRequest(msgspec.Struct, frozen=True):
    signing_request: Annotated[bytes, Meta(max_length=4096)]
    """PKCS #10, DER; only its key is used."""
    process: Annotated[str, Meta(max_length=128)]
    token: Annotated[str, Meta(max_length=512)] | None = None
    """None: renew the certificate of this connection."""


class Enrolled(msgspec.Struct, frozen=True, tag="enrolled"):
    chain_pem: bytes
    trusted_pem: bytes
    expires_at: float


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str


EnrollResponse = Enrolled | Refused


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


class EnrollmentServer:
    """Issues certificates. `authority` returns the present cluster key."""

    def __init__(
        self,
        authority: Callable[[], ClusterAuthority],
        clock: Clock,
        count_outcome: Callable[[str], None] = lambda outcome: None,
        used_tokens: UsedTokens | None = None,
    ) -> None:
        """`count_outcome` gets `enrolled`, `renewed` or `enrollment_refused` for each request or connection."""
        self._authority = authority
        self._clock = clock
        self._count_outcome = count_outcome
        self._used = used_tokens or UsedTokens()
        self._connections: Counter[str] = Counter()
        self._open: set[asyncio.Transport] = set()
        self._num_refused = 0
        self._task_group = TaskGroup("enrollment")

    def accept(self) -> asyncio.Protocol:
        """Protocol of a connection that asks for enrollment."""
        return _EnrollmentConnection(self)

    def welcome(self) -> Welcome:
        return Welcome(self._authority().certificate_der)

    async def close(self) -> None:
        """End all connections."""
        for transport in self._open:
            transport.abort()
        await self._task_group.close()

    def start(self, response: Coroutine[Any, Any, None]) -> None:
        """Run the response of a connection."""
        self._task_group.start(response, "respond")

    def admit(self, transport: asyncio.Transport, group: str) -> bool:
        """Count a connection of a peer group; False if there are too many."""
        if len(self._open) >= MAX_CONNECTIONS or self._connections[group] >= MAX_CONNECTIONS_PER_PEER:
            return False
        self._open.add(transport)
        self._connections[group] += 1
        return True

    def leave(self, transport: asyncio.Transport, group: str) -> None:
        self._open.discard(transport)
        self._connections[group] -= 1
        if not self._connections[group]:
            del self._connections[group]

    async def respond(self, body: bytes, peer: Identity | None, address: str) -> EnrollResponse:
        """`peer`: identity in the certificate of the connection, if it has one."""
        try:
            request = msgspec.msgpack.decode(body, type=EnrollRequest)
            response = await self._issue(request, peer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self.refuse(address, "malformed request")
        except (AccessDenied, ConfigError) as error:
            return self.refuse(address, error.message)
        return response

    def refuse(self, address: str, reason: str) -> Refused:
        self._count_outcome("enrollment_refused")
        self._num_refused += 1
        if is_logged(self._num_refused):
            log.warning(
                "enrollment refused: peer=%s reason=%s refused=%d", address, reason, self._num_refused
            )
        return Refused(reason)

    async def _issue(self, request: EnrollRequest, peer: Identity | None) -> Enrolled:
        now, authority = self._clock.wall(), self._authority()
        if request.token is None:
            if peer is None:
                raise AccessDenied("neither a join token nor a certificate")
            key, identity = _requested_key(request), peer
        else:
            token = parse_token(request.token)
            check_token(authority, token, now)
            key, identity = _requested_key(request), enrolled_identity(token, request.process)
            await self._used.use(UsedToken(token.id, token.expires_at + CLOCK_SKEW_S, _key_hash(key)), now)
        certificate = authority.sign(key, identity, now)
        self._count_outcome("renewed" if request.token is None else "enrolled")
        log.info("certificate issued: identity=%s renewed=%s", identity.uri, request.token is None)
        return Enrolled(certificate.chain_pem, certificate.trusted_pem, certificate.expires_at)


class _EnrollmentConnection(StrangerProtocol):
    """One request and its response."""

    def __init__(self, server: EnrollmentServer) -> None:
        self._server = server
        self._received = bytearray()
        self._is_answered = False
        self._group: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peername = transport.get_extra_info("peername")
        self._address = join_address(*peername[:2])
        group = peer_group(str(peername[0]))
        if not self._server.admit(self._transport, group):
            self._server.refuse(self._address, "too many connections")
            self._transport.abort()
            return
        self._group = group
        self._timer = asyncio.get_running_loop().call_later(CONNECTION_S, self._transport.abort)
        self._transport.write(frame(self._server.welcome()))

    def data_received(self, data: bytes) -> None:
        if self._is_answered or self._group is None:
            return
        self._received += data
        if len(self._received) < LENGTH.size:
            return
        (size,) = LENGTH.unpack_from(self._received)
        if size > MAX_REQUEST_BYTES or len(self._received) > LENGTH.size + size:
            self._answer(self._server.refuse(self._address, "the request is too large"))
        elif len(self._received) == LENGTH.size + size:
            self._is_answered = True
            self._server.start(self._respond(bytes(self._received[LENGTH.size :])))

    async def _respond(self, body: bytes) -> None:
        try:
            peer = peer_identity(self._transport)
        except ProtocolError as error:
            self._answer(self._server.refuse(self._address, error.message))
        else:
            self._answer(await self._server.respond(body, peer, self._address))

    def _answer(self, response: EnrollResponse) -> None:
        self._is_answered = True
        self._received.clear()
        if self._transport.is_closing():
            return
        self._transport.write(frame(response))
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._group is not None:
            self._server.leave(self._transport, self._group)


def enrolled_identity(token: JoinToken, process: str) -> Identity:
    """Identity of a process with this name and token: no other token gives the same."""
    name = Identity.of(token.role, process).process[:_MAX_NAME_CHARS]
    return Identity(token.role, f"{name}.{token.id[:8].hex()}")


def _key_hash(key: ec.EllipticCurvePublicKey) -> bytes:
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).digest()


def _requested_key(request: EnrollRequest) -> ec.EllipticCurvePublicKey:
    """The key of a signing request, whose sender has proven that it holds the private key."""
    try:
        signing_request = x509.load_der_x509_csr(request.signing_request)
        key = signing_request.public_key()
        is_valid = signing_request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        raise AccessDenied("malformed signing request") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise AccessDenied("the key of the signing request is not of the curve P-256")
    if not is_valid:
        raise AccessDenied("the signing request is not signed by its key")
    return key
