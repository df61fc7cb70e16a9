"""Connections that fail: whatever waits for one, or is read over it, is told so, soon and with the address."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.unit.transfer import tls_lab
from tests.unit.transfer.hostile_lab import SOON_S, Side, Source, calling, num_descriptors, security

from kvolt.core.errors import (
    Cancelled,
    ConfigError,
    ConnectFailed,
    NetworkFault,
    Overloaded,
    WorkerLost,
)
from kvolt.runtime.clock import SystemClock
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.peer import chunk_connection, sockets
from kvolt.transfer.peer import hub as hub_module
from kvolt.transfer.peer.connection import FrameConnection
from kvolt.transfer.reads.progress import ProgressThread
from kvolt.transfer.reads.wire import (
    Address,
    Declined,
    FrameReader,
    Hello,
    Ticket,
    decode_ticket,
    encode_ticket,
)

OnDone = Callable[[socket.socket | ConnectFailed], None]


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
def peer() -> Iterator[Source]:
    found = Source()
    yield found
    found.close()


@pytest.fixture
def progress() -> Iterator[ProgressThread]:
    found = ProgressThread("test", SystemClock())
    found.start()
    yield found
    found.close(lambda: None)


def advertising(source: Side, **changed: object) -> bytes:
    """A ticket of the source, with another address."""
    real = decode_ticket(source.agent.offer(source.slab, [1], SOON_S).ticket)
    fields = {name: getattr(real.address, name) for name in real.address.__struct_fields__}
    return encode_ticket(Ticket(Address(**{**fields, **changed}), real.secret, real.slab, 1))


# --- a peer that does not answer


async def test_who_never_says_welcome_is_given_up(
    target: Side, peer: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_connection, "CONNECT_S", 0.1)
    reads = [target.agent.read(peer.ticket(), target.slab, [block], SOON_S) for block in (1, 2)]
    talk = peer.accept()
    for read in reads:
        with pytest.raises(ConnectFailed, match=rf"127.0.0.1:{peer.address.port} within 0.1 s"):
            await read
    assert talk.is_let_go()
    assert not target.agent._hub._links


async def test_who_never_says_welcome_to_chunks_is_given_up(
    target: Side, peer: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_connection, "CONNECT_S", 0.1)
    read = target.agent.read(peer.ticket(), target.slab, [1], SOON_S)
    frames, blocks = peer.greet(), peer.accept()
    with pytest.raises(ConnectFailed, match=str(peer.address.port)):
        await read
    assert frames.is_let_go()
    assert blocks.is_let_go()


async def test_a_connection_that_never_comes_about_is_given_up(
    target: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_connection, "CONNECT_S", 0.1)
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # no accept: the backlog is full
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(full.getsockname())
        before = num_descriptors()
        address = Address("busy", *full.getsockname(), "")
        slab = target.slab.info(0)
        read = target.agent.read(encode_ticket(Ticket(address, b"1", slab, 1)), target.slab, [1], SOON_S)
        with pytest.raises(ConnectFailed, match="no answer"):
            await read
        assert num_descriptors() <= before


# --- a link that breaks


async def test_chunks_that_cannot_be_connected_at_all(
    target: Side, peer: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found out at once, before there is anything to wait for."""
    connect, calls = sockets.connect, []

    def second_fails(
        progress: ProgressThread, to: Address, use_unix: bool, on_done: OnDone
    ) -> Callable[[], None]:
        calls.append(to)
        if len(calls) == 1:
            return connect(progress, to, use_unix, on_done)
        on_done(ConnectFailed("no connection", address="nowhere"))
        return lambda: None

    monkeypatch.setattr(chunk_connection, "connect", second_fails)
    read = target.agent.read(peer.ticket(), target.slab, [1], SOON_S)
    peer.greet()
    with pytest.raises(ConnectFailed, match="no connection"):
        await asyncio.wait_for(read.wait_done(), 5) or await read


async def test_a_link_that_breaks_at_its_welcome(source: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """While what has waited for it is asked for: the first finds out, and the others are told."""
    send = FrameConnection._send

    def breaks(self: FrameConnection, data: memoryview, descriptor: int | None) -> int:
        if b"Fetch" in bytes(data):
            raise BrokenPipeError(errno.EPIPE, "broken")
        return send(self, data, descriptor)

    monkeypatch.setattr(FrameConnection, "_send", breaks)
    target = Side()
    try:
        offers = [source.agent.offer(source.slab, [block], SOON_S) for block in range(3)]
        reads = [
            target.agent.read(offer.ticket, target.slab, [block], SOON_S)
            for block, offer in enumerate(offers)
        ]
        for read in reads:
            with pytest.raises(WorkerLost):
                await asyncio.wait_for(read.wait_done(), 5) or await read
    finally:
        target.agent.close()


async def test_a_link_that_breaks_while_chunks_are_connected(target: Side, peer: Source) -> None:
    """The listener is closed, so connections are refused."""
    read = target.agent.read(peer.ticket(), target.slab, [1], SOON_S)
    frames, blocks = peer.greet(), peer.accept()
    frames.link.close()
    with pytest.raises(WorkerLost):
        await read
    assert blocks.is_let_go()


async def test_peers_that_are_read_from_are_counted(
    target: Side, peer: Source, source: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_MAX_LINKS", 1)
    first = target.agent.read(peer.ticket(), target.slab, [1], SOON_S)
    ticket = source.agent.offer(source.slab, [1], SOON_S).ticket
    with pytest.raises(Overloaded, match="too many links"):
        await target.agent.read(ticket, target.slab, [2], SOON_S)
    target.agent.decline(ticket)
    assert not target.agent._hub.offers._by_secret
    first.cancel()
    with pytest.raises(Cancelled):
        await first


# --- names and addresses


async def test_names_are_not_looked_up_by_who_moves_blocks(source: Side, target: Side) -> None:
    with pytest.raises(ConnectFailed, match=r"peer\.example:.*numeric"):
        await target.agent.read(advertising(source, host="peer.example", unix=""), target.slab, [1], SOON_S)


@pytest.mark.parametrize("port", [0, -1, 65_536, 1 << 40])
async def test_ports_that_there_are_not(source: Side, target: Side, port: int) -> None:
    with pytest.raises(ConnectFailed, match="port out of range"):
        await target.agent.read(advertising(source, port=port, unix=""), target.slab, [1], SOON_S)


def test_the_advertised_address_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    agent = TransferAgent(TransferOptions(advertise="me.example"))
    assert agent.address.host == "192.0.2.7"
    agent.close()
    agent = TransferAgent(TransferOptions(advertise="2001:db8::5"))
    assert agent.address.host == "2001:db8::5"
    agent.close()


def test_a_name_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*arguments: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    before = num_descriptors()
    with pytest.raises(ConfigError, match=r"me\.example"):
        TransferAgent(TransferOptions(advertise="me.example"))
    assert num_descriptors() == before


# --- Unix sockets


def tried(progress: ProgressThread, unix: str) -> ConnectFailed:
    """How a connection to a Unix socket fails, before `connect` returns."""
    found: list[socket.socket | ConnectFailed] = []
    address, done = Address("x", "127.0.0.1", 1, unix), threading.Event()

    def begin() -> None:
        sockets.connect(progress, address, True, found.append)
        done.set()

    progress.call_soon(begin)
    assert done.wait(SOON_S)
    assert isinstance(found[0], ConnectFailed)
    return found[0]


async def test_who_listens_as_another_user_is_not_believed(
    source: Side, progress: ProgressThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any process can take a released socket name; TCP remains, where the agent's id is checked."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind("\0kvolt-test-other-user")
        other.listen()
        monkeypatch.setattr(sockets, "is_same_user", lambda link: False)
        assert "another user" in str(tried(progress, "kvolt-test-other-user"))
    target = Side()
    try:
        offer = source.agent.offer(source.slab, [1], SOON_S)
        assert await target.agent.read(offer.ticket, target.slab, [1], SOON_S) == "tcp"
    finally:
        target.agent.close()


async def test_a_unix_socket_at_which_too_many_wait(source: Side, progress: ProgressThread) -> None:
    """The backlog is full, which is reported at once; TCP remains."""
    target = Side()
    with socket.socket(socket.AF_UNIX) as full, contextlib.ExitStack() as stack:
        full.bind("\0kvolt-test-full")
        full.listen(0)
        for _ in range(3):
            waits = stack.enter_context(socket.socket(socket.AF_UNIX))
            waits.setblocking(False)
            waits.connect_ex("\0kvolt-test-full")
        failed = tried(progress, "kvolt-test-full")
        assert os.strerror(errno.EAGAIN) in str(failed)
        ticket = advertising(source, unix="kvolt-test-full")
        assert await target.agent.read(ticket, target.slab, [1], SOON_S) == "tcp"
    assert (target.rows[1] == source.rows[1]).all()
    target.agent.close()


# --- listening


class Refusing:
    """A socket that is listened on, from which nothing can be accepted for a while."""

    def __init__(self, real: socket.socket, code: int) -> None:
        self._real = real
        self._code = code
        self.num_asked = 0
        self.is_refusing = True

    def accept(self) -> object:
        self.num_asked += 1
        if self.is_refusing:
            raise OSError(self._code, os.strerror(self._code))
        return self._real.accept()

    def fileno(self) -> int:
        return self._real.fileno()

    def close(self) -> None:
        self._real.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EPROTO, errno.EPERM])
def test_peers_that_cannot_be_let_in_wait(source: Side, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a busy loop, and not for ever."""
    monkeypatch.setattr(sockets, "ACCEPT_PAUSE_S", 0.1)
    listener = source.agent._hub._listeners[0]
    refusing = Refusing(listener._socket, code)
    listener._socket = refusing  # type: ignore[assignment]
    with calling(source.agent.address) as talk:
        threading.Event().wait(0.15)
        assert 1 <= refusing.num_asked <= 3
        refusing.is_refusing = False
        talk.say(Hello("reader", "frames"))
        assert talk.hear()


def test_who_goes_while_it_is_let_in_is_nobodys_loss(source: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(hub_module, "ServingSession", broken)
        with calling(source.agent.address) as talk:
            assert talk.is_let_go()
    with calling(source.agent.address) as talk:
        talk.say(Hello("reader", "frames"))
        assert talk.hear()


def test_peers_are_counted(source: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_MAX_SESSIONS", 0)
    with calling(source.agent.address) as talk:
        assert talk.is_let_go()


# --- descriptors on their way


def test_a_descriptor_that_was_not_sent_is_closed(progress: ProgressThread) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    ours.setblocking(False)
    before = num_descriptors()
    done = threading.Event()

    def fill() -> None:
        connection = FrameConnection(progress, ours, lambda message: None, lambda error: None)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(bytes(1 << 16))
        for _ in range(5):
            connection.send(Declined(b"1"), theirs.fileno())
        assert num_descriptors() == before + 5
        connection.close()
        done.set()

    progress.call_soon(fill)
    assert done.wait(SOON_S)
    assert num_descriptors() == before - 1
    theirs.close()


def test_a_descriptor_is_that_of_when_it_was_sent(progress: ProgressThread) -> None:
    """And not of the file that has its number by the time that the peer listens."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    ours.setblocking(False)
    meant, other = os.memfd_create("meant"), os.memfd_create("other")
    same = os.fstat(meant).st_ino
    done = threading.Event()
    num_filler = 0

    def fill() -> None:
        nonlocal num_filler
        connection = FrameConnection(progress, ours, lambda message: None, lambda error: None)
        with contextlib.suppress(BlockingIOError):
            while True:
                num_filler += ours.send(bytes(1 << 16))
        connection.send(Declined(b"1"), meant)
        os.dup2(other, meant)
        done.set()

    progress.call_soon(fill)
    assert done.wait(SOON_S)
    theirs.settimeout(SOON_S)
    while num_filler:
        num_filler -= len(theirs.recv(min(num_filler, 1 << 16)))
    data, (got,), _, _ = socket.recv_fds(theirs, 1 << 16, 1)
    assert os.fstat(got).st_ino == same
    assert list(FrameReader().feed(data)) == [Declined(b"1")]
    for descriptor in (meant, other, got):
        os.close(descriptor)
    theirs.close()
    ours.close()


async def test_no_descriptor_is_left_for_a_peer(source: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(descriptor: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    target = Side()
    try:
        offer = source.agent.offer(source.slab, [1], SOON_S)
        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", none_left)
            with pytest.raises(Overloaded, match="out of file descriptors"):
                await target.agent.read(offer.ticket, target.slab, [1], SOON_S)
        assert await target.agent.read(offer.ticket, target.slab, [1], SOON_S) == "shm"
        assert np.array_equal(target.rows[1], source.rows[1])
    finally:
        target.agent.close()


async def test_chunks_that_break_at_the_source_end_the_reads(source: Side, target: Side) -> None:
    offer = source.agent.offer(source.slab, [1], SOON_S)
    await target.agent.read(offer.ticket, target.slab, [1], SOON_S)
    (served,) = source.agent._hub._sessions
    assert served._chunk_sender is not None
    served._chunk_sender._stream.sock.shutdown(socket.SHUT_RDWR)
    slow = source.agent.offer(source.slab, [2], SOON_S)
    with contextlib.suppress(NetworkFault):
        await target.agent.read(slow.ticket, target.slab, [2], SOON_S)
    slow.cancel()
    await asyncio.wait_for(slow.wait_done(), 5)


async def test_shared_memory_is_used_again_once_its_socket_is_reached(
    source: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "PROBE_S", 0.05)
    real, is_reachable, num_refused = sockets.connect, threading.Event(), 0

    def connect(progress: ProgressThread, to: Address, use_unix: bool, on_done: OnDone) -> Callable[[], None]:
        nonlocal num_refused
        if use_unix and not is_reachable.is_set():
            num_refused += 1
            on_done(ConnectFailed("its backlog is full", address=to.unix))
            return lambda: None
        return real(progress, to, use_unix, on_done)

    monkeypatch.setattr(chunk_connection, "connect", connect)
    monkeypatch.setattr(sockets, "connect", connect)  # of the probes
    reader = Side()
    try:
        paths = []
        async with asyncio.timeout(SOON_S):
            while not paths or paths[-1] != "shm":
                offering = source.agent.offer(source.slab, [1, 2], SOON_S)
                paths.append(await reader.agent.read(offering.ticket, reader.slab, [1, 2], SOON_S))
                if num_refused >= 3:
                    is_reachable.set()
                await asyncio.sleep(0.01)
        assert paths[0] == "tcp"
        assert num_refused >= 3, "probes were refused, and others followed"
        assert (reader.rows[1:3] == source.rows[1:3]).all()
    finally:
        reader.agent.close()


async def test_a_near_peer_that_tcp_does_not_reach_is_read_by_its_socket(
    source: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that is to try TCP takes the path that there is."""
    real = sockets.connect

    def connect(progress: ProgressThread, to: Address, use_unix: bool, on_done: OnDone) -> Callable[[], None]:
        if not use_unix:
            on_done(ConnectFailed("no route", address=to.host))
            return lambda: None
        return real(progress, to, use_unix, on_done)

    monkeypatch.setattr(chunk_connection, "connect", connect)
    reader = Side()
    monkeypatch.setattr(reader.agent.paths, "choose_path", lambda peer, ends, paths: paths[-1])
    try:
        async with asyncio.timeout(SOON_S):
            for _ in range(3):
                offering = source.agent.offer(source.slab, [1, 2], SOON_S)
                read = reader.agent.read(offering.ticket, reader.slab, [1, 2], timeout_s=SOON_S)
                assert await read == "shm"
    finally:
        reader.agent.close()
