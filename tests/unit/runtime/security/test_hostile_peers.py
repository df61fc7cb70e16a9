"""The same hostile peers at every TLS listener: none gets in, each is counted, few are logged."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.unit.runtime.security.certificates import AUTHORITY, issued_credentials
from tests.waits import MUST_HAPPEN_S

from kvolt.runtime.clock import SystemClock
from kvolt.runtime.network import Network, split_address
from kvolt.runtime.security.authority import Certificate, ClusterAuthority
from kvolt.runtime.security.credentials import ServerCertificate, tls_context
from kvolt.runtime.security.enrollment import EnrollmentServer
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.runtime.security.secure_network import AdminNetwork, HttpsNetwork, SecureNetwork
from kvolt.transfer.agent import TransferAgent, TransferOptions

LOOPBACK = "127.0.0.1:0"
WORKER = Identity(ProcessRole.WORKER, "a-worker")
DAY_S = 24 * 3600.0


class Listening:
    """A listener: its address, the outcomes of its handshakes and whether a peer got in."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.outcomes: Callable[[], Counter[str]] = Counter
        self.num_admitted: Callable[[], int] = lambda: 0


class Admitted(asyncio.Protocol):
    """Of a peer that got in."""


@asynccontextmanager
async def listening(kind: str, folder: Path) -> AsyncIterator[Listening]:
    if kind == "transfer":
        options = TransferOptions(shared_memory=False)
        agent = TransferAgent(options, credentials=issued_credentials("server", ProcessRole.WORKER))
        listener = Listening(f"{agent.address.host}:{agent.address.port}")
        listener.outcomes = lambda: agent.handshakes
        listener.num_admitted = lambda: len(agent._hub._sessions)
        try:
            yield listener
        finally:
            agent.close()
        return
    outcomes: Counter[str] = Counter()
    admitted: list[Admitted] = []

    def count(outcome: str) -> None:
        outcomes[outcome] += 1

    def admit() -> Admitted:
        admitted.append(Admitted())
        return admitted[-1]

    opened = await network_of(kind, folder, count).listen(LOOPBACK, admit)
    listener = Listening(opened.address)
    listener.outcomes, listener.num_admitted = lambda: outcomes, lambda: len(admitted)
    try:
        yield listener
    finally:
        await opened.close()


def network_of(kind: str, folder: Path, count: Callable[[str], None]) -> Network:
    credentials = issued_credentials("server")
    match kind:
        case "request-plane":
            return SecureNetwork(credentials, count)
        case "join":
            server = EnrollmentServer(lambda: AUTHORITY, SystemClock(), count)
            return SecureNetwork(credentials, count, (LOOPBACK, server))
        case "admin":
            return AdminNetwork(credentials, count)
    issued = AUTHORITY.issue(Identity(ProcessRole.FRONTEND, "edge"), SystemClock().wall())
    paths = [folder / name for name in ("chain", "key", "clients")]
    for path, content in zip(paths, (issued.chain_pem, issued.key_pem, issued.trusted_pem), strict=True):
        path.write_bytes(content)
    return HttpsNetwork(ServerCertificate(*paths), count)


async def until_closed(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(MUST_HAPPEN_S):
        while await reader.read(1 << 16):
            pass


async def send(address: str, data: bytes) -> None:
    reader, writer = await asyncio.open_connection(*split_address(address))
    with suppress(OSError):
        writer.write(data)
        await until_closed(reader)
    writer.transport.abort()


async def present(address: str, certificate: Certificate) -> None:
    """Show a certificate, and any server certificate is fine."""
    context = tls_context(ssl.PROTOCOL_TLS_CLIENT, certificate)
    context.verify_mode = ssl.CERT_NONE
    with suppress(OSError):  # also ssl.SSLError
        reader, writer = await asyncio.open_connection(*split_address(address), ssl=context)
        await until_closed(reader)
        writer.transport.abort()


async def plain_text(address: str) -> None:
    await send(address, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")


async def garbage(address: str) -> None:
    await send(address, bytes(range(256)) * 64)


async def broken_hello(address: str) -> None:
    """A TLS record whose content is none of TLS."""
    await send(address, b"\x16\x03\x01\x40\x00" + bytes(0x4000))


async def wrong_key(address: str) -> None:
    now = SystemClock().wall()
    await present(address, ClusterAuthority.create(now).issue(WORKER, now))


async def expired_certificate(address: str) -> None:
    await present(address, AUTHORITY.issue(WORKER, SystemClock().wall() - 2 * DAY_S, DAY_S))


async def early_certificate(address: str) -> None:
    """Of a clock that is days ahead."""
    await present(address, AUTHORITY.issue(WORKER, SystemClock().wall() + 2 * DAY_S, DAY_S))


@pytest.mark.parametrize("kind", ["request-plane", "join", "admin", "https-with-clients", "transfer"])
@pytest.mark.parametrize(
    "attack",
    [plain_text, garbage, broken_hello, wrong_key, expired_certificate, early_certificate],
    ids=lambda attack: attack.__name__,
)
async def test_hostile_peers_do_not_get_in(
    attack: Callable[[str], asyncio.Future[None]],
    kind: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_attacks = 9
    async with listening(kind, tmp_path) as listener:
        with caplog.at_level(logging.WARNING):
            for _ in range(num_attacks):
                await attack(listener.address)
            async with asyncio.timeout(MUST_HAPPEN_S):
                while listener.outcomes().total() < num_attacks:
                    await asyncio.sleep(0.005)
        assert listener.outcomes() == {"refused": num_attacks}
        assert listener.num_admitted() == 0
    logged = [each for each in caplog.records if "connection refused" in each.getMessage()]
    assert len(logged) == 4, "the 1st, 2nd, 4th and 8th"
