"""Effect of KV tiers' watermarks: syncs of a full disk, and blocks that never reach it.

    python -m benchmarks.kv.watermarks      some minutes; results/watermarks.{json,txt}

Disk: a full disk tier takes new blocks, a few at a time, evicting for each batch (watermarks 0 and 0) or ahead of need:
syncs per batch, and their time, on the machine's own disk and on one whose every sync takes 2 ms more, as on many cloud
disks.

Host: conversations on disk are read through a small host tier, while new blocks arrive in bursts and wait for the disk,
which writes slowly: how many of them were lost, by the share of host slots reserved for blocks that wait. The disk has
room for all of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
from benchmarks.harness import Figure, parser_for, report, row_table, run
from benchmarks.kv.tier_blocks import tier_blocks

from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier, Watermarks
from kvolt.kv.tiers.host_tier import HostTier
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.transfer.memory.pieces import Sums
from kvolt.transfer.memory.slabs import Numbers

SHAPE = BlockShape(16 << 10)
WATERMARKS = (Watermarks(0.0, 0.0), Watermarks())
SHARES = (0.0, 0.125, 0.25)


class Plan(msgspec.Struct, frozen=True):
    num_slots: int = 32768
    num_batches: int = 200
    batches: tuple[int, ...] = (1, 16, 128)
    added_s: tuple[float, ...] = (0.0, 0.002)
    """Added to each sync."""
    rounds: int = 3
    """Interleaved; the median counts."""
    hosts: tuple[tuple[int, int, int], ...] = ((64, 8, 60), (256, 64, 200))
    """Host slots, new blocks in a round, blocks of a conversation."""
    bursts: int = 40


SMOKE = Plan(1024, 5, (16,), (0.002,), 1, ((64, 8, 60),), 3)


class Synced(msgspec.Struct, frozen=True):
    """Syncs of a full disk."""

    low: float
    high: float
    batch: int
    added_ms: float
    num_syncs: int
    per_batch: float
    took_s: float
    free: float
    """Share of slots that are free at the end."""


class Burst(msgspec.Struct, frozen=True):
    share: float
    num_host: int
    new: int
    num_new: int
    num_lost: int


# --- the disk


async def write_batches(folder: Path, plan: Plan, marks: Watermarks, batch: int, added_s: float) -> Synced:
    tier, memory = (
        DiskTier(DiskFiles(folder, SHAPE, plan.num_slots), watermarks=marks),
        SlotMemory(SHAPE, 1024),
    )
    await tier.start()
    for number in range(plan.num_slots // 1024 + 1):
        await _write(tier, memory, tier_blocks(f"fill {number}", 1024))
    num_syncs, real = 0, os.fdatasync

    def slow(descriptor: int) -> None:
        nonlocal num_syncs
        num_syncs += 1
        real(descriptor)
        time.sleep(added_s)

    with patch.object(os, "fdatasync", slow):
        started = time.perf_counter()
        for number in range(plan.num_batches):
            await _write(tier, memory, tier_blocks(f"new {number}", batch))
        took_s = time.perf_counter() - started
    free = tier.slot_table.num_free / plan.num_slots
    await tier.close()
    memory.close()
    return Synced(
        marks.low, marks.high, batch, added_s * 1e3, num_syncs, num_syncs / plan.num_batches, took_s, free
    )


async def _write(tier: DiskTier, memory: SlotMemory, blocks: Sequence[TierBlock]) -> None:
    slots = np.arange(len(blocks), dtype=np.int64)
    sums = memory.checksums(slots, [block.key for block in blocks]).tolist()
    await tier.write(blocks, sums, memory, slots)


# --- the host


class SlowDisk(DiskTier):
    """A disk that takes a given time per block."""

    read_s, write_s = 0.0, 0.0

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        await self._thread.run(time.sleep, len(blocks) * self.write_s)
        await super().write(blocks, checksums, memory, slots)

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        await self._thread.run(time.sleep, len(blocks) * self.read_s)
        return await super().read(blocks, memory, slots)


async def burst(folder: Path, plan: Plan, share: float, num_host: int, new: int, length: int) -> Burst:
    """Store new blocks and read one of eight conversations, round by round."""
    disk = SlowDisk(DiskFiles(folder, SHAPE, 4 * plan.num_slots))
    host = HostTier(SHAPE, num_host, [(disk, 1)])
    host.set_pending_share(share)
    await host.start()
    conversations = [tier_blocks(f"conversation {number}", length) for number in range(8)]
    for blocks in conversations:
        for start in range(0, length, host.batch_blocks):
            await _store(host, blocks[start : start + host.batch_blocks])
            await _until_written(disk, blocks[start : start + host.batch_blocks])
    disk.read_s, disk.write_s = 0.001, 0.002
    draw, stored = random.Random(1), list[TierBlock]()
    for number in range(plan.bursts):
        fresh = tier_blocks(f"new {number}", new)
        stored += fresh
        await _store(host, fresh)
        blocks = draw.choice(conversations)
        for start in range(0, length, host.batch_blocks):
            onboarded = await host.onboard(blocks[start : start + host.batch_blocks])
            host.release(onboarded.keys)
    disk.write_s = 0.0
    await host.close()  # writes the blocks that wait
    num_lost = sum(not disk.has(block.key) for block in stored)
    return Burst(share, num_host, new, len(stored), num_lost)


async def _store(host: HostTier, blocks: Sequence[TierBlock]) -> None:
    async def fill(slots: Numbers, places: list[int]) -> tuple[Sums, float]:
        return host.memory.checksums(slots, [blocks[place].key for place in places]), 0.0

    await host.store(blocks, fill)


async def _until_written(disk: DiskTier, blocks: Sequence[TierBlock]) -> None:
    while not all(disk.has(block.key) for block in blocks):  # noqa: ASYNC110 - a tier has no event
        await asyncio.sleep(0.001)


# ---


_SYNCED = (
    Figure("watermarks", lambda row: f"{row.low:g} {row.high:g}", ""),
    Figure("blocks at a time", "batch", ""),
    Figure("+ms per sync", "added_ms", "g"),
    Figure("syncs per batch", "per_batch"),
    Figure("seconds of all batches", "took_s"),
    Figure("free", "free", ".1%"),
)
_BURSTS = (
    Figure("host slots", "num_host", ""),
    Figure("blocks at a time", "new", ""),
    Figure("reserved", "share", "g"),
    Figure("never reached the disk", lambda row: f"{row.num_lost} of {row.num_new}", ""),
    Figure("share", lambda row: row.num_lost / row.num_new, ".1%"),
)


def main() -> None:
    options = parser_for(__file__, __doc__).parse_args()
    plan, synced, bursts = SMOKE if options.smoke else Plan(), list[Synced](), list[Burst]()
    for added_s in plan.added_s:
        for batch in plan.batches:
            rows: dict[Watermarks, list[Synced]] = {marks: [] for marks in WATERMARKS}
            for _ in range(plan.rounds):
                for marks in WATERMARKS:
                    with tempfile.TemporaryDirectory(prefix="bench-marks-") as folder:
                        rows[marks].append(
                            asyncio.run(write_batches(Path(folder), plan, marks, batch, added_s))
                        )
            for each in rows.values():
                took_s = statistics.median(row.took_s for row in each)
                synced.append(msgspec.structs.replace(each[0], took_s=took_s))
    for num_host, new, length in plan.hosts:
        for share in SHARES:
            with tempfile.TemporaryDirectory(prefix="bench-marks-") as folder:
                bursts.append(asyncio.run(burst(Path(folder), plan, share, num_host, new, length)))
    about = f"a full disk of {plan.num_slots:,} slots"
    text = "\n\n".join([about, row_table(_SYNCED, synced), row_table(_BURSTS, bursts)])
    report(options, text, {"disk": synced, "host": bursts})


if __name__ == "__main__":
    run(main)
