"""The object tier, beyond what any tier promises: others write and remove there, and it may be out of reach."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.kv.tiers.tier_lab import Clock, Device, device, keys, sequence

from kvolt.core.errors import ConfigError, TransferFailed
from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.object_store import blocks as object_blocks
from kvolt.kv.object_store import tier as object_tier
from kvolt.kv.object_store.blocks import ObjectBlocks
from kvolt.kv.object_store.tier import ObjectTier
from kvolt.kv.tiers import writer
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory


@asynccontextmanager
async def cache_over(
    memory: Device, url: str, num_host: int = 32, touches: int = 1, clock: Clock | None = None
) -> AsyncIterator[TieredCache]:
    tier = ObjectTier(ObjectBlocks(url, BlockShape.of(memory.slabs)), clock or Clock())
    cache = TieredCache.for_slabs(memory.slabs, num_host, [(tier, touches)])
    await cache.start()
    try:
        yield cache
        cache.host.check_integrity()
    finally:
        await cache.close()


async def until_stored(cache: TieredCache, num_blocks: int) -> None:
    async with asyncio.timeout(60):
        while cache.host.stats[Tier.OBJECT].num_stored < num_blocks:
            await asyncio.sleep(0.005)


async def test_one_worker_uses_what_another_has_written(tmp_path: Path) -> None:
    blocks = sequence("a", 20)
    with device() as memory:
        memory.compute(blocks, range(20))
        async with cache_over(memory, str(tmp_path)) as cache:
            await cache.offload(blocks, range(20))
            await until_stored(cache, 20)
        memory.wipe()
        async with cache_over(memory, str(tmp_path)) as other:
            assert other.host.find_tiers(keys(blocks)) == []
            assert not other.host.has_complete_index
            await other.host.lookup(keys(blocks))
            assert other.host.find_tiers(keys(blocks)) == [Tier.OBJECT] * 20
            fetched = await other.onboard(blocks, range(20))
            assert fetched.by_tier == ((Tier.OBJECT, 20),)
            assert all(memory.holds(block, index) for index, block in enumerate(blocks))
            assert other.host.find_tiers(keys(blocks)) == [Tier.HOST] * 20, "and it is nearer now"
            assert other.host.take_changes(), "of which routers hear"


async def test_two_writers_of_the_same_blocks_write_them_once(tmp_path: Path) -> None:
    blocks = sequence("a", 24)
    with device() as memory:
        memory.compute(blocks, range(24))
        async with cache_over(memory, str(tmp_path)) as one, cache_over(memory, str(tmp_path)) as two:
            await asyncio.gather(one.offload(blocks, range(24)), two.offload(blocks, range(24)))
            async with asyncio.timeout(60):
                while len(one.host.lower[0]) < 24 or len(two.host.lower[0]) < 24:
                    await asyncio.sleep(0.005)
            assert one.host.stats[Tier.OBJECT].num_stored + two.host.stats[Tier.OBJECT].num_stored == 24
        memory.wipe()
        async with cache_over(memory, str(tmp_path)) as third:
            await third.host.lookup(keys(blocks))
            assert (await third.onboard(blocks, range(24))).num_blocks == 24
            assert all(memory.holds(block, index) for index, block in enumerate(blocks))


async def test_what_others_removed_is_a_miss_from_there_on(tmp_path: Path) -> None:
    blocks = sequence("a", 10)
    with device() as memory:
        memory.compute(blocks, range(10))
        clock = Clock()
        async with cache_over(memory, str(tmp_path), clock=clock) as cache:
            await cache.offload(blocks, range(10))
            await until_stored(cache, 10)
            cache.host.slot_table.forget(cache.host.slot_table)
            [path] = tmp_path.rglob(blocks[6].key.hex())
            path.unlink()
            assert (await cache.onboard(blocks, range(20, 30))).num_blocks == 6
            assert cache.host.stats[Tier.OBJECT].failures["gone"] == 1
            assert cache.host.find_tiers(keys(blocks))[:6] == [Tier.HOST] * 6
            assert len(cache.host.find_tiers(keys(blocks))) == 6


async def test_what_is_not_there_is_not_asked_for_at_every_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    exist = ObjectBlocks.exist

    def counted(self: ObjectBlocks, keys: Sequence[BlockKey]) -> list[bool]:
        asked.append(len(keys))
        return exist(self, keys)

    monkeypatch.setattr(ObjectBlocks, "exist", counted)
    blocks = sequence("a", 300)
    with device() as memory:
        clock = Clock()
        async with cache_over(memory, str(tmp_path), clock=clock) as cache:
            for _ in range(3):
                await cache.host.lookup(keys(blocks))
            assert len(asked) == 1, "one round, of a few questions"
            assert asked[0] <= 16
            clock.now_s += 60.0
            await cache.host.lookup(keys(blocks))
            assert len(asked) == 2, "another worker may have written it"


async def test_a_block_is_written_when_it_is_seen_again(tmp_path: Path) -> None:
    blocks = sequence("a", 4)
    with device() as memory:
        memory.compute(blocks, range(4))
        async with cache_over(memory, str(tmp_path), touches=2) as cache:
            await cache.offload(blocks, range(4))
            await cache.offload(blocks[:2], range(2))
            await until_stored(cache, 2)
        assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
            block.key.hex() for block in blocks[:2]
        }


async def test_a_store_that_gets_nothing_because_of_its_touches_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = sequence("a", 3)
    with device() as memory, caplog.at_level(logging.WARNING):
        memory.compute(blocks, range(3))
        async with cache_over(memory, str(tmp_path), touches=2) as cache:
            await cache.offload(blocks, range(3))
            assert cache.host.num_skipped == {Tier.OBJECT: 3}
        assert "no block written to tier: tier=object skipped=3 touches=2" in caplog.text
        assert "tiers.object_touches" in caplog.text


async def test_a_store_that_does_not_answer_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A silent store delays one lookup by half a second, and writes are dropped."""
    monkeypatch.setattr(object_blocks, "_CALL_S", 0.5)
    monkeypatch.setattr(object_blocks, "_MAX_RETRIES", 0)
    monkeypatch.setattr(object_tier, "_LOOKUP_S", 0.2)
    for name, value in (("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "y"), ("REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    blocks = sequence("a", 4)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent, device() as memory:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        memory.compute(blocks, range(4))
        clock = Clock()
        clock.now_s = 100.0
        async with cache_over(memory, "s3://kv-blocks/x", clock=clock) as cache:
            await cache.host.lookup(keys(blocks))
            assert cache.host.find_tiers(keys(blocks)) == []
            with monkeypatch.context() as watched:
                watched.setattr(ObjectBlocks, "exist", lambda *_: pytest.fail("it is asked again at once"))
                await cache.host.lookup(keys(blocks))
            await cache.offload(blocks, range(4))
            async with asyncio.timeout(60):
                while not cache.host.stats[Tier.OBJECT].failures["unwritten"]:
                    await asyncio.sleep(0.01)
            assert (await cache.onboard(blocks, range(10, 14))).num_blocks == 4, "the host has them"


async def test_a_read_that_fails_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = sequence("a", 8)

    def fails(self: ObjectBlocks, *_: object) -> object:
        raise TransferFailed("the network is away", path=self.url, reason="away")

    clock = Clock()
    with device() as memory:
        memory.compute(blocks, range(8))
        async with cache_over(memory, str(tmp_path), clock=clock) as cache:
            await cache.offload(blocks, range(8))
            await until_stored(cache, 8)
            cache.host.slot_table.forget(cache.host.slot_table)
            with monkeypatch.context() as broken:
                broken.setattr(ObjectBlocks, "_get", fails)
                assert (await cache.onboard(blocks, range(20, 28))).num_blocks == 0
            assert cache.host.stats[Tier.OBJECT].failures["unread"] == 8
            clock.now_s += 60.0
            assert (await cache.onboard(blocks, range(20, 28))).num_blocks == 8, "it is back"


async def test_blocks_of_three_tiers_come_as_one_prefix(tmp_path: Path) -> None:
    blocks = sequence("a", 12)
    with device() as memory:
        memory.compute(blocks, range(12))
        shape = BlockShape.of(memory.slabs)
        disk = DiskTier(DiskFiles(tmp_path / "disk", shape, 64))
        store = ObjectTier(ObjectBlocks(str(tmp_path / "store"), shape), Clock())
        cache = TieredCache.for_slabs(memory.slabs, 16, [(disk, 1), (store, 1)])
        await cache.start()
        try:
            await cache.offload(blocks, range(12))
            await until_stored(cache, 12)
            async with asyncio.timeout(60):
                while len(disk) < 12:
                    await asyncio.sleep(0.005)
            cache.host.slot_table.forget(keys(blocks[4:]))
            disk.forget(keys(blocks[8:]))
            expected = [Tier.HOST] * 4 + [Tier.DISK] * 4 + [Tier.OBJECT] * 4
            assert cache.host.find_tiers(keys(blocks)) == expected
            memory.wipe()
            fetched = await cache.onboard(blocks, range(20, 32))
            assert dict(fetched.by_tier) == {Tier.HOST: 4, Tier.DISK: 4, Tier.OBJECT: 4}
            assert all(memory.holds(block, 20 + index) for index, block in enumerate(blocks))
            async with asyncio.timeout(60):
                while len(disk) < 12:  # what came from afar is worth the disk
                    await asyncio.sleep(0.005)
            cache.host.check_integrity()
        finally:
            await cache.close()


async def test_what_a_clear_overtakes_is_not_kept(tmp_path: Path) -> None:
    blocks = sequence("a", 4)
    with device() as memory:
        memory.compute(blocks, range(4))
        async with cache_over(memory, str(tmp_path)) as cache:
            await cache.offload(blocks, range(4))
            await until_stored(cache, 4)
            cache.host.slot_table.forget(cache.host.slot_table)
            fetching = asyncio.ensure_future(cache.onboard(blocks, range(4)))
            await asyncio.sleep(0)
            cache.host.clear()
            assert (await fetching).num_blocks == 0
            assert len(cache.host.slot_table) == 0


def test_no_store_of_that_name() -> None:
    with pytest.raises(ConfigError) as told:
        ObjectBlocks("nosuch://bucket/x", BlockShape(10))
    assert "s3://bucket/folder" in str(told.value.fields["remedy"])


async def test_a_store_that_is_away_is_not_read_from_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, clock, num_reads = sequence("a", 4), Clock(), 0

    def fails(self: ObjectBlocks, *_: object) -> object:
        nonlocal num_reads
        num_reads += 1
        raise TransferFailed("the network is away", path=self.url, reason="away")

    with device() as memory:
        memory.compute(blocks, range(4))
        async with cache_over(memory, str(tmp_path), clock=clock) as cache:
            await cache.offload(blocks, range(4))
            await until_stored(cache, 4)
            cache.host.slot_table.forget(cache.host.slot_table)
            with monkeypatch.context() as broken:
                broken.setattr(ObjectBlocks, "read", fails)
                for _ in range(3):
                    assert (await cache.onboard(blocks, range(4))).num_blocks == 0
                assert num_reads == 1
            clock.now_s += 60.0
            assert (await cache.onboard(blocks, range(4))).num_blocks == 4


async def test_a_spoiled_object_is_replaced_when_its_block_is_computed_again(tmp_path: Path) -> None:
    blocks = sequence("a", 3)
    with device() as memory:
        memory.compute(blocks, range(3))
        async with cache_over(memory, str(tmp_path)) as cache:
            await cache.offload(blocks, range(3))
            await until_stored(cache, 3)
            [path] = tmp_path.rglob(blocks[1].key.hex())
            path.write_bytes(b"spoiled")
            cache.host.slot_table.forget(cache.host.slot_table)
            assert (await cache.onboard(blocks, range(10, 13))).num_blocks == 1
            await cache.offload(blocks, range(3))
            await until_stored(cache, 4)
        memory.wipe()
        async with cache_over(memory, str(tmp_path)) as cache:
            await cache.host.lookup(keys(blocks))
            assert (await cache.onboard(blocks, range(3))).num_blocks == 3
            assert all(memory.holds(block, index) for index, block in enumerate(blocks))


async def test_what_a_store_lacks_and_the_host_has_does_not_hide_the_rest(tmp_path: Path) -> None:
    blocks = sequence("a", 6)
    with device() as memory:
        memory.compute(blocks, range(6))
        async with cache_over(memory, str(tmp_path)) as cache:
            await cache.offload(blocks, range(6))
            await until_stored(cache, 6)
        [path] = tmp_path.rglob(blocks[0].key.hex())
        path.unlink()
        async with cache_over(memory, str(tmp_path), touches=9) as cache:
            await cache.offload(blocks[:1], range(1))
            await cache.host.lookup(keys(blocks))
            assert cache.host.find_tiers(keys(blocks)) == [Tier.HOST] + [Tier.OBJECT] * 5


async def test_what_could_not_be_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_PAUSE_S", 0.01)
    blocks, put, num_failed = sequence("a", 4), ObjectBlocks._put, 0

    def fails_at_first(self: ObjectBlocks, *args: Any) -> bool:
        nonlocal num_failed
        if num_failed < 2:
            num_failed += 1
            raise TransferFailed("the network is away", path=self.url, reason="away")
        return put(self, *args)

    monkeypatch.setattr(ObjectBlocks, "_put", fails_at_first)
    with device() as memory:
        memory.compute(blocks, range(4))
        async with cache_over(memory, str(tmp_path)) as cache:
            await cache.offload(blocks, range(4))
            await until_stored(cache, 4)


def test_a_folder_is_made_for_who_keeps_blocks_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        object_blocks.open_store(str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    with pytest.raises(ConfigError, match="slash"):
        ObjectBlocks("s3:/bucket/x", BlockShape(10))


async def test_who_compresses_and_who_does_not_read_each_other(tmp_path: Path) -> None:
    blocks, num_bytes = sequence("a", 6), 1 << 16
    with device(block_bytes=num_bytes) as memory:
        shape = BlockShape.of(memory.slabs)
        slots = np.arange(6, dtype=np.int64)
        sources = SlotMemory(shape, 6)
        for slot in range(6):
            with sources.block(slot) as view:
                view[:] = np.random.default_rng(slot).normal(size=num_bytes // 4).astype(np.float32).tobytes()
        sums = sources.checksums(slots, keys(blocks)).tolist()
        packed, plain = ObjectBlocks(str(tmp_path), shape, is_packed=True), ObjectBlocks(str(tmp_path), shape)
        assert packed.write(keys(blocks)[:3], sums[:3], sources, slots[:3]) == [True] * 3
        assert plain.write(keys(blocks)[3:], sums[3:], sources, slots[3:]) == [True] * 3
        sizes = [next(tmp_path.rglob(block.key.hex())).stat().st_size for block in blocks]
        assert max(sizes[:3]) < 0.95 * min(sizes[3:])
        for reader in (packed, plain):
            target = SlotMemory(shape, 6)
            assert reader.read(keys(blocks), target, slots) == sums
            target.close()
        [path] = tmp_path.rglob(blocks[0].key.hex())
        path.write_bytes(path.read_bytes()[:-100])
        assert isinstance(plain.read(keys(blocks)[:1], sources, slots[:1])[0], object_blocks.CorruptObject)
        packed.close()
        plain.close()
        sources.close()
