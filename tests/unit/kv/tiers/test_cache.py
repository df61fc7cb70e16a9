"""Blocks go down the tiers and come back as they were, or not at all."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.unit.kv.tiers.tier_lab import Device, device, keys, sequence

from kvolt.core.kv_events import Removed, Stored, Tier
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.tiers import writer as writer_module
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.slot_table import SlotTable
from kvolt.transfer.memory.pieces import Sums
from kvolt.transfer.memory.slabs import Numbers


@asynccontextmanager
async def cache_over(
    memory: Device, num_host: int = 16, folder: Path | None = None, num_disk: int = 64, disk_touches: int = 1
) -> AsyncIterator[TieredCache]:
    lower = []
    if folder is not None:
        files = DiskFiles(folder, BlockShape.of(memory.slabs), num_disk)
        lower.append((DiskTier(files), disk_touches))
    cache = TieredCache.for_slabs(memory.slabs, num_host, lower)
    await cache.start()
    try:
        yield cache
        cache.host.check_integrity()
    finally:
        await cache.close()


def on_disk(cache: TieredCache) -> SlotTable:
    [tier] = cache.host.lower
    assert isinstance(tier, DiskTier)
    return tier.slot_table


async def until_on_disk(cache: TieredCache, num_blocks: int) -> None:
    async with asyncio.timeout(20):
        while len(on_disk(cache)) < num_blocks:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("num_ranks", [1, 3])
async def test_blocks_come_back_from_the_host(num_ranks: int) -> None:
    with device(num_ranks=num_ranks) as memory:
        async with cache_over(memory) as cache:
            blocks = sequence("a", 10)
            memory.compute(blocks, range(10))
            assert await cache.offload(blocks, range(10)) == 10
            assert await cache.offload(blocks, range(10)) == 0, "they are here already"
            memory.wipe()
            fetched = await cache.onboard(blocks, range(30, 40))
            assert fetched.num_blocks == 10
            assert fetched.by_tier == ((Tier.HOST, 10),)
            assert all(memory.holds(block, 30 + index) for index, block in enumerate(blocks))


async def test_blocks_come_back_from_the_disk_when_the_host_has_others(tmp_path: Path) -> None:
    with device() as memory:
        async with cache_over(memory, num_host=8, folder=tmp_path) as cache:
            first = sequence("a", 6)
            memory.compute(first, range(6))
            await cache.offload(first, range(6))
            await until_on_disk(cache, 6)
            second = sequence("b", 8)
            memory.compute(second, range(10, 18))
            await cache.offload(second, range(10, 18))
            assert cache.host.find_tiers(keys(first)) == [Tier.DISK] * 6
            fetched = await cache.onboard(first, range(30, 36))
            assert fetched.num_blocks == 6
            assert fetched.by_tier == ((Tier.DISK, 6),)
            assert all(memory.holds(block, 30 + index) for index, block in enumerate(first))


async def test_the_disk_is_found_again_by_the_next_process(tmp_path: Path) -> None:
    with device() as memory:
        blocks = sequence("a", 12)
        memory.compute(blocks, range(12))
        async with cache_over(memory, folder=tmp_path) as cache:
            await cache.offload(blocks, range(12))
        memory.wipe()
        async with cache_over(memory, folder=tmp_path) as cache:
            assert cache.host.find_tiers(keys(blocks)) == [Tier.DISK] * 12
            stored = [change for change in cache.host.take_changes() if isinstance(change, Stored)]
            assert sum(change.num_blocks for change in stored) == 12
            assert {change.tier for change in stored} == {Tier.DISK}
            assert (await cache.onboard(blocks, range(12))).num_blocks == 12
            assert all(memory.holds(block, index) for index, block in enumerate(blocks))


async def test_a_disk_that_is_larger_or_smaller_the_next_time_keeps_what_it_can(tmp_path: Path) -> None:
    with device() as memory:
        blocks = sequence("a", 12)
        memory.compute(blocks, range(12))
        async with cache_over(memory, folder=tmp_path, num_disk=12) as cache:
            await cache.offload(blocks, range(12))
        for num_disk, num_found in ((40, 12), (7, 7), (40, 7)):
            memory.wipe()
            async with cache_over(memory, folder=tmp_path, num_disk=num_disk) as cache:
                assert len(on_disk(cache)) == num_found
                present = [block for block in blocks if on_disk(cache).has(block.key)]
                assert (await cache.onboard(present, range(num_found))).num_blocks == num_found
                assert all(memory.holds(block, index) for index, block in enumerate(present))


async def test_a_prefix_comes_from_wherever_each_block_lies(tmp_path: Path) -> None:
    with device() as memory:
        async with cache_over(memory, num_host=4, folder=tmp_path) as cache:
            blocks = sequence("a", 12)
            memory.compute(blocks, range(12))
            for start in range(0, 12, 4):
                await cache.offload(blocks[start : start + 4], range(start, start + 4))
                await until_on_disk(cache, start + 4)
            assert cache.host.find_tiers(keys(blocks)) == [Tier.DISK] * 8 + [Tier.HOST] * 4
            memory.wipe()
            fetched = await cache.onboard(blocks, range(20, 32))
            assert fetched.num_blocks == 12, "a host of four slots is enough to onboard twelve blocks"
            assert all(memory.holds(block, 20 + index) for index, block in enumerate(blocks))


def flip_a_bit(cache: TieredCache, slot: int) -> None:
    with cache.host.memory.block(slot) as block:
        block[77] ^= 4


@pytest.mark.parametrize("num_good", [0, 2, 4, 7, 9, 11])
async def test_a_miss_in_any_part_ends_what_comes(num_good: int) -> None:
    """The next part is already in flight when the error is detected; it is discarded and released."""
    with device() as memory:
        async with cache_over(memory, num_host=16) as cache:
            blocks = sequence("a", 12)
            memory.compute(blocks, range(12))
            assert cache.host.batch_blocks == 4
            assert await cache.offload(blocks, range(12)) == 12
            flip_a_bit(cache, cache.host.slot_table.slot(blocks[num_good].key))
            assert (await cache.onboard(blocks, range(20, 32))).num_blocks == num_good
            assert all(memory.holds(block, 20 + index) for index, block in enumerate(blocks[:num_good]))
            cache.host.check_integrity()
            assert cache.host.clear() == 11, "the remaining blocks are not held"


async def test_a_miss_below_ends_what_comes(tmp_path: Path) -> None:
    with device() as memory:
        async with cache_over(memory, num_host=16, folder=tmp_path) as cache:
            blocks = sequence("a", 12)
            memory.compute(blocks, range(12))
            await cache.offload(blocks, range(12))
            await until_on_disk(cache, 12)
            cache.host.slot_table.forget(keys(blocks[6:7]))
            cache.host.lower[0].forget(keys(blocks[6:7]))
            assert (await cache.onboard(blocks, range(20, 32))).num_blocks == 6


async def test_load_time_is_estimated_from_store_time() -> None:
    with device() as memory:
        async with cache_over(memory) as cache:
            blocks = sequence("a", 4)
            memory.compute(blocks, range(4))
            guessed_s = cache.host.block_s(Tier.HOST)
            await cache.offload(blocks, range(4))
            stats = cache.host.stats[Tier.HOST]
            assert cache.host.block_s(Tier.HOST) == stats.store_block_s != guessed_s
            await cache.onboard(blocks, range(20, 24))
            assert cache.host.block_s(Tier.HOST) == stats.block_s


async def test_a_flipped_bit_in_the_host_is_a_miss() -> None:
    with device() as memory:
        async with cache_over(memory) as cache:
            blocks = sequence("a", 6)
            memory.compute(blocks, range(6))
            await cache.offload(blocks, range(6))
            slot = cache.host.slot_table.slot(blocks[3].key)
            flip_a_bit(cache, slot)
            assert (await cache.onboard(blocks, range(20, 26))).num_blocks == 3
            assert cache.host.find_tiers(keys(blocks)) == [Tier.HOST] * 3, "it is not indexed any more"
            assert cache.host.stats[Tier.HOST].failures["corrupt"] == 1


@pytest.mark.parametrize("spoil", ["flip", "cut", "gone"])
async def test_a_spoiled_file_is_a_miss_from_there_on(tmp_path: Path, spoil: str) -> None:
    with device() as memory:
        blocks = sequence("a", 8)
        memory.compute(blocks, range(8))
        async with cache_over(memory, folder=tmp_path) as cache:
            await cache.offload(blocks, range(8))
        [path] = tmp_path.rglob("blocks-0000")
        slot_bytes = BlockShape.of(memory.slabs).slot_bytes
        if spoil == "flip":
            data = bytearray(path.read_bytes())
            data[5 * slot_bytes + 4999] ^= 1
            path.write_bytes(data)
        elif spoil == "cut":
            os.truncate(path, 5 * slot_bytes)
        else:
            path.unlink()
        memory.wipe()
        async with cache_over(memory, folder=tmp_path) as cache:
            num_good = 0 if spoil == "gone" else 5
            assert (await cache.onboard(blocks, range(8))).num_blocks == num_good
            assert all(memory.holds(block, index) for index, block in enumerate(blocks[:num_good]))
            memory.compute(blocks, range(8))
            await cache.offload(blocks, range(8))
            assert cache.host.find_tiers(keys(blocks)) == [Tier.HOST] * 8, "computed again, it is kept again"


async def test_a_read_error_is_a_miss_of_that_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with device() as memory:
        blocks = sequence("a", 8)
        memory.compute(blocks, range(8))
        async with cache_over(memory, folder=tmp_path) as cache:
            await cache.offload(blocks, range(8))
        memory.wipe()
        async with cache_over(memory, folder=tmp_path) as cache:
            bad = on_disk(cache).slot(blocks[2].key) * cache.host.shape.slot_bytes
            read = os.preadv

            def failing(descriptor: int, views: list[memoryview], at: int) -> int:
                if at <= bad < at + sum(map(len, views)):
                    raise OSError(errno.EIO, "the medium is bad")
                return read(descriptor, views, at)

            monkeypatch.setattr(os, "preadv", failing)
            assert (await cache.onboard(blocks, range(8))).num_blocks == 2
            assert all(memory.holds(block, index) for index, block in enumerate(blocks[:2]))


async def test_a_full_disk_costs_nothing_but_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, views: list[memoryview], at: int) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with device() as memory:
        async with cache_over(memory, folder=tmp_path) as cache:
            monkeypatch.setattr(os, "pwritev", full)
            blocks = sequence("a", 8)
            memory.compute(blocks, range(8))
            await cache.offload(blocks, range(8))
            async with asyncio.timeout(20):
                while not cache.host.stats[Tier.DISK].failures["no_room"]:
                    await asyncio.sleep(0.005)
            assert (await cache.onboard(blocks, range(20, 28))).num_blocks == 8
            assert len(on_disk(cache)) == 0


async def test_a_full_disk_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, views: list[memoryview], at: int) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(writer_module, "_PAUSE_S", 0.01)
    with device() as memory:
        async with cache_over(memory, folder=tmp_path) as cache:
            blocks = sequence("a", 8)
            memory.compute(blocks, range(8))
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", full)
                await cache.offload(blocks, range(8))
                async with asyncio.timeout(20):
                    while cache.host.stats[Tier.DISK].failures["no_room"] < 24:
                        await asyncio.sleep(0.005)
                assert caplog.text.count("write rejected") == 1
            await until_on_disk(cache, 8)


async def test_a_full_tier_lets_go_of_what_was_asked_for_longest_ago(tmp_path: Path) -> None:
    with device() as memory:
        async with cache_over(memory, num_host=8, folder=tmp_path, num_disk=12) as cache:
            for name in "abc":
                blocks = sequence(name, 4)
                memory.compute(blocks, range(4))
                await cache.offload(blocks, range(4))
                await until_on_disk(cache, 4 if name == "a" else 8 if name == "b" else 12)
            cache.host.take_changes()
            assert (await cache.onboard(sequence("a", 4), range(4))).num_blocks == 4
            blocks = sequence("d", 4)
            memory.compute(blocks, range(4))
            await cache.offload(blocks, range(4))
            async with asyncio.timeout(20):
                while not on_disk(cache).has(blocks[3].key):
                    await asyncio.sleep(0.005)
            assert on_disk(cache).match(keys(sequence("a", 4))) == 4
            assert on_disk(cache).match(keys(sequence("b", 4))) == 0
            removed = [change for change in cache.host.take_changes() if isinstance(change, Removed)]
            gone = {each for change in removed if change.tier is Tier.DISK for each in change.sequence_hashes}
            assert gone == {block.sequence_hash for block in sequence("b", 4)}


async def test_what_is_seen_once_is_not_written_where_that_is_wanted(tmp_path: Path) -> None:
    with device() as memory:
        async with cache_over(memory, folder=tmp_path, disk_touches=2) as cache:
            blocks = sequence("a", 4)
            memory.compute(blocks, range(4))
            await cache.offload(blocks, range(4))
            await cache.offload(blocks[:2], range(2))
            await until_on_disk(cache, 2)
            assert on_disk(cache).match(keys(blocks)) == 2


async def test_two_who_want_the_same_blocks_read_them_once(tmp_path: Path) -> None:
    with device() as memory:
        blocks = sequence("a", 8)
        memory.compute(blocks, range(8))
        async with cache_over(memory, folder=tmp_path) as cache:
            await cache.offload(blocks, range(8))
        async with cache_over(memory, folder=tmp_path) as cache:
            found = await asyncio.gather(
                cache.onboard(blocks, range(20, 28)), cache.onboard(blocks, range(30, 38))
            )
            assert [each.num_blocks for each in found] == [8, 8]
            assert cache.host.stats[Tier.DISK].num_loaded == 8
            for start in (20, 30):
                assert all(memory.holds(block, start + index) for index, block in enumerate(blocks))


async def test_who_is_cancelled_leaves_nothing_behind(tmp_path: Path) -> None:
    with device() as memory:
        blocks = sequence("a", 8)
        memory.compute(blocks, range(8))
        async with cache_over(memory, folder=tmp_path) as cache:
            await cache.offload(blocks, range(8))
        async with cache_over(memory, folder=tmp_path) as cache:
            for delay_s in (0.0, 0.001, 0.003):
                fetching = asyncio.ensure_future(cache.onboard(blocks, range(20, 28)))
                await asyncio.sleep(delay_s)
                fetching.cancel()
                await asyncio.wait([fetching])
                cache.host.check_integrity()
                async with asyncio.timeout(60):
                    while cache.host._loading:  # what was read ahead ends by itself
                        await asyncio.sleep(0.001)
            assert (await cache.onboard(blocks, range(20, 28))).num_blocks == 8


async def test_two_owners_of_one_folder_have_a_part_each(tmp_path: Path) -> None:
    with device() as memory:
        async with cache_over(memory, folder=tmp_path) as one, cache_over(memory, folder=tmp_path) as other:
            blocks = sequence("a", 4)
            memory.compute(blocks, range(4))
            await one.offload(blocks, range(4))
            await until_on_disk(one, 4)
            assert other.host.find_tiers(keys(blocks)) == []


async def test_what_was_let_go_while_it_was_copied_is_not_kept() -> None:
    """The bytes may be another prompt's, and their checksum right."""
    with device() as memory:
        async with cache_over(memory) as cache:
            blocks = sequence("a", 4)
            memory.compute(blocks, range(4))
            assert await cache.offload(blocks, range(4), lambda: False) == 0
            assert not cache.host.stats[Tier.HOST].failures, "they were not even looked at"
            are_held = iter([True, False])
            assert await cache.offload(blocks, range(4), lambda: next(are_held)) == 0
            assert cache.host.find_tiers(keys(blocks)) == []
            assert cache.host.stats[Tier.HOST].failures["late"] == 4


async def test_all_that_is_offloaded_while_the_disk_is_busy_gets_there(tmp_path: Path) -> None:
    with device() as memory:
        async with cache_over(memory, num_host=64, folder=tmp_path) as cache:
            for index, name in enumerate("abcdefgh"):
                blocks = sequence(name, 6)
                memory.compute(blocks, range(6 * index, 6 * index + 6))
                await cache.offload(blocks, range(6 * index, 6 * index + 6))
            await until_on_disk(cache, 48)
            assert cache.host.num_dropped == 0


async def test_a_full_disk_tier_goes_on_taking_blocks(tmp_path: Path) -> None:
    with device() as memory:
        async with cache_over(memory, num_host=12, folder=tmp_path, num_disk=8) as cache:
            for name in "abcdefghij":
                blocks = sequence(name, 4)
                memory.compute(blocks, range(4))
                await cache.offload(blocks, range(4))
            async with asyncio.timeout(20):
                while not on_disk(cache).has(sequence("j", 4)[3].key):
                    await asyncio.sleep(0.005)
            assert not cache.host.stats[Tier.DISK].failures


async def test_what_is_cleared_is_not_found_by_the_next_process(tmp_path: Path) -> None:
    with device() as memory:
        blocks = sequence("a", 8)
        memory.compute(blocks, range(8))
        async with cache_over(memory, folder=tmp_path) as cache:
            await cache.offload(blocks, range(8))
            await until_on_disk(cache, 8)
            assert cache.host.clear() == 16
            assert cache.host.find_tiers(keys(blocks)) == []
        async with cache_over(memory, folder=tmp_path) as cache:
            assert cache.host.find_tiers(keys(blocks)) == []


async def test_a_clear_while_blocks_are_copied_forgets_them(tmp_path: Path) -> None:
    with device() as memory:
        async with cache_over(memory, folder=tmp_path) as cache:
            blocks = sequence("a", 8)
            memory.compute(blocks, range(8))
            offloading = asyncio.ensure_future(cache.offload(blocks, range(8)))
            await asyncio.sleep(0)
            cache.host.clear()
            assert await offloading == 0
            assert cache.host.find_tiers(keys(blocks)) == []


async def test_a_journal_that_cannot_be_written_once_is_right_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of a record in it would put all that follow in the wrong place."""
    real = os.write
    with device() as memory:
        async with cache_over(memory, folder=tmp_path) as cache:
            first = sequence("a", 4)
            memory.compute(first, range(4))

            def short(descriptor: int, data: bytes) -> int:
                if not os.readlink(f"/proc/self/fd/{descriptor}").endswith("journal"):
                    return real(descriptor, data)
                real(descriptor, bytes(data)[:50])
                raise OSError(errno.ENOSPC, "no space left on device")

            monkeypatch.setattr(os, "write", short)
            await cache.offload(first, range(4))
            async with asyncio.timeout(20):
                while not cache.host.stats[Tier.DISK].failures["no_room"]:
                    await asyncio.sleep(0.005)
            monkeypatch.setattr(os, "write", real)
        async with cache_over(memory, folder=tmp_path) as cache:
            second = sequence("b", 4)
            memory.compute(second, range(4))
            await cache.offload(second, range(4))
            await until_on_disk(cache, 4)
        async with cache_over(memory, folder=tmp_path) as cache:
            assert cache.host.find_tiers(keys(second)) == [Tier.DISK] * 4


async def test_blocks_that_make_room_for_others_of_their_own_call_are_no_failures() -> None:
    """A full host: the new blocks of a call take the place of its known ones, which are kept anew."""
    with device() as memory:
        async with cache_over(memory, num_host=4) as cache:
            known, new = sequence("known", 2), sequence("new", 2)
            others = sequence("other", 2)
            memory.compute([*known, *others, *new], range(6))
            await cache.offload([*known], range(2))
            await cache.offload([*others], range(2, 4))
            failures = cache.host.stats[Tier.HOST].failures

            async def fill(slots: Numbers, places: list[int]) -> tuple[Sums, float]:
                return np.zeros(len(places), dtype=np.uint64), 0.001

            assert await cache.host.store([*new, *known], fill) == 4
            assert failures["no_room"] == 0
            assert await cache.host.store(sequence("long", 6), fill) == 4
            assert failures["no_room"] == 2


async def test_a_tier_that_gets_nothing_because_of_its_touches_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with device() as memory, caplog.at_level(logging.WARNING):
        async with cache_over(memory, folder=tmp_path, disk_touches=2) as cache:
            blocks = sequence("a", 3)
            memory.compute(blocks, range(3))
            await cache.offload(blocks, range(3))
            assert cache.host.num_skipped == {Tier.DISK: 3}
        assert "no block written to tier: tier=disk" in caplog.text
        assert "tiers.disk_touches" in caplog.text
        caplog.clear()
        async with cache_over(memory, folder=tmp_path / "other", disk_touches=2) as cache:
            for _ in range(2):
                await cache.offload(blocks, range(3))
        assert "no block written" not in caplog.text
