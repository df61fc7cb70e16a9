"""Room on a full disk is made beside what is written, and what is to be written stays in the host until then."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.unit.kv.tiers.tier_lab import keys, sequence

from kvolt.core.errors import ConfigError, TransferFailed
from kvolt.core.kv_events import Tier
from kvolt.kv.disk import tier as disk_tier
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.disk.view import find_parts
from kvolt.kv.peers.tier import PeerTier
from kvolt.kv.tiers import host_tier
from kvolt.kv.tiers.host_tier import DEFAULT_PENDING_SHARE, HostTier
from kvolt.kv.tiers.sizes import Watermarks
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.runtime.config.settings import TierSettings
from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.memory.pieces import Sums
from kvolt.transfer.memory.slabs import Numbers

SHAPE = BlockShape(5000)
NUM_SLOTS = 100
NONE = Watermarks(0.0, 0.0)


class Full:
    """A disk tier without a free slot, and what is written to it."""

    def __init__(self, tier: DiskTier, memory: SlotMemory) -> None:
        self.tier = tier
        self._memory = memory
        self._number = 0

    async def write(self, count: int) -> None:
        """So many new ones at once, none of which follows another."""
        blocks = [sequence(f"new {self._number + index}", 1)[0] for index in range(count)]
        self._number += count
        slots = np.arange(count, dtype=np.int64)
        await self.tier.write(
            blocks, self._memory.checksums(slots, keys(blocks)).tolist(), self._memory, slots
        )
        assert all(self.tier.has(block.key) for block in blocks)

    async def idle(self) -> None:
        """As a writer does when nothing waits."""
        while self.tier.has_pending_work:
            await self.tier.write([], [], self._memory, np.zeros(0, dtype=np.int64))


@asynccontextmanager
async def full(folder: Path, marks: Watermarks) -> AsyncIterator[Full]:
    first = DiskTier(DiskFiles(folder, SHAPE, NUM_SLOTS), watermarks=NONE)
    memory = SlotMemory(SHAPE, NUM_SLOTS)
    await first.start()
    await Full(first, memory).write(NUM_SLOTS)
    await first.close()
    tier = DiskTier(DiskFiles(folder, SHAPE, NUM_SLOTS), watermarks=marks)
    await tier.start()
    assert tier.slot_table.num_free == 0
    made = Full(tier, memory)
    made._number = NUM_SLOTS
    try:
        yield made
        tier.check_integrity()
    finally:
        await tier.close()
        memory.close()


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that the disk was waited for."""
    seen: list[int] = []
    real = os.fdatasync

    def counted(descriptor: int) -> None:
        seen.append(descriptor)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", counted)
    return seen


@pytest.mark.parametrize(
    ("marks", "is_idle_between", "expected"),
    [
        (NONE, False, 3 * 40),  # what goes, the bytes, the record: for each
        (Watermarks(0.02, 0.04), False, 2 * 40 + 1),  # what goes with the record; once ahead at the start
        (NONE, True, 3 * 40),
        (Watermarks(0.02, 0.1), True, 2 * 40 + 1 + 3),  # and when nothing waits, for eight at a time
    ],
)
async def test_how_often_a_full_disk_is_waited_for(
    tmp_path: Path, syncs: list[int], marks: Watermarks, is_idle_between: bool, expected: int
) -> None:
    async with full(tmp_path, marks) as at:
        syncs.clear()
        for _ in range(40):
            await at.write(1)
            if is_idle_between:
                await at.idle()
        assert len(syncs) == pytest.approx(expected, abs=1)
        assert at.tier.stats.num_stored == 40


async def test_between_the_marks_nothing_goes(tmp_path: Path) -> None:
    async with full(tmp_path, Watermarks(0.1, 0.2)) as at:
        await at.write(1)
        await at.idle()
        assert at.tier.slot_table.num_free == 20
        for left in range(19, 9, -1):
            await at.write(1)
            await at.idle()
            assert at.tier.slot_table.num_free == left
        await at.write(1)
        await at.idle()
        assert at.tier.slot_table.num_free == 20, "below the low mark up to the high one, at once"
        assert len(at.tier) == NUM_SLOTS - 20


async def test_more_than_is_free_is_written_all_the_same(tmp_path: Path) -> None:
    async with full(tmp_path, Watermarks(0.1, 0.2)) as at:
        await at.write(1)
        await at.write(60)
        await at.write(80)
        assert len(at.tier) == 80


async def test_marks_are_shares_of_what_the_tier_is_now(tmp_path: Path) -> None:
    async with full(tmp_path, Watermarks(0.1, 0.2)) as at:
        await at.tier.resize(50)
        await at.idle()
        assert at.tier.slot_table.num_free == 10
        await at.tier.resize(200)
        await at.idle()
        assert at.tier.slot_table.num_free == 160


async def test_much_goes_in_several_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait while books are kept."""
    monkeypatch.setattr(disk_tier, "_MAX_EVICTION_BATCH", 4)
    async with full(tmp_path, Watermarks(0.1, 0.2)) as at:
        await at.write(1)
        assert len(at.tier.slot_table.evicting_slots()) == 4
        for _ in range(3):
            await at.write(1)
            assert len(at.tier.slot_table.evicting_slots()) == 4
        await at.idle()
        assert at.tier.slot_table.num_free == 20


async def test_what_has_gone_ahead_is_not_found_by_the_next_process(tmp_path: Path) -> None:
    async with full(tmp_path, Watermarks(0.1, 0.2)) as at:
        await at.write(1)
        await at.write(1)  # and with it the record of what has gone
        there = set(at.tier.slot_table)
    [part] = find_parts(tmp_path)
    assert {each.block.key for each in part.blocks} == there


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.1), (-0.1, 0.1), (0.1, 0.6)])
def test_marks_that_cannot_be_are_refused(low: float, high: float) -> None:
    with pytest.raises(ConfigError, match="watermarks") as told:
        Watermarks(low, high)
    assert told.value.fields["remedy"]


def test_settings_have_the_same_marks_as_a_tier_by_itself() -> None:
    settings = TierSettings()
    assert Watermarks(settings.disk_low_water, settings.disk_high_water) == Watermarks()
    assert settings.host_high_water == host_tier.DEFAULT_PENDING_SHARE
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"disk_low_water": 0.7}, TierSettings)


# --- the host's


class Busy(DiskTier):
    """Writes only when it is let, a batch at a time."""

    def __init__(self, files: DiskFiles) -> None:
        super().__init__(files)
        self.turns = asyncio.Semaphore(0)
        self.num_begun = 0

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        self.num_begun += 1
        await self.turns.acquire()
        await super().write(blocks, checksums, memory, slots)


class Refusing(DiskTier):
    is_refusing = True

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        if self.is_refusing:
            raise TransferFailed("it is read-only", path="disk", reason="EROFS")
        await super().write(blocks, checksums, memory, slots)


async def store(host: HostTier, blocks: Sequence[TierBlock]) -> int:
    """Blocks of nothing."""

    async def fill(slots: Numbers, places: list[int]) -> tuple[Sums, float]:
        return host.memory.checksums(slots, [blocks[place].key for place in places]), 0.0

    return await host.store(blocks, fill)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.005)


NUM_HOST = 32
FIRST = sequence("first", 1)
OLD = sequence("old", 64)
"""That a disk has before."""


@asynccontextmanager
async def host_over(folder: Path, share: float, kind: type[DiskTier] = Busy) -> AsyncIterator[HostTier]:
    before = DiskTier(DiskFiles(folder, SHAPE, 1000))
    memory = SlotMemory(SHAPE, len(OLD))
    await before.start()
    slots = np.arange(len(OLD), dtype=np.int64)
    await before.write(OLD, memory.checksums(slots, keys(OLD)).tolist(), memory, slots)
    await before.close()
    memory.close()
    host = HostTier(SHAPE, NUM_HOST, [(kind(DiskFiles(folder, SHAPE, 1000)), 1)])
    host.set_pending_share(share)
    await host.start()
    try:
        yield host
        host.check_integrity()
    finally:
        if isinstance(host.lower[0], Busy):
            for _ in range(1000):
                host.lower[0].turns.release()
        await host.close()


async def occupy(host: HostTier) -> Busy:
    """The disk is at a block, and all that is stored now waits."""
    disk = host.lower[0]
    assert isinstance(disk, Busy)
    await store(host, FIRST)
    await until(lambda: disk.num_begun == 1)
    return disk


async def through(host: HostTier) -> None:
    """What others ask for passes through the host, more than it holds."""
    for start in range(0, len(OLD), 8):
        host.release((await host.onboard(OLD[start : start + 8])).keys)


@pytest.mark.parametrize(("share", "num_lost"), [(0.0, 8), (0.25, 0)])
async def test_what_waits_for_the_disk_is_not_lost_to_what_comes_from_it(
    tmp_path: Path, share: float, num_lost: int
) -> None:
    async with host_over(tmp_path, share) as host:
        disk, burst = await occupy(host), sequence("burst", 8)
        await store(host, burst)
        await through(host)
        for _ in range(20):
            disk.turns.release()
        await until(lambda: disk.has(FIRST[0].key) and len(disk) >= len(OLD) + 9 - num_lost)
        assert sum(not disk.has(block.key) for block in burst) == num_lost
        assert len(disk) == len(OLD) + 9 - num_lost


async def test_what_waits_has_no_more_than_its_share(tmp_path: Path) -> None:
    async with host_over(tmp_path, 0.25) as host:
        disk = await occupy(host)
        for number in range(6):
            await store(host, sequence(f"burst {number}", 4))
        await through(host)
        staying = [
            number for number in range(6) if host.slot_table.has(sequence(f"burst {number}", 4)[3].key)
        ]
        assert staying == [0, 1], "eight of 32, and those that are next"
        assert host.stats[Tier.HOST].failures["no_room"] == 0
        while len(disk) < len(OLD) + 9:
            disk.turns.release()
            await asyncio.sleep(0.005)
        await until(lambda: host.slot_table.num_free == 0)
        await through(host)
        assert not any(host.slot_table.has(sequence(f"burst {number}", 4)[3].key) for number in range(6))


async def test_for_a_tier_that_takes_nothing_nothing_stays(tmp_path: Path) -> None:
    async with host_over(tmp_path, 0.25, Refusing) as host:
        disk = host.lower[0]
        assert isinstance(disk, Refusing)
        blocks = sequence("a", 8)
        await store(host, blocks)
        await until(lambda: disk.stats.failures["unwritten"] > 0)
        await store(host, sequence("b", 2))
        await through(host)
        assert not any(host.slot_table.has(block.key) for block in blocks)
        disk.is_refusing = False


async def test_what_waits_is_cleared_with_all_else(tmp_path: Path) -> None:
    async with host_over(tmp_path, 0.25) as host:
        disk = await occupy(host)
        await store(host, sequence("burst", 6))
        host.clear()
        assert not any(host.slot_table.has(block.key) for block in sequence("burst", 6))
        disk.turns.release()
        await until(lambda: not host.slot_table.has(FIRST[0].key))
        assert not disk.has(FIRST[0].key), "nor what was being written"


async def test_others_tiers_need_no_share(tmp_path: Path) -> None:
    """Nothing waits for them."""
    disk, others = DiskTier(DiskFiles(tmp_path, SHAPE, 100)), PeerTier(TransferAgent(), lambda: 0.0)
    host = HostTier(SHAPE, NUM_HOST, [(disk, 1), (others, 1)])
    assert [writer.pending_share for writer in host._writers] == [DEFAULT_PENDING_SHARE, 0.0]
    await host.close()
