"""Blocks come from the disk past the host's memory, by the real NIXL, and are as safe on that way as on the other."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.unit.kv.tiers.test_cache import until_on_disk
from tests.unit.kv.tiers.tier_lab import Device, device, keys, sequence

from kvolt.core.errors import ConfigError, TransferFailed
from kvolt.core.kv_events import Tier
from kvolt.kv.disk.direct_reads import DirectReads
from kvolt.kv.disk.files import DiskFiles, file_of
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.tiers.cache import OnboardResult, TieredCache
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.transfer.nixl.files import NixlFiles

BLOCK_BYTES = 8192
"""Of whole pages: O_DIRECT takes nothing else."""
NUM_HOST = 8


class Lab:
    """A cache whose disk has six blocks that the host has not any more."""

    def __init__(self, memory: Device, cache: TieredCache, disk: DiskTier) -> None:
        self.memory = memory
        self.cache = cache
        self.disk = disk
        self.blocks = sequence("a", 6)

    async def fill(self) -> None:
        self.memory.compute(self.blocks, range(6))
        await self.cache.offload(self.blocks, range(6))
        await until_on_disk(self.cache, 6)
        await self.store(sequence("b", NUM_HOST), 6)
        await until_on_disk(self.cache, 6 + NUM_HOST)
        self.memory.wipe()
        assert self.cache.host.find_tiers(keys(self.blocks)) == [Tier.DISK] * 6

    async def store(self, blocks: list[TierBlock], first: int) -> None:
        numbers = range(first, first + len(blocks))
        self.memory.compute(blocks, numbers)
        await self.cache.offload(blocks, numbers)

    async def onboard(self) -> OnboardResult:
        return await self.cache.onboard(self.blocks, range(30, 36))

    def num_right(self) -> int:
        return sum(self.memory.holds(block, 30 + place) for place, block in enumerate(self.blocks))


@asynccontextmanager
async def lab(
    folder: Path, num_ranks: int = 1, block_bytes: int = BLOCK_BYTES, *, is_direct: bool = True
) -> AsyncIterator[Lab]:
    with device(num_ranks=num_ranks, block_bytes=block_bytes) as memory:
        files = DiskFiles(folder, BlockShape.of(memory.slabs), 64, is_direct=is_direct)
        disk = DiskTier(files)
        cache = TieredCache.for_slabs(
            memory.slabs, NUM_HOST, [(disk, 1)], direct=DirectReads(disk, memory.slabs)
        )
        await cache.start()
        try:
            made = Lab(memory, cache, disk)
            await made.fill()
            yield made
            cache.host.check_integrity()
        finally:
            await cache.close()


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 3])
async def test_blocks_come_past_the_host(tmp_path: Path, num_ranks: int, is_direct: bool) -> None:
    async with lab(tmp_path, num_ranks, is_direct=is_direct) as a:
        fetched = await a.onboard()
        assert (fetched.num_blocks, fetched.by_tier) == (6, ((Tier.DISK, 6),))
        assert a.num_right() == 6
        assert a.cache.host.find_tiers(keys(a.blocks)) == [Tier.DISK] * 6, "the host has no more than before"
        assert a.disk.stats.num_loaded == 6


async def test_what_the_host_has_comes_from_there(tmp_path: Path) -> None:
    """The first two by the host, the others straight, in one prompt."""
    async with lab(tmp_path) as a:
        await a.store(a.blocks[:2], 40)
        assert a.cache.host.find_tiers(keys(a.blocks)) == [Tier.HOST] * 2 + [Tier.DISK] * 4
        fetched = await a.onboard()
        assert dict(fetched.by_tier) == {Tier.HOST: 2, Tier.DISK: 4}
        assert a.num_right() == 6


async def test_what_follows_the_disks_blocks_in_the_host_comes_too(tmp_path: Path) -> None:
    async with lab(tmp_path) as a:
        await a.store(a.blocks[4:], 40)
        fetched = await a.onboard()
        assert dict(fetched.by_tier) == {Tier.HOST: 2, Tier.DISK: 4}
        assert a.num_right() == 6


async def test_a_flipped_bit_is_a_miss_for_what_follows(tmp_path: Path) -> None:
    async with lab(tmp_path) as a:
        [slot] = a.disk.slot_table.hold([a.blocks[3].key])
        a.disk.slot_table.release([a.blocks[3].key])
        descriptor = os.open(file_of(a.disk.folder, 0), os.O_RDWR)
        at = slot * a.disk.files.shape.slot_bytes + 77
        [byte] = os.pread(descriptor, 1, at)
        os.pwrite(descriptor, bytes([byte ^ 4]), at)
        os.fsync(descriptor)
        os.close(descriptor)
        assert (await a.onboard()).num_blocks == 3
        assert not a.disk.has(a.blocks[3].key), "it is not found any more"
        assert a.disk.has(a.blocks[4].key)
        assert a.disk.stats.failures["corrupt"] == 1


async def test_a_file_that_is_cut_off_costs_no_block_that_is_whole(tmp_path: Path) -> None:
    """NIXL says of a whole transfer that it failed: nothing is known of single blocks, and they stay."""
    async with lab(tmp_path) as a:
        path = file_of(a.disk.folder, 0)
        size = path.stat().st_size
        os.truncate(path, a.disk.files.shape.slot_bytes)
        assert (await a.onboard()).num_blocks == 0
        assert all(a.disk.has(block.key) for block in a.blocks)
        assert a.disk.stats.failures["unread"]
        os.truncate(path, size)


async def test_a_disk_that_was_emptied_and_filled_again_is_read_anew(tmp_path: Path) -> None:
    """Its file is another one then, under the same name."""
    async with lab(tmp_path) as a:
        assert (await a.onboard()).num_blocks == 6
        path = file_of(a.disk.folder, 0)
        there = path.read_bytes()
        path.unlink()
        path.write_bytes(there)
        a.memory.wipe()
        assert (await a.onboard()).num_blocks == 6
        assert a.num_right() == 6


async def test_after_some_failures_blocks_come_by_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: NixlFiles, *arguments: object, **options: object) -> None:
        raise TransferFailed("no luck", path="disk", reason="nixl")

    async with lab(tmp_path) as a:
        monkeypatch.setattr(NixlFiles, "read", fail)
        came = [(await a.onboard()).num_blocks for _ in range(4)]
        assert (came[0], came[-1]) == (0, 6)
        assert a.num_right() == 6
        assert a.cache.host.block_s(Tier.DISK) > a.disk.stats.block_s, "and are charged for it"
        assert "is_disabled=True" in caplog.text


async def test_blocks_of_no_whole_pages_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multiple of 4096") as raised:
        async with lab(tmp_path, block_bytes=5000):
            pass
    assert "disable it" in str(raised.value.fields["remedy"])


async def test_a_file_system_that_nixl_does_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: NixlFiles, *arguments: object) -> None:
        raise OSError("not this one")

    monkeypatch.setattr(NixlFiles, "_move", refuse)
    with pytest.raises(ConfigError, match="cannot access files"):
        async with lab(tmp_path):
            pass


async def test_the_way_past_the_host_is_not_charged_for_it(tmp_path: Path) -> None:
    """Whether to fetch or to compute is asked of what that way takes."""
    async with lab(tmp_path) as a:
        await a.onboard()
        assert a.cache.host.block_s(Tier.DISK) == a.disk.stats.block_s


async def test_a_hanging_read_does_not_block_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be cancelled, since its bytes may still arrive; other reads go through the host."""
    move, may_end, is_hanging = NixlFiles._move, threading.Event(), threading.Event()

    def hang(self: NixlFiles, *arguments: Any) -> None:
        self.is_stuck = True
        is_hanging.set()
        may_end.wait()
        move(self, *arguments)

    async with lab(tmp_path) as a:
        monkeypatch.setattr(NixlFiles, "_move", hang)
        hanging = asyncio.ensure_future(a.cache.onboard(a.blocks, range(50, 56)))
        try:
            assert await asyncio.to_thread(is_hanging.wait, 20)
            assert (await a.onboard()).num_blocks == 6
            assert a.num_right() == 6
        finally:
            may_end.set()
        assert (await hanging).num_blocks == 6


async def test_one_that_was_evicted_says_nothing_of_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: NixlFiles, *arguments: object, **options: object) -> None:
        raise TransferFailed("no luck", path="disk", reason="nixl")

    async with lab(tmp_path) as a:
        monkeypatch.setattr(NixlFiles, "read", fail)
        direct = DirectReads(a.disk, a.memory.slabs)
        await direct.start()
        for _ in range(3):
            assert await direct.read(a.blocks, range(6)) == 0
            assert await direct.read(sequence("unknown", 2), range(2)) == 0
        assert not direct.is_usable
        await direct.close()
