"""Tiers change their size while they are used."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.kv.tiers.test_cache import cache_over, on_disk, until_on_disk
from tests.unit.kv.tiers.tier_lab import device, keys, sequence

from kvolt.core.errors import Unsupported
from kvolt.core.kv_events import Tier
from kvolt.kv.disk import files as disk
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.tiers import slot_memory


async def test_the_host_grows_and_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_memory, "_PART_BYTES", 4 * 8192)  # four blocks
    with device() as memory:
        async with cache_over(memory, num_host=8) as cache:
            blocks = sequence("a", 24)
            memory.compute(blocks, range(24))
            await cache.offload(blocks, range(24))
            assert len(cache.host.slot_table) == 8
            await cache.host.resize(Tier.HOST, 32)
            await cache.offload(blocks, range(24))
            assert len(cache.host.slot_table) == 24
            assert cache.host.memory.num_bytes >= 24 * 8192
            memory.wipe()
            assert (await cache.onboard(blocks, range(24))).num_blocks == 24
            assert all(memory.holds(block, index) for index, block in enumerate(blocks))

            await cache.host.resize(Tier.HOST, 5)
            assert len(cache.host.slot_table) == 5
            cache.host.check_integrity()
            memory.wipe()
            found = await cache.onboard(blocks, range(24))
            assert found.num_blocks == 5, "what is left is a prefix, and whole"
            assert all(memory.holds(block, index) for index, block in enumerate(blocks[:5]))
            for number in range(4):  # what is left moves down as blocks come and go
                more = sequence(f"more{number}", 5)
                memory.compute(more, range(5))
                await cache.offload(more, range(5))
            assert cache.host.memory.num_bytes == 8 * 8192, "the rest of the memory is given back"
            memory.wipe()
            assert (await cache.onboard(more, range(5))).num_blocks == 5
            assert all(memory.holds(block, index) for index, block in enumerate(more))


async def test_a_host_that_shrinks_keeps_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_memory, "_PART_BYTES", 4 * 8192)
    with device() as memory:
        async with cache_over(memory, num_host=16) as cache:
            blocks = sequence("a", 12)
            memory.compute(blocks, range(12))
            await cache.offload(blocks, range(12))
            held = await cache.host.onboard(blocks)
            await cache.host.resize(Tier.HOST, 4)
            assert len(cache.host.slot_table) == 12
            assert cache.host.memory.num_bytes == 12 * 8192
            cache.host.release(held.keys)
            other = sequence("b", 1)
            await cache.offload(other, [0])
            assert len(cache.host.slot_table) <= 4
            cache.host.check_integrity()


async def test_the_disk_grows_and_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_FILE_BYTES", 4 * 8192)
    with device() as memory:
        async with cache_over(memory, num_host=32, folder=tmp_path, num_disk=6) as cache:
            blocks = sequence("a", 18)
            memory.compute(blocks, range(18))
            await cache.offload(blocks, range(18))
            await until_on_disk(cache, 6)
            await cache.host.resize(Tier.DISK, 20)
            await cache.offload(blocks, range(18))
            await until_on_disk(cache, 18)
            num_files = len(list(tmp_path.rglob("blocks-*")))
            assert num_files == 5

            await cache.host.resize(Tier.DISK, 3)
            async with asyncio.timeout(60):
                while len(on_disk(cache)) > 3 or cache.host.lower[0].has_pending_work:
                    await asyncio.sleep(0.005)
            for number in range(3):  # what is left moves down as blocks come and go
                more = sequence(f"more{number}", 3)
                memory.compute(more, range(3))
                await cache.offload(more, range(3))
                async with asyncio.timeout(60):
                    while not on_disk(cache).has(more[-1].key):
                        await asyncio.sleep(0.005)
            last = more
        assert len(list(tmp_path.rglob("blocks-*"))) == 1
        memory.wipe()
        async with cache_over(memory, folder=tmp_path, num_disk=3) as cache:
            assert (await cache.onboard(last, range(3))).num_blocks == 3
            assert all(memory.holds(block, index) for index, block in enumerate(last))
            tier = cache.host.lower[0]
            assert isinstance(tier, DiskTier)
            assert tier.num_slots == 3


async def test_a_tier_that_is_not_there_has_no_size() -> None:
    with device() as memory:
        async with cache_over(memory) as cache:
            with pytest.raises(Unsupported):
                await cache.host.resize(Tier.DISK, 10)
            assert cache.host.find_tiers(keys(sequence("a", 2))) == []
