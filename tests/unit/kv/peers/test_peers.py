"""Workers that give each other what their tiers have: right or not at all, and never for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.unit.kv.tiers.tier_lab import Clock, Device, device, keys, sequence
from tests.waits import MUST_HAPPEN_S

from kvolt.core.errors import InvalidRequest, Overloaded, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import Tier
from kvolt.core.request import KvSource
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.peers import server as peer_giving
from kvolt.kv.peers import tier as peer_tier
from kvolt.kv.peers.server import PeerServer
from kvolt.kv.peers.tier import PeerTier
from kvolt.kv.shared_pool.wire import FetchBlocks, FetchResult
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.lower_tier import LowerTier
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.transfer.agent import TransferAgent

GIVER, TAKER = InstanceId("giver"), InstanceId("taker")


class Peer:
    """A worker as others see it."""

    def __init__(self, memory: Device, clock: Clock, num_host: int, folder: Path | None) -> None:
        self.memory = memory
        self.agent = TransferAgent()
        self.others = PeerTier(self.agent, clock)
        lower: list[tuple[LowerTier, int]] = []
        if folder is not None:
            lower.append((DiskTier(DiskFiles(folder, BlockShape.of(memory.slabs), 64)), 1))
        self.cache = TieredCache.for_slabs(memory.slabs, num_host, [*lower, (self.others, 1)])
        self.giving = PeerServer(self.cache.host, self.agent)

    def add_sources(
        self, blocks: list[TierBlock], num_blocks: int | None = None, at: InstanceId = GIVER
    ) -> None:
        count = len(blocks) if num_blocks is None else num_blocks
        self.others.add_sources(keys(blocks), [KvSource(at, Tier.HOST, count)])


class Pair:
    def __init__(self, giver: Peer, taker: Peer) -> None:
        self.giver, self.taker = giver, taker
        self.asked: list[InstanceId] = []
        self.failure: Exception | None = None
        taker.others.connect(self.ask, TAKER)

    @asynccontextmanager
    async def ask(self, source: InstanceId, request: FetchBlocks) -> AsyncIterator[FetchResult]:
        self.asked.append(source)
        if self.failure is not None:
            raise self.failure
        async with aclosing(self.giver.giving.serve(request)) as answers:
            yield await anext(answers)


@contextmanager
def _memories() -> Iterator[tuple[Device, Device]]:
    with device() as one, device() as two:
        yield one, two


@asynccontextmanager
async def pair(
    clock: Clock | None = None, folder: Path | None = None, num_host: int = 32
) -> AsyncIterator[Pair]:
    clock = clock or Clock()
    with _memories() as (one, two):
        giver, taker = Peer(one, clock, num_host, folder), Peer(two, clock, 32, None)
        both = Pair(giver, taker)
        for each in (giver, taker):
            await each.cache.start()
        try:
            yield both
            for each in (giver, taker):
                each.cache.host.check_integrity()
                assert each.cache.host.clear() >= 0
                async with asyncio.timeout(
                    20
                ):  # but for what is being written to a disk, which goes after that
                    while len(each.cache.host.slot_table):
                        await asyncio.sleep(0.005)
        finally:
            for each in (giver, taker):
                each.agent.close()
                await each.cache.close()


async def test_what_one_has_the_other_takes() -> None:
    async with pair() as both:
        blocks = sequence("a", 10)
        both.giver.memory.compute(blocks, range(10))
        await both.giver.cache.offload(blocks, range(10))
        taker = both.taker
        assert taker.cache.host.find_tiers(keys(blocks)) == [], "no source was named"
        taker.add_sources(blocks)
        assert taker.cache.host.find_tiers(keys(blocks)) == [Tier.PEER] * 10
        found = await taker.cache.onboard(blocks, range(20, 30))
        assert found.by_tier == ((Tier.PEER, 10),)
        assert all(taker.memory.holds(block, 20 + index) for index, block in enumerate(blocks))
        assert taker.cache.host.find_tiers(keys(blocks)) == [Tier.HOST] * 10, "it has them itself now"
        assert both.giver.giving.num_served == 10
        assert taker.others.stats.num_loaded == 10


async def test_only_the_named_prefix_is_requested() -> None:
    async with pair() as both:
        blocks = sequence("a", 6)
        both.giver.memory.compute(blocks, range(6))
        await both.giver.cache.offload(blocks, range(6))
        both.taker.add_sources(blocks, 4)
        assert (await both.taker.cache.onboard(blocks, range(20, 26))).num_blocks == 4
        both.taker.add_sources(blocks, -3)
        both.taker.add_sources(blocks, 10**9)
        assert (await both.taker.cache.onboard(blocks, range(20, 26))).num_blocks == 6


async def test_what_the_giver_has_let_go_is_a_miss() -> None:
    async with pair() as both:
        blocks = sequence("a", 8)
        both.giver.memory.compute(blocks[:5], range(5))
        await both.giver.cache.offload(blocks[:5], range(5))
        both.taker.add_sources(blocks)
        assert (await both.taker.cache.onboard(blocks, range(20, 28))).num_blocks == 5
        assert both.taker.others.stats.failures["gone"] > 0
        assert both.taker.cache.host.find_tiers(keys(blocks)) == [Tier.HOST] * 5, "it is not asked for again"


async def test_blocks_come_from_the_givers_disk(tmp_path: Path) -> None:
    async with pair(folder=tmp_path, num_host=12) as both:
        first, second = sequence("a", 6), sequence("b", 12)
        both.giver.memory.compute(first, range(6))
        await both.giver.cache.offload(first, range(6))
        async with asyncio.timeout(30):
            while len(both.giver.cache.host.lower[0]) < 6:
                await asyncio.sleep(0.005)
        both.giver.memory.compute(second, range(6, 18))
        await both.giver.cache.offload(second, range(6, 18))
        assert Tier.DISK in both.giver.cache.host.find_tiers(keys(first))
        both.taker.add_sources(first)
        assert (await both.taker.cache.onboard(first, range(20, 26))).num_blocks == 6
        assert all(both.taker.memory.holds(block, 20 + index) for index, block in enumerate(first))


async def test_spoiled_bytes_are_a_miss() -> None:
    async with pair() as both:
        blocks = sequence("a", 6)
        both.giver.memory.compute(blocks, range(6))
        await both.giver.cache.offload(blocks, range(6))
        host = both.giver.cache.host
        with host.memory.block(host.slot_table.slot(blocks[2].key)) as data:
            data[11] ^= 1
        both.taker.add_sources(blocks)
        assert (await both.taker.cache.onboard(blocks, range(20, 26))).num_blocks == 2
        assert both.taker.others.stats.failures["corrupt"] == 1


@pytest.mark.parametrize("failure", [Unavailable("it has gone"), TimeoutError()])
async def test_who_does_not_answer_is_left_alone_for_a_while(failure: Exception) -> None:
    clock = Clock()
    async with pair(clock) as both:
        blocks = sequence("a", 4)
        both.giver.memory.compute(blocks, range(4))
        await both.giver.cache.offload(blocks, range(4))
        both.failure = failure
        both.taker.add_sources(blocks)
        assert (await both.taker.cache.onboard(blocks, range(20, 24))).num_blocks == 0
        both.failure = None
        both.taker.add_sources(blocks)
        assert (await both.taker.cache.onboard(blocks, range(20, 24))).num_blocks == 0
        num_asked = len(both.asked)
        clock.now_s = 11.0
        both.taker.add_sources(blocks)
        assert (await both.taker.cache.onboard(blocks, range(20, 24))).num_blocks == 4
        assert len(both.asked) == num_asked + 1


async def test_a_giver_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_tier, "_READ_S", 0.05)

    @asynccontextmanager
    async def hang(source: InstanceId, request: FetchBlocks) -> AsyncIterator[FetchResult]:
        await asyncio.sleep(3600)
        yield FetchResult((), ())

    async with pair() as both:
        both.taker.others.connect(hang, TAKER)
        blocks = sequence("a", 4)
        both.taker.add_sources(blocks)
        assert (await both.taker.cache.onboard(blocks, range(20, 24))).num_blocks == 0


async def test_a_worker_does_not_fetch_from_itself_or_in_turn() -> None:
    async with pair() as both:
        blocks = sequence("a", 4)
        both.taker.add_sources(blocks, at=TAKER)
        assert both.taker.cache.host.find_tiers(keys(blocks)) == []
        # Of what the taker only knows to be elsewhere it gives nothing.
        both.taker.add_sources(blocks)
        async with aclosing(both.taker.giving.serve(FetchBlocks(tuple(blocks)))) as answers:
            assert (await anext(answers)).checksums == ()
        assert both.asked == []


async def test_a_taker_that_goes_leaves_nothing_held() -> None:
    async with pair() as both:
        blocks = sequence("a", 4)
        both.giver.memory.compute(blocks, range(4))
        await both.giver.cache.offload(blocks, range(4))
        async with aclosing(both.giver.giving.serve(FetchBlocks(tuple(blocks)))) as answers:
            assert len((await anext(answers)).checksums) == 4
            assert both.giver.cache.host.clear() == 0, "they are held for who reads them"
            both.giver.cache.host.check_integrity()


async def test_too_many_at_a_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_giving, "_MAX_OPEN", 1)
    async with pair() as both:
        blocks = sequence("a", 4)
        both.giver.memory.compute(blocks, range(4))
        await both.giver.cache.offload(blocks, range(4))
        async with aclosing(both.giver.giving.serve(FetchBlocks(tuple(blocks)))) as first:
            await anext(first)
            with pytest.raises(Overloaded):
                async with aclosing(both.giver.giving.serve(FetchBlocks(()))) as second:
                    await anext(second)
            both.taker.add_sources(blocks)
            assert (await both.taker.cache.onboard(blocks, range(20, 24))).num_blocks == 0


async def test_what_is_known_of_others_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_tier, "_MAX_KNOWN", 10)
    async with pair() as both:
        for name in "abc":
            both.taker.add_sources(sequence(name, 8))
        assert len(both.taker.others) == 10
        assert both.taker.others.has(sequence("c", 8)[0].key)


async def test_who_is_left_alone_is_not_asked_for_anything() -> None:
    async with pair() as both:
        both.failure = Unavailable("it has gone")
        for name in "abc":
            both.taker.add_sources(sequence(name, 4))
        assert (await both.taker.cache.onboard(sequence("a", 4), range(20, 24))).num_blocks == 0
        assert len(both.taker.others) == 0
        assert len(both.asked) == 1


async def test_a_slow_peer_is_backed_off_also_on_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_tier, "_SLOW_READ_S", 0.02)

    @asynccontextmanager
    async def hang(source: InstanceId, request: FetchBlocks) -> AsyncIterator[FetchResult]:
        both.asked.append(source)
        await asyncio.sleep(3600)
        yield FetchResult((), ())

    async with pair() as both:
        both.taker.others.connect(hang, TAKER)
        blocks = sequence("a", 4)
        for _ in range(3):
            both.taker.add_sources(blocks)
            assert (await both.taker.cache.onboard(blocks, range(20, 24), 0.1)).num_blocks == 0
        assert len(both.asked) == 1


async def test_two_that_want_the_same_from_each_other_do_not_wait() -> None:
    async with pair() as both:
        giver, taker = both.giver, both.taker

        @asynccontextmanager
        async def back(source: InstanceId, request: FetchBlocks) -> AsyncIterator[FetchResult]:
            async with aclosing(taker.giving.serve(request)) as answers:
                yield await anext(answers)

        giver.others.connect(back, GIVER)
        blocks = sequence("a", 4)
        taker.add_sources(blocks)
        giver.add_sources(blocks, at=TAKER)
        async with asyncio.timeout(MUST_HAPPEN_S):
            found = await asyncio.gather(
                taker.cache.onboard(blocks, range(20, 24)), giver.cache.onboard(blocks, range(20, 24))
            )
        assert [each.num_blocks for each in found] == [0, 0]


async def test_blocks_of_another_shape_are_refused() -> None:
    async with pair() as both:
        blocks = sequence("a", 4)
        both.giver.memory.compute(blocks, range(4))
        await both.giver.cache.offload(blocks, range(4))
        request = FetchBlocks(tuple(blocks), BlockShape(17, 2))
        with pytest.raises(InvalidRequest, match="from 2"):
            async with aclosing(both.giver.giving.serve(request)) as answers:
                await anext(answers)


@pytest.mark.parametrize(
    "block",
    [
        (b"short", 1, None, None, 0),
        (b"x" * 16, -1, None, None, 0),
        (b"x" * 16, 1, b"", None, 0),
        (b"x" * 16, 1, None, -5, 0),
        (b"x" * 16, 1, None, None, -1),
    ],
)
def test_what_is_no_block_is_not_read(block: tuple[object, ...]) -> None:
    with pytest.raises(msgspec.MsgspecError):
        msgspec.msgpack.decode(
            msgspec.msgpack.encode({"type": "onboard", "blocks": [block]}), type=FetchBlocks
        )


async def test_a_giver_that_ends_gives_nothing() -> None:
    async with pair() as both:
        both.giver.giving.close()
        with pytest.raises(Unavailable):
            async with aclosing(both.giver.giving.serve(FetchBlocks(()))) as answers:
                await anext(answers)


async def test_others_hold_half_of_the_host_at_most() -> None:
    async with pair(num_host=16) as both:
        blocks = sequence("a", 12)
        both.giver.memory.compute(blocks, range(12))
        await both.giver.cache.offload(blocks, range(12))
        async with aclosing(both.giver.giving.serve(FetchBlocks(tuple(blocks)))) as answers:
            assert len((await anext(answers)).checksums) == 8


async def test_nothing_is_written_to_others() -> None:
    async with pair() as both:
        blocks = sequence("a", 4)
        both.taker.memory.compute(blocks, range(4))
        await both.taker.cache.offload(blocks, range(4))
        await asyncio.sleep(0.02)
        assert not len(both.giver.cache.host.slot_table)
        assert both.taker.others.stats.num_stored == 0
        assert both.taker.others.take_changes() == ()


async def test_a_wrong_answer_is_a_miss() -> None:
    @asynccontextmanager
    async def lie(source: InstanceId, request: FetchBlocks) -> AsyncIterator[FetchResult]:
        yield FetchResult((1, 2, 3), ())

    async with pair() as both:
        both.taker.others.connect(lie, TAKER)
        blocks = sequence("a", 4)
        both.taker.add_sources(blocks)
        assert (await both.taker.cache.onboard(blocks, range(20, 24))).num_blocks == 0
