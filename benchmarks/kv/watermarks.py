"""What watermarks of KV tiers are good for: waits for a full disk, and blocks that never reach one.

    python -m benchmarks.kv.watermarks      some minutes; results/watermarks.{json,txt}

Disk: a full disk tier takes new blocks, a few at a time, with room made for each as it comes (marks 0 and 0) and
ahead of need. How often the disk was told to keep something, and how long it took, with the machine's own disk and
with one whose every such call takes 2 ms more, as on many cloud disks.

Host: conversations that a disk has are read through a small host tier, while new blocks come in bursts and wait for
the disk, which writes slowly. How many of them never got there, by the share of the host's slots that is for what
waits. The disk could have taken all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import msgspec
import numpy as np
from benchmarks.runtime.report import keep_results, machine

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier, Watermarks
from kvolt.kv.tiers.host_tier import HostTier
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.transfer.memory.device_memory import Sums
from kvolt.transfer.memory.slabs import Numbers

_RESULTS = Path(__file__).parent / "results" / "watermarks"
SHAPE = BlockShape(16 << 10)
NUM_SLOTS, NUM_BATCHES = 32768, 200
RUNS = 3
"""In turn; of their times the median."""
SLOW_SYNC_S = 0.002
MARKS = (Watermarks(0.0, 0.0), Watermarks())
BATCHES = (1, 16, 128)
SHARES = (0.0, 0.125, 0.25)
ROUNDS = 40


class Synced(msgspec.Struct, frozen=True):
    """Of a full disk."""

    low: float
    high: float
    batch: int
    added_ms: float
    """To each wait for the disk."""
    num_syncs: int
    per_batch: float
    took_s: float
    free: float
    """Share of the slots that are free at the end."""


class Burst(msgspec.Struct, frozen=True):
    share: float
    num_host: int
    new: int
    num_new: int
    num_lost: int

    @property
    def lost(self) -> float:
        return self.num_lost / self.num_new


def chain(name: str, count: int) -> list[TierBlock]:
    """Blocks one below the other, as those of a conversation are."""
    blocks: list[TierBlock] = []
    key, told = None, None
    for position in range(count):
        parent, parent_hash = key, told
        key = BlockKey(hashlib.blake2b(f"{name}/{position}".encode(), digest_size=16).digest())
        told = SequenceHash(int.from_bytes(key[:8], "little"))
        blocks.append(TierBlock(key, told, parent, parent_hash, position))
    return blocks


# --- the disk


async def written(folder: Path, marks: Watermarks, batch: int, added_s: float) -> Synced:
    tier, memory = DiskTier(DiskFiles(folder, SHAPE, NUM_SLOTS), watermarks=marks), SlotMemory(SHAPE, 1024)
    await tier.start()
    for number in range(NUM_SLOTS // 1024 + 1):
        await _write(tier, memory, chain(f"fill {number}", 1024))
    num_syncs, real = 0, os.fdatasync

    def slow(descriptor: int) -> None:
        nonlocal num_syncs
        num_syncs += 1
        real(descriptor)
        time.sleep(added_s)

    with patch.object(os, "fdatasync", slow):
        began = time.perf_counter()
        for number in range(NUM_BATCHES):
            await _write(tier, memory, chain(f"new {number}", batch))
        took_s = time.perf_counter() - began
    free = tier.books.num_free / NUM_SLOTS
    await tier.close()
    memory.close()
    return Synced(
        marks.low, marks.high, batch, added_s * 1e3, num_syncs, num_syncs / NUM_BATCHES, took_s, free
    )


async def _write(tier: DiskTier, memory: SlotMemory, blocks: Sequence[TierBlock]) -> None:
    slots = np.arange(len(blocks), dtype=np.int64)
    sums = memory.checksums(slots, [block.key for block in blocks]).tolist()
    await tier.write(blocks, sums, memory, slots)


# --- the host


class SlowDisk(DiskTier):
    """So long for each block."""

    read_s, write_s = 0.0, 0.0

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        await self._thread.run(time.sleep, len(blocks) * self.write_s)
        await super().write(blocks, checksums, memory, slots)

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        await self._thread.run(time.sleep, len(blocks) * self.read_s)
        return await super().read(blocks, memory, slots)


async def burst(folder: Path, share: float, num_host: int, new: int, length: int) -> Burst:
    """In each round some new blocks, and one of eight conversations of that length."""
    disk = SlowDisk(DiskFiles(folder, SHAPE, 4 * NUM_SLOTS))
    host = HostTier(SHAPE, num_host, [(disk, 1)])
    host.keep_for_below(share)
    await host.start()
    conversations = [chain(f"conversation {number}", length) for number in range(8)]
    for blocks in conversations:
        for start in range(0, length, host.at_once):
            await _store(host, blocks[start : start + host.at_once])
            await _until_there(disk, blocks[start : start + host.at_once])
    disk.read_s, disk.write_s = 0.001, 0.002
    draw, came = random.Random(1), list[TierBlock]()
    for number in range(ROUNDS):
        fresh = chain(f"new {number}", new)
        came += fresh
        await _store(host, fresh)
        asked = draw.choice(conversations)
        for start in range(0, length, host.at_once):
            brought = await host.bring(asked[start : start + host.at_once])
            host.release(brought.keys)
    disk.write_s = 0.0
    await host.close()  # which writes what waits
    num_lost = sum(not disk.has(block.key) for block in came)
    return Burst(share, num_host, new, len(came), num_lost)


async def _store(host: HostTier, blocks: Sequence[TierBlock]) -> None:
    async def fill(slots: Numbers, places: list[int]) -> tuple[Sums, float]:
        return host.memory.checksums(slots, [blocks[place].key for place in places]), 0.0

    await host.store(blocks, fill)


async def _until_there(disk: DiskTier, blocks: Sequence[TierBlock]) -> None:
    while not all(disk.has(block.key) for block in blocks):  # noqa: ASYNC110 - a tier tells nobody
        await asyncio.sleep(0.001)


# --- what is told


def tell(synced: Sequence[Synced], bursts: Sequence[Burst]) -> str:
    lines = [f"a full disk of {NUM_SLOTS:,} slots: waits for it to each batch, and all of them in seconds"]
    for one in synced:
        lines.append(
            f"  marks {one.low:g} {one.high:g}  {one.batch:4} blocks at a time  +{one.added_ms:g} ms: "
            f"{one.per_batch:.2f} waits, {one.took_s:.2f} s, {one.free:.1%} free"
        )
    lines.append("new blocks that never reached the disk, while others were read through the host")
    for each in bursts:
        lines.append(
            f"  {each.num_host:4} slots, {each.new:3} at a time, {each.share:g} for what waits: {each.num_lost} of "
            f"{each.num_new} ({each.lost:.1%})"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args(argv)
    found, synced, bursts = machine(), list[Synced](), list[Burst]()
    for added_s in (0.0, SLOW_SYNC_S):
        for batch in BATCHES:
            runs: dict[Watermarks, list[Synced]] = {marks: [] for marks in MARKS}
            for _ in range(RUNS):
                for marks in MARKS:
                    with tempfile.TemporaryDirectory(prefix="kvolt-bench-") as folder:
                        runs[marks].append(asyncio.run(written(Path(folder), marks, batch, added_s)))
            for each in runs.values():
                took_s = statistics.median(run.took_s for run in each)
                synced.append(msgspec.structs.replace(each[0], took_s=took_s))
    for num_host, new, length in ((64, 8, 60), (256, 64, 200)):
        for share in SHARES:
            with tempfile.TemporaryDirectory(prefix="kvolt-bench-") as folder:
                bursts.append(asyncio.run(burst(Path(folder), share, num_host, new, length)))
    told = tell(synced, bursts)
    print(told)
    keep_results(_RESULTS, "benchmarks.kv.watermarks", found, told, {"disk": synced, "host": bursts})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
