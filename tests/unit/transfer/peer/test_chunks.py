"""Chunks: what is stopped in the middle of one reveals nothing, and is written nowhere."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.unit.transfer import tls_lab

from kvolt.runtime.clock import SystemClock
from kvolt.transfer.memory.pieces import Pieces, Sums
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.peer.chunks import ChunkReceiver, ChunkSender, OutgoingBlocks
from kvolt.transfer.reads.progress import ProgressThread
from kvolt.transfer.reads.wire import CHUNK

SOON_S = 20.0
BLOCK = 8 << 20


@pytest.fixture
def progress() -> Iterator[ProgressThread]:
    found = ProgressThread("test", SystemClock())
    found.start()
    yield found
    found.close(lambda: None)


@pytest.fixture(params=["plain", "tls"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    if request.param == "tls":
        ours, theirs = with_tls(ours, theirs)
    ours.setblocking(False)
    theirs.settimeout(SOON_S)
    with ours, theirs:
        yield ours, theirs


def with_tls(ours: socket.socket, theirs: socket.socket) -> tuple[socket.socket, socket.socket]:
    contexts = tls_lab.of_worker()
    with ThreadPoolExecutor() as threads:
        served = threads.submit(contexts.server_context.wrap_socket, theirs, server_side=True)
        return contexts.client_context.wrap_socket(ours), served.result(SOON_S)


def in_thread(progress: ProgressThread, do: Callable[[], object]) -> None:
    done = threading.Event()
    progress.call_soon(lambda: (do(), done.set())[1])  # type: ignore[func-returns-value]
    assert done.wait(SOON_S)


def receive(link: socket.socket, num_bytes: int) -> bytes:
    got = bytearray()
    while len(got) < num_bytes:
        data = link.recv(num_bytes - len(got))
        assert data
        got += data
    return bytes(got)


def test_the_rest_of_a_chunk_that_is_stopped_is_zeros(
    progress: ProgressThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    """Its blocks may hold other data by then. Later chunks are intact."""
    slab = Slab.shared(3, BLOCK)
    slab.memory[:] = b"a" * len(slab.memory)
    senders: list[ChunkSender] = []
    stopped, other = (
        OutgoingBlocks(op, slab.memory, slab.pieces(np.array(blocks)), None, False)
        for op, blocks in ((1, [0, 1]), (2, [2]))
    )

    def begin() -> None:
        senders.append(ChunkSender(progress, pair[0], lambda: None))
        senders[0].send(stopped)
        senders[0].send(other)

    in_thread(progress, begin)
    assert CHUNK.unpack(receive(pair[1], CHUNK.size))[:3] == (1, 0, 1)
    begun = receive(pair[1], 1 << 20)
    assert begun == b"a" * len(begun)

    def stop() -> None:
        senders[0].drop(stopped)
        slab.memory[:BLOCK] = b"b" * BLOCK

    in_thread(progress, stop)
    rest = receive(pair[1], BLOCK - len(begun))
    assert b"b" not in rest
    assert rest.endswith(bytes(1 << 20))
    assert CHUNK.unpack(receive(pair[1], CHUNK.size))[:3] == (2, 0, 1)
    assert receive(pair[1], BLOCK) == b"a" * BLOCK
    in_thread(progress, senders[0].close)


class Taker:
    """Of one op, until it is over."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self.is_done = False
        self.num_asked = 0
        self.arrivals: list[int] = []

    def destination(self, first: int, count: int) -> tuple[memoryview, Pieces] | None:
        self.num_asked += 1
        return self.slab.memory, self.slab.pieces(np.arange(first, first + count))

    def on_chunk(self, first: int, count: int, sums: Sums | None) -> None:
        self.arrivals.append(first)


def test_blocks_of_a_cancelled_read_are_not_written(
    progress: ProgressThread, pair: tuple[socket.socket, socket.socket]
) -> None:
    """In the middle of a chunk, too, of which it was known where it goes."""
    taker = Taker(Slab.shared(2, 1 << 16))
    lost: list[Exception] = []
    receivers: list[ChunkReceiver] = []
    in_thread(
        progress,
        lambda: receivers.append(ChunkReceiver(progress, pair[0], {7: taker}.get, lost.append)),
    )
    head = CHUNK.pack(7, 0, 1, 1 << 16, 0)
    pair[1].sendall(head + b"x" * 1000)
    while taker.slab.memory[999] != ord("x"):
        threading.Event().wait(0.002)

    def stop() -> None:
        taker.is_done = True

    in_thread(progress, stop)
    pair[1].sendall(b"y" * ((1 << 16) - 1000))
    while not taker.arrivals:
        threading.Event().wait(0.002)
    assert b"y" not in bytes(taker.slab.memory)
    assert taker.num_asked == 1  # once for a chunk, however many calls it takes
    pair[1].sendall(CHUNK.pack(7, 0, 1, 1 << 15, 0))  # of another size than there is place for
    while not lost:
        threading.Event().wait(0.002)
    assert "chunk size differs" in str(lost[0])
    assert not receivers[0].is_open
