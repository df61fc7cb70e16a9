"""What peers without a certificate can do on a join port: ask for one, with a token."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from tests.unit.runtime.security.enrollment_lab import (
    Lab,
    Peer,
    ask,
    exchange,
    signing_request,
    stranger,
)

from kvolt.core.errors import ConfigError
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.network import split_address
from kvolt.runtime.security import enrollment, tls_listener, used_tokens
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.credentials import ENROLLMENT_PROTOCOL
from kvolt.runtime.security.enrollment import (
    LENGTH,
    EnrollRequest,
    Refused,
    frame,
)
from kvolt.runtime.security.identity import ProcessRole
from kvolt.runtime.security.join_token import create_token
from kvolt.runtime.security.secure_network import SecureNetwork


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    lab = Lab(tmp_path, ClusterAuthority.create(SystemClock().wall()))
    await lab.start()
    yield lab
    await lab.close()


@pytest.mark.parametrize("protocols", [(), ("h2",), ("kvolt-enroll/2",)])
async def test_a_stranger_reaches_no_endpoint(lab: Lab, protocols: tuple[str, ...]) -> None:
    assert await exchange(lab, b"hello", stranger(*protocols)) == b""
    assert not lab.served
    assert lab.outcomes["refused"] == 1


async def test_handshakes_of_strangers_keep_their_places_for_a_while(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever asks for enrollment could make a process compute handshakes as fast as it connects."""
    monkeypatch.setattr(tls_listener, "MAX_HANDSHAKES_PER_PEER", 2)
    monkeypatch.setattr(tls_listener, "FAILED_S", 3600.0)
    monkeypatch.setattr(tls_listener, "_WAIT_S", 0.5)
    for _ in range(2):
        with pytest.raises(ConfigError):
            await lab.enroll(create_token(lab.authority, ProcessRole.WORKER, 0.0, 600).text)
    with pytest.raises((ConnectionError, ssl.SSLError)):  # the connection is closed before its handshake
        await exchange(lab, b"", stranger(ENROLLMENT_PROTOCOL))
    assert (lab.outcomes["accepted"], lab.outcomes["incomplete"]) == (2, 1)


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
    assert lab.outcomes["enrollment_refused"] == 1
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
        while not lab.outcomes["enrollment_refused"]:
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
        while lab.outcomes["enrollment_refused"] < 5:
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
    monkeypatch.setattr(used_tokens, "MAX_USED_TOKENS", 2)
    for _ in range(2):
        await lab.enroll(lab.token())
    with pytest.raises(ConfigError, match="too many join tokens"):
        await lab.enroll(lab.token())
    lab.clock.offset_s = 3600
    await lab.enroll(lab.token())
    assert len(lab.server._used._tokens) == 1
