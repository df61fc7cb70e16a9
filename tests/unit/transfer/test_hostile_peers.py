"""Malicious peers: their requests are rejected, they are disconnected, and other peers are not affected."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.unit.transfer import tls_lab
from tests.unit.transfer.hostile_lab import (
    BLOCK,
    NUM,
    SOON_S,
    Side,
    Source,
    Talk,
    calling,
    num_descriptors,
    reading_from,
    security,
)

from kvolt.core.errors import Cancelled, InvalidRequest, NetworkFault, ProtocolError, Unsupported, to_info
from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.memory.slabs import SlabInfo
from kvolt.transfer.peer import connection, hub, serving
from kvolt.transfer.peer.offers import Offer
from kvolt.transfer.reads.read_op import ReadOp
from kvolt.transfer.reads.wire import (
    CHUNK,
    MAX_FRAME_BYTES,
    Address,
    Checksums,
    Ended,
    Failed,
    Fetch,
    Hello,
    NixlSlab,
    Ready,
    SharedSlab,
    Ticket,
    Welcome,
    decode_ticket,
    encode_ticket,
)

INT64_MAX = (1 << 63) - 1


@pytest.fixture(autouse=True, params=["plain", "tls"])
def secured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP connections are plain, or mutual TLS."""
    monkeypatch.setattr(security, "credentials", tls_lab.of_worker() if request.param == "tls" else None)


@pytest.fixture
def source() -> Iterator[Side]:
    side = Side(seed=1)
    yield side
    side.agent.close()


@pytest.fixture
def target() -> Iterator[Side]:
    side = Side(shared_memory=False)
    yield side
    side.agent.close()


@pytest.fixture
def liar() -> Iterator[Source]:
    found = Source()
    yield found
    found.close()


def packed(*numbers: int) -> bytes:
    return np.array(numbers, dtype="<i8").tobytes()


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


async def still_serves(source: Side) -> bool:
    reader = Side(shared_memory=False)
    try:
        offer = source.agent.offer(source.slab, [1, 2], SOON_S)
        await reader.agent.read(offer.ticket, reader.slab, [3, 4], SOON_S)
        return bool((reader.rows[[3, 4]] == source.rows[[1, 2]]).all())
    finally:
        reader.agent.close()


# --- who is who


@pytest.mark.parametrize("key", ["", "guessed"])
async def test_blocks_are_not_sent_to_who_has_no_key(source: Side, target: Side, key: str) -> None:
    """Knowing a peer's name is not enough to receive its blocks."""
    with calling(source.agent.address) as thief:
        thief.say(Hello(target.agent.address.agent, "chunks", key=key))
        assert thief.is_let_go()
    offer = source.agent.offer(source.slab, range(NUM), SOON_S)
    assert await target.agent.read(offer.ticket, target.slab, range(NUM), SOON_S) == "tcp"
    assert (target.rows == source.rows).all()


def test_a_key_is_good_for_one_connection(source: Side) -> None:
    with reading_from(source.agent.address) as (_, welcome):
        assert welcome.key
        with calling(source.agent.address) as first, calling(source.agent.address) as second:
            first.say(Hello("reader", "chunks", key=welcome.key))
            assert isinstance(first.hear(), Welcome)
            second.say(Hello("reader", "chunks", key=welcome.key))
            assert second.is_let_go()


def test_keys_go_with_who_has_them(source: Side) -> None:
    with reading_from(source.agent.address):
        assert len(source.agent._hub._sessions_by_key) == 1
    until(lambda: not source.agent._hub._sessions_by_key)


def test_hello_is_said_once(source: Side) -> None:
    with reading_from(source.agent.address) as (talk, _):
        talk.say(Hello("another", "frames"))
        assert talk.is_let_go()


async def test_a_link_is_an_address_and_not_a_name(source: Side, liar: Source) -> None:
    """Who takes the name of an agent has not its readers."""
    real = decode_ticket(source.agent.offer(source.slab, [1], SOON_S).ticket)
    target = Side(shared_memory=False)
    try:
        false = Address(real.address.agent, liar.address.host, liar.address.port, "")
        lured = target.agent.read(encode_ticket(Ticket(false, b"1", real.slab, 1)), target.slab, [1], SOON_S)
        talk = liar.accept()
        talk.hear()
        talk.say(Welcome(false.agent, key="key"))
        await target.agent.read(encode_ticket(real), target.slab, [2], SOON_S)
        assert (target.rows[2] == source.rows[1]).all()
        lured.cancel()
        with pytest.raises(Cancelled):
            await lured
    finally:
        target.agent.close()


# --- what a Fetch names


@pytest.mark.parametrize(
    ("fetch", "told"),
    [
        (Fetch(1, b"0", "shm", positions=packed(0, 1, 2, 0, 1)), "more positions"),
        (Fetch(1, b"0", "shm", positions=packed(4)), "outside the 4"),
        (Fetch(1, b"0", "shm", positions=packed(-1)), "outside the 4"),
        (Fetch(1, b"0", "shm", positions=b"1234567"), "eight bytes"),
        (Fetch(1, b"0", "shm", pieces=packed(8), piece_bytes=INT64_MAX), "outside"),
        (Fetch(1, b"0", "shm", pieces=packed(INT64_MAX), piece_bytes=8), "outside"),
        (Fetch(1, b"0", "shm", pieces=packed(8), piece_bytes=0), "outside"),
        (Fetch(1, b"0", "shm", pieces=packed(0, 0, 8), piece_bytes=BLOCK - 8), "exceed the block"),
        (Fetch(1, b"0", "smoke signals"), "does not serve the path"),
        (Fetch(1, b"0", "tcp"), "no chunk connection"),
    ],
)
def test_what_was_not_offered_is_refused(source: Side, fetch: Fetch, told: str) -> None:
    """And the offer waits for others: nothing of it is held."""
    offer = source.agent.offer(source.slab, [1, 2, 3, 4], SOON_S)
    secret = decode_ticket(offer.ticket).secret
    with reading_from(source.agent.address, use_unix=True) as (talk, _):
        asked = {name: getattr(fetch, name) for name in fetch.__struct_fields__}
        talk.say(Fetch(**{**asked, "secret": secret}))
        heard = talk.hear()
        assert isinstance(heard, Failed)
        assert told in heard.error.message
        offer.cancel()
        with pytest.raises(Cancelled):
            offer.result(SOON_S)


def test_pieces_are_counted(source: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a peer reads at a time, and not what it has read."""
    monkeypatch.setattr(serving, "MAX_PIECES", 8)
    secret = decode_ticket(source.agent.offer(source.slab, [1, 2, 3], SOON_S).ticket).secret
    pieces = {"pieces": packed(0, 8), "piece_bytes": 8, "is_checked": False}
    with reading_from(source.agent.address, use_unix=True) as (talk, _):
        talk.say(Fetch(1, secret, "shm", **pieces), Fetch(2, secret, "shm", **pieces))  # type: ignore[arg-type]
        told = [talk.hear() for _ in range(3)]
        assert [type(each) for each in told] == [SharedSlab, Ready, Failed]
        assert isinstance(told[2], Failed)
        assert told[2].error.code == "overloaded"
        talk.say(Ended(1, is_whole=False), Fetch(3, secret, "shm", **pieces))  # type: ignore[arg-type]
        assert isinstance(talk.hear(), Ready)


def test_what_is_stopped_does_not_wait_to_be_sent(source: Side) -> None:
    """A peer that takes no blocks, and asks for ever more, costs nothing."""
    secret = decode_ticket(source.agent.offer(source.slab, range(NUM), SOON_S).ticket).secret
    with reading_from(source.agent.address) as (talk, welcome), calling(source.agent.address) as blocks:
        blocks.say(Hello("reader", "chunks", key=welcome.key))
        assert isinstance(blocks.hear(), Welcome)
        for op in range(200):
            talk.say(Fetch(op, secret, "tcp", is_checked=False), Ended(op, is_whole=False))
        talk.say(Fetch(1, b"12345", "tcp"))
        assert isinstance(talk.hear(), Failed)  # all that was said before was heard
        (served,) = source.agent._hub._sessions
        assert served._chunk_sender is not None
        assert not served._chunk_sender._queue
        assert not served._num_pieces


def test_a_ticket_for_more_than_there_is(source: Side) -> None:
    real = decode_ticket(source.agent.offer(source.slab, [1], SOON_S).ticket)
    with pytest.raises(InvalidRequest, match="destination blocks"):
        source.agent.read(
            encode_ticket(Ticket(real.address, real.secret, real.slab, 1 << 62)),
            source.slab,
            [2],
            SOON_S,
        )


def test_checksums_that_cannot_be(source: Side) -> None:
    """Of several pieces to a block each must be of whole words; who asks for others is told so."""
    offer = source.agent.offer(source.slab, [1], SOON_S)
    secret = decode_ticket(offer.ticket).secret
    with reading_from(source.agent.address, use_unix=True) as (talk, _):
        talk.say(Fetch(1, secret, "shm", pieces=packed(0, 4), piece_bytes=4))
        told = [talk.hear() for _ in range(3)]
        assert isinstance(told[2], Failed)
        assert "multiple of 8" in told[2].error.message
        offer.cancel()
        with pytest.raises(Cancelled):
            offer.result(SOON_S)


# --- unexpected errors


async def test_a_defect_that_a_peer_brings_out_is_its_own_loss(
    source: Side, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: serving.ServingSession, asked: Fetch) -> None:
        raise RuntimeError("a defect")

    with reading_from(source.agent.address) as (talk, _):
        with monkeypatch.context() as patch:
            patch.setattr(serving.ServingSession, "_on_fetch", broken)
            talk.say(Fetch(1, b"1", "tcp"))
            assert talk.is_let_go()
        until(lambda: not source.agent._hub._sessions)
    assert "cannot handle the message" in caplog.text
    assert await still_serves(source)


async def test_a_number_that_no_chunk_can_carry(source: Side) -> None:
    secret = decode_ticket(source.agent.offer(source.slab, [1], SOON_S).ticket).secret
    with reading_from(source.agent.address) as (talk, welcome), calling(source.agent.address) as blocks:
        blocks.say(Hello("reader", "chunks", key=welcome.key))
        assert isinstance(blocks.hear(), Welcome)
        talk.say(Fetch(-1, secret, "tcp"))
        assert blocks.is_let_go()
        assert talk.is_let_go()
    assert await still_serves(source)


async def test_a_defect_while_blocks_come(
    source: Side, target: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: ReadOp, *arguments: object) -> None:
        raise RuntimeError("a defect")

    offer = source.agent.offer(source.slab, [1], SOON_S)
    with monkeypatch.context() as patch:
        patch.setattr(ReadOp, "on_chunk", broken)
        with pytest.raises(NetworkFault, match="chunk connection lost"):
            await target.agent.read(offer.ticket, target.slab, [1], SOON_S)
    await target.agent.read(offer.ticket, target.slab, [1], SOON_S)


# --- those who do not say hello


def test_who_says_nothing_is_let_go(source: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HELLO_S", 0.05)
    with calling(source.agent.address) as talk, reading_from(source.agent.address) as (fine, _):
        assert talk.is_let_go()
        fine.say(Fetch(1, b"1", "tcp"))
        assert isinstance(fine.hear(), Failed)


def test_before_hello_a_frame_is_small(source: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HELLO_S", 1000.0)
    with calling(source.agent.address) as talk:
        talk.link.sendall(struct.pack("<I", 5000))
        assert talk.is_let_go()
    with reading_from(source.agent.address) as (talk, _):
        talk.say(Fetch(1, b"1", "tcp", positions=bytes(80_000)))
        assert isinstance(talk.hear(), Failed)


async def test_unfinished_frames_of_strangers_are_bounded(
    source: Side, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    budget = source.agent.frame_budget
    assert budget.limit_bytes >= 2 * MAX_FRAME_BYTES
    budget.peer_limit_bytes = 4 << 20
    unfinished = struct.pack("<I", MAX_FRAME_BYTES) + bytes(1 << 20)
    with contextlib.ExitStack() as stack:
        talks = [stack.enter_context(reading_from(source.agent.address))[0] for _ in range(8)]
        for talk in talks:
            with contextlib.suppress(ConnectionError):
                talk.link.sendall(unfinished)
        until(lambda: budget.num_shed >= 3)
        until(lambda: budget.used_bytes <= budget.peer_limit_bytes)  # its thread may be about to shed one
        assert await still_serves(source)
    until(lambda: budget.used_bytes == 0)
    assert "incomplete messages shed" in caplog.text


def test_a_frame_that_never_ends_is_let_go(source: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNFINISHED_S", 0.1)
    with reading_from(source.agent.address) as (talk, _):
        talk.link.sendall(struct.pack("<I", 1 << 20) + bytes(100_000))
        assert talk.is_let_go()
    until(lambda: source.agent.frame_budget.used_bytes == 0)


def test_the_start_of_a_small_frame_counts(source: Side) -> None:
    with reading_from(source.agent.address) as (talk, _):
        talk.link.sendall(struct.pack("<I", 60_000) + bytes(50_000))
        until(lambda: source.agent.frame_budget.used_bytes >= 50_000)
    until(lambda: source.agent.frame_budget.used_bytes == 0)


def test_a_large_frame_in_parts_is_read(source: Side) -> None:
    with reading_from(source.agent.address) as (talk, _):
        talk.say(Fetch(1, b"1", "tcp", positions=bytes(24 << 20)))
        assert isinstance(talk.hear(), Failed)
    until(lambda: source.agent.frame_budget.used_bytes == 0)


def test_connections_of_one_address_are_limited(source: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_MAX_SESSIONS_PER_HOST", 3)
    with contextlib.ExitStack() as stack:
        fine = [stack.enter_context(reading_from(source.agent.address))[0] for _ in range(3)]
        refused = stack.enter_context(calling(source.agent.address))
        assert refused.is_let_go()
        assert source.agent.num_refused == 1
        fine[0].link.close()
        until(lambda: len(source.agent._hub._sessions) == 2)
        stack.enter_context(reading_from(source.agent.address))


def test_connections_of_one_ipv6_network_share_a_limit(source: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_MAX_SESSIONS_PER_HOST", 2)
    hosts = iter(["2001:db8::1", "2001:db8::2", "2001:db8::3", "2001:db8:0:1::1"])
    monkeypatch.setattr(hub, "host_of", lambda link: next(hosts))
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(reading_from(source.agent.address))
        assert stack.enter_context(calling(source.agent.address)).is_let_go()
        assert source.agent.num_refused == 1
        stack.enter_context(reading_from(source.agent.address))
    until(lambda: not source.agent._hub._sessions)
    assert not source.agent._hub._num_by_host


def test_unexpected_descriptors_are_closed(source: Side) -> None:
    before = num_descriptors()
    with reading_from(source.agent.address, use_unix=True) as (talk, _):
        with open(os.devnull) as file, contextlib.suppress(BrokenPipeError):
            for _ in range(3):
                talk.give(b"\0", [file.fileno()] * 10)
        assert talk.is_let_go()
    until(lambda: not source.agent._hub._sessions)
    assert num_descriptors() <= before


# --- those who are read from


def asked(talk: Talk) -> Fetch:
    heard = talk.hear()
    assert isinstance(heard, Fetch)
    return heard


class FakeNixl:
    """Takes all, and moves nothing."""

    is_usable = is_ready = True

    def __init__(self) -> None:
        self.reads: list[ReadOp] = []

    def read(self, agent: Address, slab: NixlSlab, numbers: object, read_op: ReadOp) -> bool:
        assert read_op.source_pieces(np.asarray(numbers), BLOCK) is not None
        read_op.set_mover(self)
        self.reads.append(read_op)
        return True

    def stop(self) -> bool:
        return True

    def forget_peer(self, agent: Address) -> None: ...

    def close(self, error: object) -> None: ...


SLAB = SlabInfo(number=0, kind=MemoryKind.HOST, block_bytes=BLOCK, num_blocks=NUM)


@pytest.mark.parametrize(
    "said",
    [
        [Ready(1, 0, packed(5))],
        [Failed(1, to_info(Unsupported("no more", feature="nixl")))],
        [Welcome("a-source", key="another")],
        [Checksums(1, 5, bytes(8))],
        [Hello("a-source", "frames")],
    ],
    ids=["ready twice", "unsupported after ready", "welcome twice", "other checksums", "the wrong way"],
)
async def test_who_is_read_from_over_nixl_keeps_to_the_order(
    target: Side, liar: Source, said: list[Ready | Failed | Welcome | Checksums | Hello]
) -> None:
    """NIXL writes to the blocks, so they are not requested again over another path."""
    fake = FakeNixl()
    target.agent._hub.nixl = fake  # type: ignore[assignment]
    read = target.agent.read(liar.ticket(), target.slab, [1], SOON_S)
    talk = liar.greet("nixl")
    assert asked(talk).path == "nixl"
    talk.say(NixlSlab(SLAB, 4096, 0, b""), Ready(1, 0, packed(4)))
    until(lambda: fake.reads)
    talk.say(*said)
    with pytest.raises(ProtocolError):
        await read
    assert len(fake.reads) == 1


@pytest.mark.parametrize("said", [Ready(1, 0, packed(4)), Checksums(1, 0, bytes(8))])
async def test_what_is_sent_is_not_ready_anywhere(
    target: Side, liar: Source, said: Ready | Checksums
) -> None:
    read = target.agent.read(liar.ticket(), target.slab, [1], SOON_S)
    talk = liar.greet()
    liar.greet()
    assert asked(talk).path == "tcp"
    talk.say(said)
    with pytest.raises(ProtocolError):
        await read


async def test_a_chunk_of_what_comes_over_nixl(target: Side, liar: Source) -> None:
    """Two would write to the same blocks."""
    plain = target.agent.read(liar.ticket(), target.slab, [1], SOON_S)
    talk = liar.greet("nixl")
    blocks = liar.greet()
    assert asked(talk).path == "tcp"
    fake = FakeNixl()
    target.agent._hub.nixl = fake  # type: ignore[assignment]
    read = target.agent.read(liar.ticket(), target.slab, [2], SOON_S)
    fetch = asked(talk)
    assert fetch.path == "nixl"
    blocks.link.sendall(CHUNK.pack(fetch.op, 0, 1, BLOCK, 0) + b"x" * BLOCK)
    for each in (plain, read):
        with pytest.raises(NetworkFault, match="chunk connection lost"):
            await each
    assert not target.rows.any()


async def test_memories_are_counted(target: Side, liar: Source) -> None:
    read = target.agent.read(liar.ticket(), target.slab, [1], SOON_S)
    talk = liar.greet()
    for number in range(1025):
        slab = SlabInfo(number=number, kind=MemoryKind.HOST, block_bytes=BLOCK, num_blocks=NUM)
        talk.say(NixlSlab(slab, 0, 0, b""))
    with pytest.raises(ProtocolError, match="1024"):
        await read


def test_who_is_lost_while_it_is_answered_reads_no_more(
    source: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that never listens, here: what it was about to read is not held for it."""
    offer = source.agent.offer(source.slab, range(NUM), SOON_S)
    secret = decode_ticket(offer.ticket).secret
    with reading_from(source.agent.address, use_unix=True) as (talk, _):
        monkeypatch.setattr(connection, "_MAX_UNSENT_BYTES", 100)
        talk.say(Fetch(1, secret, "shm"))
        assert talk.is_let_go()
        offer.cancel()
        with pytest.raises(Cancelled):
            offer.result(SOON_S)


def test_an_offer_is_not_read_under_a_number_that_is_taken(source: Side) -> None:
    secret = decode_ticket(source.agent.offer(source.slab, [1], SOON_S).ticket).secret
    with reading_from(source.agent.address, use_unix=True) as (talk, _):
        talk.say(*[Fetch(1, secret, "shm", is_checked=False)] * 2)
        told = [talk.hear() for _ in range(3)]
        assert isinstance(told[2], Failed)
        assert "in use" in told[2].error.message
        (offered,) = source.agent._hub.offers._by_secret.values()
        assert isinstance(offered, Offer)
        assert offered.num_readers == 1
