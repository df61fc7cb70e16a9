"""Join tokens are exchanged for certificates at a join server, over real connections."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from kvolt.core.errors import ConfigError, ConnectFailed
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.network import Listener, split_address
from kvolt.runtime.security import enrolled, enrollment
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.credentials import ENROLLMENT_PROTOCOL, Credentials, KeySource, tls_context
from kvolt.runtime.security.enrolled import EnrolledSource, enroll
from kvolt.runtime.security.enrollment import (
    LENGTH,
    EnrollmentServer,
    EnrollRequest,
    Refused,
    Welcome,
    frame,
)
from kvolt.runtime.security.identity import Identity, ProcessRole, peer_identity
from kvolt.runtime.security.join_token import create_token
from kvolt.runtime.security.secure_network import SecureNetwork

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
        self.server = EnrollmentServer(authority, self.clock, self._count)
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


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    lab = Lab(tmp_path, ClusterAuthority.create(SystemClock().wall()))
    await lab.start()
    yield lab
    await lab.close()


async def test_a_token_is_exchanged_for_membership(lab: Lab) -> None:
    credentials = await lab.enroll(lab.token())
    assert await lab.identity_seen(credentials) == WORKER
    assert credentials.event_secrets == lab.authority.event_secrets
    assert credentials.authority is None
    assert lab.outcomes["enrolled"] == 1


async def test_the_second_use_is_refused(lab: Lab) -> None:
    token = lab.token()
    await lab.enroll(token)
    with pytest.raises(ConfigError, match="used before") as caught:
        await lab.enroll(token)
    assert "kvolt cluster token" in str(caught.value.fields["remedy"])
    assert (lab.outcomes["enrolled"], lab.outcomes["not enrolled"]) == (1, 1)


async def test_a_process_whose_response_was_lost_asks_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, losses = enrolled._decode_response, [ConnectFailed("lost", address="")]

    def lossy(body: bytes) -> object:
        if losses:
            raise losses.pop()
        return decode(body)

    monkeypatch.setattr(enrolled, "_decode_response", lossy)
    monkeypatch.setattr(enrolled, "_RETRY_S", 0.01)
    assert await lab.identity_seen(await lab.enroll(lab.token(), timeout_s=10.0)) == WORKER
    assert lab.outcomes["enrolled"] == 2


async def test_an_expired_token_is_refused(lab: Lab) -> None:
    token = lab.token()
    lab.clock.offset_s = 3600
    with pytest.raises(ConfigError, match="expired"):
        await lab.enroll(token)


async def test_a_token_of_another_cluster_is_not_shown_to_the_server(lab: Lab) -> None:
    other = create_token(
        ClusterAuthority.create(SystemClock().wall()), ProcessRole.WORKER, lab.clock.wall(), 600
    )
    with pytest.raises(ConfigError, match="not of the cluster of the join token"):
        await lab.enroll(other.text)
    assert lab.outcomes["not enrolled"] == 0, "the server has got no request"


async def test_the_role_is_the_tokens(lab: Lab) -> None:
    with pytest.raises(ConfigError, match="is for a worker, and this process is a frontend"):
        await lab.enroll(lab.token(), FRONTEND)
    response = await ask(lab, EnrollRequest(signing_request(), "frontend", lab.token()))
    assert isinstance(response, enrollment.Enrolled)
    leaf = x509.load_pem_x509_certificates(response.chain_pem)[0]
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["kvolt://worker/frontend"]


async def test_a_worker_cannot_collect_tokens_as_join_server(tmp_path: Path) -> None:
    lab = Lab(tmp_path, ClusterAuthority.create(SystemClock().wall()))
    await lab.start(Identity(ProcessRole.WORKER, "rogue"))
    with pytest.raises(ConfigError, match="not a frontend or router"):
        await lab.enroll(lab.token())
    assert not lab.outcomes["enrolled"]
    await lab.close()


async def test_a_certificate_renews_its_own_identity_only(lab: Lab) -> None:
    credentials = await lab.enroll(lab.token())
    source = cast(EnrolledSource, credentials._source)
    before = source.load(0.0)
    await source.fetch()
    renewed = source.load(0.0)
    assert renewed.chain_pem != before.chain_pem
    assert renewed.key_pem != before.key_pem
    assert lab.outcomes["renewed"] == 1
    context = tls_context(ssl.PROTOCOL_TLS_CLIENT, renewed)
    response = await ask(lab, EnrollRequest(signing_request(), "other-name"), context)
    assert isinstance(response, enrollment.Enrolled)
    leaf = x509.load_pem_x509_certificates(response.chain_pem)[0]
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == [WORKER.uri]


async def test_renewal_follows_a_rotated_key(lab: Lab) -> None:
    credentials = await lab.enroll(lab.token())
    source = cast(EnrolledSource, credentials._source)
    rotated = lab.authority.rotate(SystemClock().wall())
    lab.path.write_bytes(rotated.to_pem())
    lab.credentials.refresh()
    await source.fetch()
    renewed = Credentials(source, SystemClock())
    assert renewed.event_secrets == rotated.event_secrets
    assert await lab.identity_seen(renewed) == WORKER
    with pytest.raises(ConfigError, match="not of the cluster"):
        await lab.enroll(lab.token())  # of the previous key


async def test_it_is_renewed_at_half_its_lifetime(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvolt.runtime.security.credentials._CHECK_S", 0.01)
    clock = SteppedClock()
    credentials = await lab.enroll(lab.token(), clock=clock)
    expires_at = credentials.expires_at
    renewals: list[float] = []
    credentials.on_renewed(lambda: renewals.append(credentials.expires_at))
    task = asyncio.ensure_future(credentials.keep_fresh())
    await asyncio.sleep(0.1)
    assert lab.outcomes["renewed"] == 0
    lab.clock.offset_s = clock.offset_s = 13 * 3600
    async with asyncio.timeout(10):
        while not renewals:
            await asyncio.sleep(0.01)
    task.cancel()
    assert renewals[0] > expires_at


async def test_a_failed_renewal_keeps_the_certificate(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    clock = SteppedClock()
    credentials = await lab.enroll(lab.token(), clock=clock)
    expires_at = credentials.expires_at
    await lab.close()
    await cast(EnrolledSource, credentials._source).fetch()
    clock.offset_s = 13 * 3600
    for _ in range(3):
        credentials.refresh()
    assert credentials.expires_at == expires_at
    assert sum("certificate not renewed" in each.getMessage() for each in caplog.records) == 1


@pytest.mark.parametrize("offset_s", [-500.0, 12 * 3600.0])
async def test_clocks_of_the_machines_may_differ(lab: Lab, offset_s: float) -> None:
    clock = SteppedClock()
    clock.offset_s = offset_s
    await lab.enroll(lab.token(), clock=clock)


@pytest.mark.parametrize("offset_s", [-3600.0, 48 * 3600.0])
async def test_a_wrong_clock_is_named_as_the_cause(lab: Lab, offset_s: float) -> None:
    clock = SteppedClock()
    clock.offset_s = offset_s
    with pytest.raises(ConfigError, match="check the clocks"):
        await lab.enroll(lab.token(), clock=clock)


async def test_a_server_that_is_not_there_is_retried_until_the_timeout(lab: Lab) -> None:
    await lab.close()
    with pytest.raises(ConfigError, match="no certificate from") as caught:
        await lab.enroll(lab.token())
    assert "--discovery-join-listen" in str(caught.value.fields["remedy"])


# --- strangers


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


@pytest.mark.parametrize("protocols", [(), ("h2",), ("kvolt-enroll/2",)])
async def test_a_stranger_reaches_no_endpoint(lab: Lab, protocols: tuple[str, ...]) -> None:
    assert await exchange(lab, b"hello", stranger(*protocols)) == b""
    assert not lab.served
    assert lab.outcomes["refused"] == 1


async def test_other_listeners_serve_no_enrollment(lab: Lab) -> None:
    network = SecureNetwork(lab.credentials, enrollment=("127.0.0.2:1", lab.server))
    listener = await network.listen("127.0.0.1:0", lambda: Peer(lab.served))
    lab.address = listener.address
    assert await exchange(lab, frame(EnrollRequest(signing_request(), "a", lab.token()))) == b""
    assert not lab.served
    assert not lab.outcomes["enrolled"]
    await listener.close()


def large() -> bytes:
    return EnrollRequest(b"x" * 5000, "a", "t").signing_request


@pytest.mark.parametrize(
    ("request_of", "reason"),
    [
        (lambda token: EnrollRequest(signing_request(), "a"), "neither a join token nor a certificate"),
        (lambda token: EnrollRequest(signing_request(), "a", "kvolt-join-x"), "not one of this version"),
        (lambda token: EnrollRequest(b"garbage", "a", token), "malformed signing request"),
        (lambda token: EnrollRequest(large(), "a", token), "malformed request"),
        (lambda token: EnrollRequest(signing_request(), "a" * 200, token), "malformed request"),
        (
            lambda token: EnrollRequest(signing_request(ec.generate_private_key(ec.SECP384R1())), "a", token),
            "not of the curve",
        ),
        (
            lambda token: EnrollRequest(signing_request(ed25519.Ed25519PrivateKey.generate()), "a", token),
            "not of the curve",
        ),
        (lambda token: EnrollRequest(signing_request()[:-1] + b"\0", "a", token), "signing request"),
        (lambda token: EnrollRequest(signing_request(), "a", token[:30] + "AAAA" + token[34:]), ""),
    ],
)
async def test_bad_requests_are_refused_and_do_not_use_the_token(
    lab: Lab, request_of: Callable[[str], EnrollRequest], reason: str
) -> None:
    token = lab.token()
    response = await ask(lab, request_of(token))
    assert isinstance(response, Refused)
    assert reason in response.reason
    assert lab.outcomes["not enrolled"] == 1
    await lab.enroll(token)


@pytest.mark.parametrize(
    "data",
    [
        LENGTH.pack(1 << 30),
        LENGTH.pack(3) + b"\xc1\xc1\xc1",
        LENGTH.pack(2) + b"x" * 100_000,
        b"\xff" * 50_000,
    ],
)
async def test_garbage_is_refused(lab: Lab, data: bytes) -> None:
    await exchange(lab, data)
    async with asyncio.timeout(10):
        while not lab.outcomes["not enrolled"]:
            await asyncio.sleep(0.01)
    await lab.enroll(lab.token())


async def test_a_silent_stranger_is_disconnected(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrollment, "CONNECTION_S", 0.2)
    received = await exchange(lab, b"")
    assert len(received) < 2000
    assert not lab.server._connections


async def test_the_number_of_strangers_is_limited(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(enrollment, "MAX_CONNECTIONS_PER_PEER", 3)
    writers = []
    for _ in range(8):
        _, writer = await asyncio.open_connection(
            *split_address(lab.address), ssl=stranger(ENROLLMENT_PROTOCOL)
        )
        writers.append(writer)
    async with asyncio.timeout(10):
        while lab.outcomes["not enrolled"] < 5:
            await asyncio.sleep(0.01)
    assert len(lab.server._open) == 3
    assert sum("enrollment refused" in each.getMessage() for each in caplog.records) == 3, "1st, 2nd, 4th"
    for writer in writers:
        writer.transport.abort()
    async with asyncio.timeout(10):
        while lab.server._open:
            await asyncio.sleep(0.01)
    await lab.enroll(lab.token())


async def test_used_tokens_are_bounded_and_forgotten_after_their_expiry(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrollment, "MAX_USED_TOKENS", 2)
    for _ in range(2):
        await lab.enroll(lab.token())
    with pytest.raises(ConfigError, match="too many join tokens"):
        await lab.enroll(lab.token())
    lab.clock.offset_s = 3600
    await lab.enroll(lab.token())
    assert len(lab.server._used) == 1
