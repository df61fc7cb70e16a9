"""TLS between agents: blocks of all sizes arrive, strangers do not get in and cost little, certificates are renewed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from tests.unit.transfer import tls_lab
from tests.unit.transfer.hostile_lab import SOON_S, Source

from kvolt.core.block_key import KvLayout
from kvolt.core.errors import Cancelled, ConnectFailed, NetworkFault, NotFound
from kvolt.core.request import reader_proof
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.credentials import Credentials
from kvolt.runtime.security.identity import ProcessRole
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.memory.layout import SlabLayout
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.peer import handshakes
from kvolt.transfer.peer.handshakes import TlsContexts
from kvolt.transfer.reads.wire import bind_ticket, decode_ticket, encode_ticket

OVER_TCP = TransferOptions(shared_memory=False)
BLOCK = 4096


def agent_of(contexts: TlsContexts | None) -> TransferAgent:
    return TransferAgent(OVER_TCP, credentials=contexts)


@pytest.fixture
def serving() -> Iterator[TransferAgent]:
    agent = agent_of(tls_lab.credentials())
    yield agent
    agent.close()


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


def filled(num_blocks: int, block_bytes: int) -> Slab:
    slab = Slab.shared(num_blocks, block_bytes)
    slab.memory[:] = np.random.default_rng(1).bytes(num_blocks * block_bytes)
    return slab


async def read_from(serving: TransferAgent, contexts: TlsContexts | None, num_blocks: int = 2) -> str:
    """Read blocks with an agent of its own, and compare them."""
    reader, source, target = agent_of(contexts), filled(num_blocks, BLOCK), Slab.shared(num_blocks, BLOCK)
    offer = serving.offer(source, range(num_blocks), SOON_S)
    try:
        path = await reader.read(offer.ticket, target, range(num_blocks), SOON_S)
        assert target.memory == source.memory
        return path
    finally:
        offer.cancel()
        reader.close()


def connected(serving: TransferAgent) -> socket.socket:
    return socket.create_connection((serving.address.host, serving.address.port), SOON_S)


def is_closed(link: socket.socket) -> bool:
    """Waits for it."""
    try:
        while link.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


# --- bytes


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes"),
    [
        (3, 9 << 20),
        (64, 1 << 18),
        (64, (16 << 10) + 8),
        (300, 16 << 10),
        (5000, 1000),
        (100_000, 1),
        (7, 70_001),
    ],
)
async def test_blocks_of_all_sizes_arrive_scattered(
    serving: TransferAgent, num_blocks: int, block_bytes: int
) -> None:
    """Larger and smaller than a TLS record, a unit of writing and the buffers of sockets."""
    reader, source, target = agent_of(tls_lab.of_worker()), filled(num_blocks, block_bytes), None
    try:
        target = Slab.shared(num_blocks, block_bytes)
        order = np.random.default_rng(2).permutation(num_blocks)
        for is_checked in (True, False):
            target.memory[:] = bytes(len(target.memory))
            offer = serving.offer(source, order, SOON_S)
            await reader.read(offer.ticket, target, order[::-1], SOON_S, is_checked=is_checked)
            rows = [
                np.frombuffer(each.memory, np.uint8).reshape(num_blocks, block_bytes)
                for each in (source, target)
            ]
            assert (rows[1][order[::-1]] == rows[0][order]).all()
    finally:
        reader.close()


async def test_messages_larger_than_socket_buffers_arrive(serving: TransferAgent) -> None:
    """A request with eight bytes for each block, and many messages at once."""
    num_blocks = 1_000_000
    reader, source, target = agent_of(tls_lab.of_worker()), filled(num_blocks, 1), Slab.shared(num_blocks, 1)
    try:
        offer = serving.offer(source, range(num_blocks), SOON_S)
        order = np.arange(num_blocks)[::-1]
        read = reader.read(offer.ticket, target, range(num_blocks), SOON_S, positions=order, is_checked=False)
        messages = [bytes([number]) * (1 << 20) for number in range(16)]
        posts = [serving.post(number, message, SOON_S) for number, message in enumerate(messages)]
        receives = [reader.receive(serving.address_text, number, SOON_S) for number in range(16)]
        assert [await each for each in receives] == messages
        await read
        for each in posts:
            await each
        assert bytes(target.memory) == bytes(source.memory)[::-1]
    finally:
        reader.close()


async def test_pieces_of_blocks_arrive(serving: TransferAgent) -> None:
    """Ranks with other shares of the heads exchange small pieces, here across the bounds of records."""
    model = KvLayout(
        name="block-layer-kv-head-token", dtype="float32", num_layers=3, num_kv_heads=4, head_dim=24, block_size=16,
        block_bytes=3 * 2 * 4 * 16 * 24 * 4,
    )  # fmt: skip
    whole = np.random.default_rng(2).random((40, 3, 2, 4, 16, 24), dtype=np.float32)
    layout = SlabLayout.of_rank(model, 2, 1)
    half, into = (
        Slab.shared(40, layout.block.block_bytes, layout),
        Slab.shared(40, model.block_bytes, SlabLayout.of_rank(model)),
    )
    half.memory[:] = np.ascontiguousarray(whole[:, :, :, 2:]).tobytes()
    reader = agent_of(tls_lab.of_worker())
    try:
        offer = serving.offer(half, range(40), SOON_S)
        await reader.read(offer.ticket, into, range(40), SOON_S)
        got = np.frombuffer(into.memory, np.float32).reshape(whole.shape)
        assert (got[:, :, :, 2:] == whole[:, :, :, 2:]).all()
        assert not got[:, :, :, :2].any()
    finally:
        reader.close()


async def test_a_read_that_is_cancelled_leaves_the_connection_usable(serving: TransferAgent) -> None:
    """The rest of its chunk is made of zeros, while an earlier write has to be repeated."""
    source, target = filled(64, 1 << 20), Slab.shared(64, 1 << 20)
    reader = agent_of(tls_lab.of_worker())
    try:
        for _ in range(5):
            offer = serving.offer(source, range(64), SOON_S)
            read = reader.read(offer.ticket, target, range(64), SOON_S)
            await asyncio.sleep(0.01)
            read.cancel()
            await read.wait_done()
            offer.cancel()
            await offer.wait_done()
        offer = serving.offer(source, range(64), SOON_S)
        await reader.read(offer.ticket, target, range(64), SOON_S)
        assert target.memory == source.memory
        assert len(serving._hub._sessions) == 1, "all reads had one connection"
    finally:
        reader.close()


async def test_nothing_is_readable_on_the_way(serving: TransferAgent) -> None:
    source, seen = Slab.shared(4, BLOCK), bytearray()
    source.memory[:] = b"a secret" * (len(source.memory) // 8)

    forwards: list[asyncio.Task[None] | None] = []

    async def copy(one: asyncio.StreamReader, other: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await one.read(1 << 16):
                seen.extend(data)
                other.write(data)
        other.close()
        with contextlib.suppress(ConnectionError):
            await other.wait_closed()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        forwards.append(asyncio.current_task())
        far_reader, far_writer = await asyncio.open_connection(serving.address.host, serving.address.port)
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    offer = serving.offer(source, range(4), SOON_S)
    ticket = decode_ticket(offer.ticket)
    address = msgspec.structs.replace(ticket.address, host=host, port=port)
    reader, target = agent_of(tls_lab.of_worker()), Slab.shared(4, BLOCK)
    try:
        await reader.read(
            encode_ticket(msgspec.structs.replace(ticket, address=address)), target, range(4), SOON_S
        )
    finally:
        reader.close()
        server.close()
        await asyncio.gather(*(each for each in forwards if each is not None))
    assert target.memory == source.memory
    assert len(seen) > len(source.memory)
    assert b"secret" not in seen
    assert ticket.secret not in seen


# --- who gets in


@pytest.mark.parametrize("role", [ProcessRole.WORKER, ProcessRole.POOL, ProcessRole.FRONTEND])
async def test_processes_that_have_kv_get_in(serving: TransferAgent, role: ProcessRole) -> None:
    assert await read_from(serving, tls_lab.credentials(role)) == "tcp"
    assert serving.handshakes == {"accepted": 2}, "one for messages and one for blocks"


@pytest.mark.parametrize("role", [ProcessRole.ROUTER, ProcessRole.CLIENT])
async def test_other_roles_are_refused_by_both_ends(serving: TransferAgent, role: ProcessRole) -> None:
    contexts = tls_lab.credentials(role)
    with pytest.raises(ConnectFailed, match="--cluster-key"):
        await read_from(serving, contexts)
    until(lambda: serving.handshakes == {"refused": 1})
    other = agent_of(contexts)
    try:
        with pytest.raises(ConnectFailed, match="may not transfer blocks"):
            await read_from(other, tls_lab.of_worker())
    finally:
        other.close()


async def test_another_cluster_is_refused_by_both_ends(serving: TransferAgent) -> None:
    stranger = tls_lab.credentials(issuer=ClusterAuthority.create(SystemClock().wall()))
    with pytest.raises(ConnectFailed, match=r"not of this cluster.*--cluster-key") as caught:
        await read_from(serving, stranger)
    assert "--cluster-key" in str(caught.value.fields["remedy"])
    until(lambda: serving.handshakes.total() == 1)
    assert not serving.handshakes["accepted"]
    assert not serving._hub._sessions


def test_a_certificate_without_an_identity_is_refused(serving: TransferAgent) -> None:
    """A company's authority has signed many others."""
    issued = tls_lab.Issued(ProcessRole.WORKER)
    issued.identity = Unnamed()  # type: ignore[assignment]
    with ssl_link(serving, Credentials(issued, SystemClock()).client_context) as link:
        assert is_closed(link)
    until(lambda: serving.handshakes["refused"] == 1)
    assert not serving._hub._sessions


def test_a_peer_without_a_certificate_is_refused(serving: TransferAgent) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with ssl_link(serving, context) as link, pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"):
        link.recv(1 << 16)
    until(lambda: serving.handshakes["refused"] == 1)
    assert not serving._hub._sessions


async def test_plain_text_to_an_agent_with_tls_fails_at_once(serving: TransferAgent) -> None:
    with pytest.raises(ConnectFailed, match="--cluster-key"):
        await read_from(serving, None)
    until(lambda: serving.handshakes == {"refused": 1})


async def test_tls_to_an_agent_without_fails_at_once() -> None:
    plain = agent_of(None)
    try:
        with pytest.raises(ConnectFailed, match=r"did not complete a TLS handshake.*--cluster-key"):
            await read_from(plain, tls_lab.of_worker())
    finally:
        plain.close()


async def test_a_source_that_stalls_in_its_handshake_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 0.1)
    silent, reader = Source(), agent_of(tls_lab.of_worker())
    try:
        with pytest.raises(ConnectFailed, match=r"no handshake within 0.1 s"):
            await reader.read(silent.ticket(), Slab.shared(1, BLOCK), [0], SOON_S)
    finally:
        reader.close()
        silent.close()


# --- what strangers cost


@pytest.mark.parametrize("said", [b"", b"\x16", b"\x16\x03\x01\x02\x00" + bytes(20)])
def test_a_handshake_that_stalls_ends(
    serving: TransferAgent, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_S", 0.1)
    with connected(serving) as link:
        link.sendall(said)
        assert is_closed(link)
    until(lambda: serving.handshakes.total() == 1)
    assert not serving._hub.handshakes._incomplete  # type: ignore[union-attr]
    assert not serving._hub.handshakes._num_by_group  # type: ignore[union-attr]


def test_garbage_is_counted_and_logged_seldom(
    serving: TransferAgent, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(8):
        with connected(serving) as link:
            link.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            assert is_closed(link)
    until(lambda: serving.handshakes["refused"] == 8)
    logged = [each for each in caplog.records if "connection refused" in each.message]
    assert len(logged) == 4, "the 1st, 2nd, 4th and 8th"


async def test_incomplete_handshakes_are_limited_and_others_get_in_afterwards(
    serving: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "MAX_HANDSHAKES_PER_GROUP", 8)
    strangers = [connected(serving) for _ in range(30)]
    until(lambda: serving.handshakes["limit"] == 22)
    assert serving.num_refused == 22
    for each in strangers:
        each.close()
    until(lambda: serving.handshakes["incomplete"] == 8)
    assert await read_from(serving, tls_lab.of_worker()) == "tcp"


async def test_incomplete_handshakes_of_all_addresses_are_limited(
    serving: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "MAX_HANDSHAKES", 0)
    with pytest.raises(NetworkFault):
        await read_from(serving, tls_lab.of_worker())
    assert serving.handshakes["limit"] == 1


def test_an_agent_that_closes_ends_handshakes() -> None:
    agent = agent_of(tls_lab.credentials())
    with connected(agent) as link:
        until(lambda: agent._hub.handshakes._incomplete)  # type: ignore[union-attr]
        agent.close()
        assert is_closed(link)


async def test_a_peer_without_a_certificate_cannot_guess_or_replay_an_offer(serving: TransferAgent) -> None:
    """A ticket, as read from a log, is of no use without one."""
    source = filled(2, BLOCK)
    offer = serving.offer(source, [0, 1], SOON_S)
    thief = agent_of(None)
    try:
        with pytest.raises(ConnectFailed):
            await thief.read(offer.ticket, Slab.shared(2, BLOCK), [0, 1], SOON_S)
    finally:
        thief.close()
    offer.cancel()
    with pytest.raises(Cancelled):
        await offer


# --- offers for one reader

KEY = b"k" * 16


async def test_an_offer_is_read_by_its_reader_only(
    serving: TransferAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """Also a worker with a certificate and the stolen ticket neither reads nor ends the offer."""
    reading, stealing = (tls_lab.credentials(name=name) for name in ("decode-0", "decode-1"))
    reader, thief = agent_of(reading), agent_of(stealing)
    source, target = filled(2, BLOCK), Slab.shared(2, BLOCK)
    try:
        offer = serving.offer(source, [0, 1], SOON_S, reader_key=KEY)
        ticket = bind_ticket(offer.ticket, reader_proof(KEY, reading.identity.uri))
        for number, stolen in enumerate((ticket, offer.ticket), 1):
            with pytest.raises(NotFound, match="does not exist or has ended"):
                await thief.read(stolen, target, [0, 1], SOON_S)
            assert serving.num_refused_reads == number
        thief.decline(ticket)
        until(lambda: serving.num_refused_reads == 3)
        assert not any(target.memory)
        await reader.read(ticket, target, [0, 1], SOON_S)
        assert target.memory == source.memory
        assert await offer == ""
        with pytest.raises(NotFound):
            await reader.read(ticket, target, [0, 1], SOON_S)
        assert serving.num_refused_reads == 3, "a used ticket is no theft"
        logged = [each.getMessage() for each in caplog.records if "ticket refused" in each.getMessage()]
        assert len(logged) == 2, "the 1st and 2nd of three"
        assert stealing.identity.uri in logged[0]
    finally:
        reader.close()
        thief.close()


async def test_the_reader_can_decline_its_offer(serving: TransferAgent) -> None:
    reading = tls_lab.credentials(name="decode-0")
    reader = agent_of(reading)
    try:
        offer = serving.offer(filled(2, BLOCK), [0, 1], SOON_S, reader_key=KEY)
        reader.decline(bind_ticket(offer.ticket, reader_proof(KEY, reading.identity.uri)))
        with pytest.raises(Cancelled):
            await offer
    finally:
        reader.close()


async def test_a_renewed_certificate_still_reads(serving: TransferAgent) -> None:
    """The proof is for a name, not for a key."""
    reading = tls_lab.credentials(name="decode-0")
    offer = serving.offer(filled(2, BLOCK), [0, 1], SOON_S, reader_key=KEY)
    ticket = bind_ticket(offer.ticket, reader_proof(KEY, reading.identity.uri))
    reading._load(SystemClock().wall())
    reader = agent_of(reading)
    try:
        assert await reader.read(ticket, Slab.shared(2, BLOCK), [0, 1], SOON_S) == "tcp"
    finally:
        reader.close()


async def test_without_a_cluster_key_the_ticket_is_enough() -> None:
    serving, reader = agent_of(None), agent_of(None)
    try:
        offer = serving.offer(filled(2, BLOCK), [0, 1], SOON_S, reader_key=KEY)
        assert await reader.read(offer.ticket, Slab.shared(2, BLOCK), [0, 1], SOON_S) == "tcp"
    finally:
        reader.close()
        serving.close()


# --- renewal


async def test_certificates_are_renewed_during_a_transfer() -> None:
    """Open connections continue; new ones use the new key, of which the old ones know nothing."""
    issued = tls_lab.Issued(ProcessRole.WORKER)
    live = Credentials(issued, SystemClock())
    serving, reader = agent_of(live), agent_of(tls_lab.of_worker())
    source, target = filled(64, 1 << 20), Slab.shared(64, 1 << 20)
    try:
        offer = serving.offer(source, range(64), SOON_S)
        read = reader.read(offer.ticket, target, range(64), SOON_S)
        issued.issuer = tls_lab.authority().rotate(SystemClock().wall())
        live._load(SystemClock().wall())
        await read
        assert target.memory == source.memory
        assert await read_from(serving, tls_lab.of_worker()) == "tcp", "the old key, one rotation behind"
        assert await read_from(serving, tls_lab.credentials(issuer=issued.issuer)) == "tcp"
        issued.issuer = issued.issuer.rotate(SystemClock().wall())
        live._load(SystemClock().wall())
        with pytest.raises(ConnectFailed, match="not of this cluster"):
            await read_from(serving, tls_lab.of_worker())
        again = serving.offer(source, [1], SOON_S)
        await reader.read(again.ticket, target, [2], SOON_S)
        assert target.memory[2 << 20 : 3 << 20] == source.memory[1 << 20 : 2 << 20], (
            "over the first connection"
        )
    finally:
        reader.close()
        serving.close()


def test_nixl_is_reported_as_not_encrypted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvolt.transfer.paths.nixl_library.require_package", lambda: None)
    with caplog.at_level(logging.WARNING):
        TransferAgent(TransferOptions(nixl=True), credentials=tls_lab.of_worker()).close()
        TransferAgent(TransferOptions(nixl=True)).close()
    assert len([each for each in caplog.records if "not encrypted" in each.message]) == 1


def ssl_link(serving: TransferAgent, context: ssl.SSLContext) -> ssl.SSLSocket:
    return context.wrap_socket(connected(serving))


class Unnamed:
    """What another program's certificate is for."""

    role = "a-printer"
    uri = "https://printer.example"
