"""A join server that enrolls, and peers of it, for tests."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from kvolt.runtime.clock import SystemClock, ThreadBlocking
from kvolt.runtime.network import Listener, split_address
from kvolt.runtime.security import enrollment
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.credentials import ENROLLMENT_PROTOCOL, Credentials, KeySource
from kvolt.runtime.security.enrolled import enroll
from kvolt.runtime.security.enrollment import (
    LENGTH,
    EnrollmentServer,
    EnrollRequest,
    Refused,
    Welcome,
    enrolled_identity,
    frame,
)
from kvolt.runtime.security.identity import Identity, ProcessRole, peer_identity
from kvolt.runtime.security.join_token import create_token, parse_token
from kvolt.runtime.security.secure_network import SecureNetwork
from kvolt.runtime.security.used_tokens import UsedTokens

WORKER = Identity(ProcessRole.WORKER, "worker-0")
FRONTEND = Identity(ProcessRole.FRONTEND, "frontend")


class SteppedClock(SystemClock):
    """Wall clock that a test moves."""

    offset_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.offset_s


class Peer(asyncio.Protocol):
    """Protocol of the request plane in these tests."""

    def __init__(self, served: list[Identity | None]) -> None:
        self._served = served

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._served.append(peer_identity(transport))


class Lab:
    """A join server."""

    def __init__(self, folder: Path, authority: ClusterAuthority) -> None:
        self.path = folder / "kvolt.key"
        self.path.touch(0o600)
        self.authority = authority
        self.clock = SteppedClock()
        self.blocking = ThreadBlocking()
        self.outcomes: Counter[str] = Counter()
        self.served: list[Identity | None] = []
        self.address = ""
        self._listener: Listener | None = None
        self._peers: list[Peer] = []

    def _count(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    async def start(self, identity: Identity = FRONTEND) -> None:
        self.path.write_bytes(self.authority.to_pem())
        credentials = self.credentials = Credentials(KeySource(self.path, identity), self.clock)
        authority = cast(Callable[[], ClusterAuthority], lambda: credentials.authority)
        used_tokens = UsedTokens(self.path, self.blocking)
        self.server = EnrollmentServer(authority, self.clock, self._count, used_tokens)
        network = SecureNetwork(credentials, self._count, ("127.0.0.1:0", self.server))
        self._listener = await network.listen("127.0.0.1:0", self._serve)
        self.address = self._listener.address

    def _serve(self) -> Peer:
        self._peers.append(Peer(self.served))
        return self._peers[-1]

    async def close(self) -> None:
        if self._listener is not None:
            await self._listener.close()
        for peer in self._peers:
            peer.transport.abort()
        self.blocking.close()
        await asyncio.sleep(0.01)

    def token(self, role: ProcessRole = ProcessRole.WORKER, ttl_s: float = 600.0) -> str:
        return create_token(self.authority, role, self.clock.wall(), ttl_s).text

    async def enroll(
        self,
        token: str,
        identity: Identity = WORKER,
        clock: SystemClock | None = None,
        timeout_s: float = 0.0,
    ) -> Credentials:
        return await enroll(self.address, token, identity, clock or SystemClock(), timeout_s)

    async def identity_seen(self, credentials: Credentials) -> Identity | None:
        """Who a process with these credentials is to the join server's request plane."""
        known = len(self.served)
        peer = await SecureNetwork(credentials).connect(self.address, lambda: Peer([]), 10.0)
        async with asyncio.timeout(10):
            while len(self.served) == known:
                await asyncio.sleep(0.01)
        cast(Peer, peer).transport.abort()
        return self.served[-1]


def enrolled_worker(token: str) -> Identity:
    """Identity of WORKER with a certificate for this token."""
    return enrolled_identity(parse_token(token), WORKER.process)


def signing_request(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | None = None) -> bytes:
    key = key or ec.generate_private_key(ec.SECP256R1())
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, algorithm)
    return request.public_bytes(serialization.Encoding.DER)


def stranger(*protocols: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


async def exchange(lab: Lab, data: bytes, context: ssl.SSLContext | None = None) -> bytes:
    """What the join server sends to a peer that sends this."""
    context = context or stranger(ENROLLMENT_PROTOCOL)
    reader, writer = await asyncio.open_connection(*split_address(lab.address), ssl=context)
    try:
        writer.write(data)
        async with asyncio.timeout(10):
            return await reader.read()
    except (ConnectionError, ssl.SSLError):
        return b""
    finally:
        writer.transport.abort()


async def ask(
    lab: Lab, request: EnrollRequest, context: ssl.SSLContext | None = None
) -> enrollment.Enrolled | Refused:
    if context is not None:
        context.set_alpn_protocols([ENROLLMENT_PROTOCOL])
    received = await exchange(lab, frame(request), context)
    (size,) = LENGTH.unpack_from(received)
    welcome = msgspec.msgpack.decode(received[LENGTH.size : LENGTH.size + size], type=Welcome)
    assert hashlib.sha256(welcome.authority).hexdigest()[:16] == lab.authority.fingerprint
    body = received[2 * LENGTH.size + size :]
    return msgspec.msgpack.decode(body, type=enrollment.Enrolled | Refused)  # type: ignore[arg-type]
