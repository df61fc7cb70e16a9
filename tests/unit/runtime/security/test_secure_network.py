"""Mutual TLS between processes: who is let in, and what strangers cost."""

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import uvloop

from kvolt.core.errors import ConnectFailed
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.network import SocketNetwork, split_address
from kvolt.runtime.security import tls_listener
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.credentials import Credentials, FileSource, KeySource
from kvolt.runtime.security.identity import Identity, ProcessRole, peer_identity
from kvolt.runtime.security.secure_network import SecureNetwork

WORKER = Identity(ProcessRole.WORKER, "worker-0")
FRONTEND = Identity(ProcessRole.FRONTEND, "frontend")


class Peer(asyncio.Protocol):
    """Collects what it gets; echoes it if it is a server's."""

    def __init__(self, echoes: bool = False) -> None:
        self.echoes = echoes
        self.received = b""
        self.identity: Identity | None = None
        self.changed = asyncio.Event()
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if transport.get_extra_info("peercert"):
            self.identity = peer_identity(transport)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.changed.set()
        if self.echoes:
            self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


def credentials(folder: Path, authority: ClusterAuthority, identity: Identity) -> Credentials:
    path = folder / f"{identity.process}-{authority.fingerprint}.key"
    path.touch(0o600)
    path.write_bytes(authority.to_pem())
    return Credentials(KeySource(path, identity), SystemClock())


@pytest.fixture
def authority() -> ClusterAuthority:
    return ClusterAuthority.create(SystemClock().wall())


class Lab:
    def __init__(self, folder: Path, authority: ClusterAuthority) -> None:
        self.folder = folder
        self.authority = authority
        self.outcomes: Counter[str] = Counter()
        self.served: list[Peer] = []
        self.address = ""

    @asynccontextmanager
    async def server(self) -> AsyncIterator[None]:
        def serve() -> Peer:
            self.served.append(Peer(echoes=True))
            return self.served[-1]

        def count(outcome: str) -> None:
            self.outcomes[outcome] += 1

        network = SecureNetwork(credentials(self.folder, self.authority, WORKER), count)
        listener = await network.listen("127.0.0.1:0", serve)
        self.address = listener.address
        try:
            yield
        finally:
            await listener.close()
            for peer in self.served:
                peer.transport.abort()

    async def connect(self, authority: ClusterAuthority, identity: Identity = FRONTEND) -> Peer:
        network = SecureNetwork(credentials(self.folder, authority, identity))
        peer = await network.connect(self.address, Peer, 20.0)
        assert isinstance(peer, Peer)
        return peer

    async def until(self, outcome: str, number: int = 1) -> None:
        async with asyncio.timeout(20):
            while self.outcomes[outcome] < number:
                await asyncio.sleep(0.01)


@pytest.fixture
async def lab(tmp_path: Path, authority: ClusterAuthority) -> AsyncIterator[Lab]:
    lab = Lab(tmp_path, authority)
    async with lab.server():
        yield lab


async def echoed(peer: Peer, data: bytes) -> bytes:
    peer.transport.write(data)
    async with asyncio.timeout(20):
        while len(peer.received) < len(data):
            peer.changed.clear()
            await peer.changed.wait()
    return peer.received


async def test_both_ends_know_each_other(lab: Lab) -> None:
    peer = await lab.connect(lab.authority)
    assert await echoed(peer, b"hello" * 100_000) == b"hello" * 100_000
    assert (peer.identity, lab.served[0].identity) == (WORKER, FRONTEND)
    assert lab.outcomes == {"accepted": 1}
    peer.transport.abort()


async def test_another_cluster_is_refused(lab: Lab) -> None:
    with pytest.raises(ConnectFailed, match="not of this cluster") as caught:
        await lab.connect(ClusterAuthority.create(SystemClock().wall()))
    assert "--cluster-key" in caught.value.fields["remedy"]
    await lab.until("incomplete")
    assert not lab.served


async def test_a_client_without_a_certificate_reaches_no_protocol(lab: Lab) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = split_address(lab.address)
    _, peer = await asyncio.get_running_loop().create_connection(Peer, host, port, ssl=context)
    await peer.lost.wait()
    await lab.until("refused")
    assert not lab.served


async def test_plain_text_is_refused(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(8):
        peer = await SocketNetwork().connect(lab.address, Peer, 20.0)
        assert isinstance(peer, Peer)
        peer.transport.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
        await peer.lost.wait()
    await lab.until("refused", 8)
    assert not lab.served
    assert len([each for each in caplog.records if "connection refused" in each.message]) == 4, (
        "1st, 2nd, 4th, 8th"
    )


async def test_a_server_without_tls_is_named_as_the_cause(
    tmp_path: Path, authority: ClusterAuthority
) -> None:
    listener = await SocketNetwork().listen("127.0.0.1:0", lambda: Peer(echoes=True))
    network = SecureNetwork(credentials(tmp_path, authority, FRONTEND))
    with pytest.raises(ConnectFailed, match="did not complete a TLS handshake"):
        await network.connect(listener.address, Peer, 20.0)
    await listener.close()


async def test_a_handshake_that_does_not_go_on_ends(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_S", 0.3)
    peer = await SocketNetwork().connect(lab.address, Peer, 20.0)
    assert isinstance(peer, Peer)
    await peer.lost.wait()
    await lab.until("incomplete")
    assert not lab.served


async def test_incomplete_handshakes_are_limited_and_others_get_in_afterwards(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_listener, "MAX_HANDSHAKES_PER_PEER", 5)
    monkeypatch.setattr(tls_listener, "MAX_WAITING_PER_PEER", 3)
    host, port = split_address(lab.address)
    strangers = [socket.create_connection((host, port)) for _ in range(30)]
    try:
        await lab.until("limit", 22)
        assert lab.outcomes["limit"] == 22
    finally:
        for each in strangers:
            each.close()
    await lab.until("incomplete", 8)
    peer = await lab.connect(lab.authority)
    assert await echoed(peer, b"x") == b"x"
    peer.transport.abort()


async def test_failed_handshakes_keep_their_places_for_a_while(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an address cannot make a process compute handshakes as fast as it connects."""
    monkeypatch.setattr(tls_listener, "MAX_HANDSHAKES_PER_PEER", 2)
    monkeypatch.setattr(tls_listener, "FAILED_S", 3600.0)
    monkeypatch.setattr(tls_listener, "_WAIT_S", 0.5)
    for _ in range(2):
        with socket.create_connection(split_address(lab.address)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            await lab.until("refused", 1)
    await lab.until("refused", 2)
    with socket.create_connection(split_address(lab.address)):
        await lab.until("incomplete")
    assert lab.outcomes == {"refused": 2, "incomplete": 1}


@pytest.mark.parametrize("limit", ["MAX_HANDSHAKES", "MAX_HANDSHAKES_PER_PEER"])
async def test_clients_that_connect_together_wait_for_their_handshakes(
    tmp_path: Path, authority: ClusterAuthority, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(tls_listener, limit, 4)
    lab = Lab(tmp_path, authority)
    async with lab.server():
        network = SecureNetwork(credentials(tmp_path, authority, FRONTEND))
        peers = await asyncio.gather(*(network.connect(lab.address, Peer, 20.0) for _ in range(40)))
        assert lab.outcomes == {"accepted": 40}
        for peer in peers:
            assert isinstance(peer, Peer)
            peer.transport.abort()


def test_a_listener_that_closes_closes_connections_without_a_handshake(
    tmp_path: Path,
    authority: ClusterAuthority,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.setattr(tls_listener, "MAX_HANDSHAKES_PER_PEER", 15)

    async def close_early() -> None:
        network = SecureNetwork(credentials(tmp_path, authority, WORKER))
        for num_turns in range(8):  # some have no task yet, others one that has not begun or waits
            listener = await network.listen("127.0.0.1:0", Peer)
            strangers = [socket.create_connection(split_address(listener.address)) for _ in range(20)]
            for _ in range(num_turns):
                await asyncio.sleep(0)
            await listener.close()
            for each in strangers:
                each.settimeout(20)
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.to_thread(each.recv, 1) == b""
                each.close()

    uvloop.run(close_early())
    assert not [each for each in recwarn if each.category is ResourceWarning]


async def test_keys_are_rotated_machine_by_machine(lab: Lab) -> None:
    """A process with the new file and one with the old file accept each other, in both directions."""
    rotated = lab.authority.rotate(SystemClock().wall())
    peer = await lab.connect(rotated)
    assert await echoed(peer, b"new to old") == b"new to old"
    other = Lab(lab.folder, rotated)
    async with other.server():
        back = await other.connect(lab.authority)
        assert await echoed(back, b"old to new") == b"old to new"
        back.transport.abort()
    peer.transport.abort()


async def test_two_rotations_end_what_the_first_key_allows(lab: Lab) -> None:
    now = SystemClock().wall()
    newest = lab.authority.rotate(now).rotate(now)
    other = Lab(lab.folder, newest)
    async with other.server():
        with pytest.raises(ConnectFailed, match="not of this cluster"):
            await other.connect(lab.authority)
        await other.until("incomplete")
        assert not other.served


async def test_an_expired_certificate_is_refused(lab: Lab, tmp_path: Path) -> None:
    now = SystemClock().wall()
    issued = lab.authority.issue(FRONTEND, now, lifetime_s=3600)
    for name, content in (("chain", issued.chain_pem), ("key", issued.key_pem), ("ca", issued.trusted_pem)):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_bytes(content)
    source = FileSource(tmp_path / "chain", tmp_path / "key", tmp_path / "ca")
    live = Credentials(source, SystemClock())
    expired = lab.authority.issue(FRONTEND, now - 7200, lifetime_s=3600)
    (tmp_path / "chain").write_bytes(expired.chain_pem)
    (tmp_path / "key").write_bytes(expired.key_pem)
    live.reload()
    peer = await SecureNetwork(live).connect(lab.address, Peer, 20.0)
    assert isinstance(peer, Peer), "an expired replacement is not used"
    peer.transport.abort()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(cadata=issued.trusted_pem.decode())
    (tmp_path / "both").write_bytes(expired.chain_pem + expired.key_pem)
    context.load_cert_chain(tmp_path / "both")
    host, port = split_address(lab.address)
    _, old = await asyncio.get_running_loop().create_connection(Peer, host, port, ssl=context)
    await old.lost.wait()
    await lab.until("refused")
