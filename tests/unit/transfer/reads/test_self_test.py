"""Self-tests: agents that have read from each other know how fast that goes, and say where it could go faster."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

import numpy as np
import pytest

from kvolt.core.errors import Unavailable
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.memory.device_memory import MemoryKind
from kvolt.transfer.memory.slabs import Slab, SlabInfo
from kvolt.transfer.paths import fallbacks, nixl_library
from kvolt.transfer.paths.capabilities import MachineFacts, capabilities_of
from kvolt.transfer.paths.link_speeds import LARGE_BYTES, SMALL_BYTES
from kvolt.transfer.paths.path_watch import PathWatch
from kvolt.transfer.peer.link import PeerLink
from kvolt.transfer.reads import self_test
from kvolt.transfer.reads.peer_paths import PeerPaths
from kvolt.transfer.reads.progress import ProgressThread, Timer
from kvolt.transfer.reads.read_op import ReadOp
from kvolt.transfer.reads.read_request import new_read_request
from kvolt.transfer.reads.self_test import BLOCK_BYTES, LIMIT_S, NUM_BLOCKS, SelfTest, new_slab
from kvolt.transfer.reads.wire import Address, Ticket, decode_ticket, encode_ticket

SOON_S = 20.0
FACTS = MachineFacts()
ADDRESS = Address("agent", "127.0.0.1", 1, "")
TESTS = TransferOptions(self_test=True)


class Pair:
    """Two agents: one reads from the other."""

    def __init__(self, theirs: TransferOptions, mine: TransferOptions) -> None:
        self.there, self.here = (TransferAgent(options, facts=FACTS) for options in (theirs, mine))
        self.source, self.target = (Slab.shared(128, BLOCK_BYTES) for _ in range(2))
        self.tested = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.here.paths.on_tested = lambda: loop.call_soon_threadsafe(self.tested.set)

    async def read(self, num_blocks: int = 1) -> str:
        offer = self.there.offer(self.source, range(num_blocks), SOON_S)
        path = await self.here.read(offer.ticket, self.target, range(num_blocks), SOON_S)
        await offer
        return path

    async def tested_links(self) -> set[str]:
        await asyncio.wait_for(self.tested.wait(), SOON_S)
        return set(self.here.paths.links())


@asynccontextmanager
async def pair(theirs: TransferOptions = TESTS, mine: TransferOptions = TESTS) -> AsyncIterator[Pair]:
    made = Pair(theirs, mine)
    yield made
    made.here.close()
    made.there.close()
    made.source.close()
    made.target.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy machines finish their tests, too."""
    monkeypatch.setattr(self_test, "LIMIT_S", SOON_S)
    monkeypatch.setattr(self_test, "_SLOW_S", SOON_S)


async def test_the_first_read_brings_a_test_that_measures_the_path() -> None:
    async with pair() as both:
        assert await both.read() == "shm"
        assert await both.tested_links() == {"shm@127.0.0.1"}
        link = both.here.paths.links()["shm@127.0.0.1"]
        assert link.bytes_per_s > 0
        assert 0 < link.latency_s < SOON_S
        assert both.here.paths.slow_paths() == {}


async def test_tcp_in_use_is_measured_and_logged_with_its_cause(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fallbacks, "MIN_SPEEDUP", 0.0)  # loopback may be as fast as memory is assumed to be
    theirs = TransferOptions(self_test=True, shared_memory=False)
    with caplog.at_level(logging.WARNING):
        async with pair(theirs) as both:
            assert await both.read() == "tcp"
            assert await both.tested_links() == {"tcp@127.0.0.1"}
            assert both.here.paths.slow_paths() == {("tcp", "shm"): 1}
            assert await both.read() == "tcp"
            assert both.here.paths.slow_paths() == {("tcp", "shm"): 1}
    (record,) = caplog.records
    assert "shm at the source: shared memory is turned off" in record.getMessage()


async def test_a_test_is_made_once_for_a_peer() -> None:
    async with pair() as both:
        await both.read()
        await both.tested_links()
        both.tested.clear()
        for _ in range(3):
            await both.read()
        await both.read(NUM_BLOCKS)
        assert not both.tested.is_set()


async def test_real_reads_are_measured_without_a_test() -> None:
    async with pair(TransferOptions(), TransferOptions()) as both:
        await both.read(NUM_BLOCKS)
        assert set(both.here.paths.links()) == {"shm@127.0.0.1"}
        assert both.there.paths.links() == {}


async def test_a_read_that_did_not_come_whole_tells_nothing() -> None:
    async with pair(TransferOptions(), TransferOptions()) as both:
        blocks = list(range(NUM_BLOCKS))
        offer = both.there.offer(both.source, blocks, SOON_S, seeds=bytes(8 * NUM_BLOCKS))
        read = both.here.read(offer.ticket, both.target, blocks, SOON_S, seeds=b"x" * 8 * NUM_BLOCKS)
        await read.wait_done()
        assert both.here.paths.links() == {}


async def test_a_peer_that_does_not_let_itself_be_tested_is_read_from_all_the_same() -> None:
    async with pair(theirs=TransferOptions()) as both:
        assert await both.read() == "shm"
        assert await both.tested_links() == set()
        assert await both.read() == "shm"


async def test_the_test_slab_is_offered_again_after_another_read() -> None:
    async with pair(mine=TransferOptions()) as both:
        offer = both.there.offer(both.source, [0], SOON_S)
        known = decode_ticket(offer.ticket)
        stolen = Ticket(known.address, self_test.SECRET, known.slab, NUM_BLOCKS)
        blocks = range(NUM_BLOCKS)
        for _ in range(2):
            await both.here.read(encode_ticket(stolen), both.target, blocks, SOON_S)
            both.here.decline(encode_ticket(stolen))
        assert await both.read() == "shm"
        offer.cancel()


@pytest.mark.skipif(nixl_library.find_package() is None, reason="NIXL is not installed")
async def test_nixl_is_measured_where_it_is_on_though_it_is_not_taken() -> None:
    options = TransferOptions(self_test=True, nixl=True)
    async with pair(options, options) as both:
        assert await both.read() == "shm"
        assert await both.tested_links() == {"shm@127.0.0.1", "nixl@127.0.0.1"}


def test_the_sizes_of_reads_tell_something() -> None:
    assert SMALL_BYTES >= BLOCK_BYTES
    assert NUM_BLOCKS * BLOCK_BYTES >= LARGE_BYTES


def test_without_memory_to_share_a_test_reads_private_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("os.memfd_create", refuse)
    slab = new_slab()
    assert (slab.num_blocks, slab.descriptor) == (NUM_BLOCKS, None)


# --- by hand, with a link that does nothing by itself


class Bench:
    """A Progress whose time stands still, and a link that keeps what it is asked for."""

    def __init__(self, *paths: str) -> None:
        self.time = 0.0
        self.calls: deque[Callable[[], None]] = deque()
        self.timers: list[Timer] = []
        self.asked: list[tuple[str, int]] = []
        self.read_op: ReadOp | None = None
        self.num_done = 0
        self.is_busy = False
        self.test = SelfTest(cast("ProgressThread", self), self, ADDRESS, paths, self._done)
        self.test.start()

    def _done(self) -> None:
        self.num_done += 1

    def now(self) -> float:
        return self.time

    def call_at(self, when: float, function: Callable[[], None]) -> Timer:
        self.timers.append(Timer(when, function))
        return self.timers[-1]

    def call_soon(self, function: Callable[[], None]) -> bool:
        self.calls.append(function)
        return True

    def read(self, read_op: ReadOp) -> None:
        read_op.started_at = self.time
        self.asked.append((read_op.forced_path, read_op.request.num_blocks))
        self.read_op = read_op

    def end_read(self, op: int, is_whole: bool) -> None:
        assert not is_whole, "what tests read stays"

    def forget_read(self, op: int) -> None: ...

    def end(self, path: str, took_s: float = 0.001, fails: bool = False) -> None:
        """The read that is under way."""
        assert self.read_op is not None
        read_op, self.read_op = self.read_op, None
        read_op.start(self, 1, path)
        self.time += took_s
        read_op.on_mover_stopped(Unavailable("gone", reason="test") if fails else None)
        while self.calls:
            self.calls.popleft()()

    @property
    def sizes(self) -> list[int]:
        return [size for _, size in self.asked]


def test_a_path_is_read_four_times() -> None:
    bench = Bench("shm")
    while bench.read_op is not None:
        bench.end("shm")
    assert bench.sizes == [2, 1, NUM_BLOCKS, NUM_BLOCKS]
    assert bench.num_done == 1
    assert all(timer.callback is None for timer in bench.timers)


def test_one_path_is_read_after_the_other() -> None:
    bench = Bench("nixl", "shm")
    while bench.read_op is not None:
        bench.end(bench.read_op.forced_path)
    assert [path for path, _ in bench.asked] == ["nixl"] * 4 + ["shm"] * 4
    assert bench.num_done == 1


def test_a_path_that_fails_is_left_for_the_next() -> None:
    bench = Bench("nixl", "shm")
    bench.end("nixl", fails=True)
    while bench.read_op is not None:
        bench.end("shm")
    assert [path for path, _ in bench.asked] == ["nixl"] + ["shm"] * 4
    assert bench.num_done == 1


def test_a_slow_link_is_not_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_SLOW_S", 0.02)
    bench = Bench("tcp")
    for took_s in (0.001, 0.001, 0.5):
        bench.end("tcp", took_s)
    assert (bench.read_op, bench.num_done) == (None, 1)
    assert np.sum(bench.sizes) == NUM_BLOCKS + 3


def test_a_read_that_fails_ends_the_test() -> None:
    bench = Bench("nixl")
    bench.end("nixl", fails=True)
    assert (bench.sizes, bench.num_done) == ([2], 1)


def test_a_test_that_takes_too_long_is_over_and_moves_nothing_any_more() -> None:
    bench = Bench("tcp")
    bench.end("tcp")
    read_op = bench.read_op
    assert read_op is not None
    (timer,) = bench.timers
    assert timer.when == SOON_S > LIMIT_S
    assert timer.callback is not None
    timer.callback()
    assert read_op.is_done
    bench.calls.popleft()()
    assert (bench.num_done, len(bench.asked)) == (1, 2)


def test_a_test_that_is_late_between_two_reads_begins_no_other() -> None:
    bench = Bench("tcp")
    assert bench.read_op is not None
    bench.read_op.on_mover_stopped(None)
    assert bench.timers[0].callback is not None
    bench.timers[0].callback()
    bench.calls.popleft()()
    assert (bench.num_done, len(bench.asked)) == (1, 1)


def complete_read() -> ReadOp:
    info = SlabInfo(number=0, kind=MemoryKind.SHARED, block_bytes=64, num_blocks=1)
    ticket = Ticket(ADDRESS, b"1", info, 1)
    read_op = ReadOp(
        new_read_request(ticket, Slab(memoryview(bytearray(64)), 64), np.zeros(1, np.int64)), lambda _: None
    )
    read_op.path = "shm"
    read_op.on_mover_stopped(None)
    return read_op


def test_the_test_waits_until_nothing_else_is_read_and_is_begun_once() -> None:
    bench = Bench()
    can = capabilities_of(FACTS)
    paths = PeerPaths(
        PathWatch("h", "a", can),
        cast("ProgressThread", bench),
        cast("PeerLink", bench),
        ADDRESS,
        needs_test=True,
    )
    paths.on_read_done(complete_read())  # before the Welcome: the peer is unknown
    paths.on_welcome(can, is_near=True)
    bench.is_busy = True
    paths.on_read_done(complete_read())
    assert not bench.calls
    bench.is_busy = False
    paths.on_read_done(complete_read())
    paths.on_read_done(complete_read())
    assert len(bench.calls) == 1


def test_a_peer_that_does_not_say_what_it_can_is_not_tested() -> None:
    bench = Bench()
    watch = PathWatch("h", "a", capabilities_of(FACTS))
    paths = PeerPaths(watch, cast("ProgressThread", bench), cast("PeerLink", bench), ADDRESS, needs_test=True)
    paths.on_welcome(None, is_near=True)
    paths.on_read_done(complete_read())
    assert not bench.calls
    assert watch.slow_paths() == {}
