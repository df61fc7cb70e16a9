"""Conformance suite of the LowerTier port: tiers below host memory.

    for case in CASES: await run_case(case, harness)

A harness opens and reopens the tier on the same storage, and corrupts stored blocks.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import numpy as np

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.kv.tiers.lower_tier import LowerTier
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.testing.cases import cases_in, expect, name
from kvolt.transfer.memory.slabs import Numbers

__all__ = ["CASES", "Case", "Harness", "chain", "name", "run_case"]

SHAPE = BlockShape(3000, 2, "float16")
"""Two ranks; not a whole number of pages."""
NUM_SLOTS = 32


class Harness(Protocol):
    """Test access to an implementation."""

    async def open(self) -> LowerTier:
        """Open the tier on its storage, with capacity for at least 32 blocks of `SHAPE`. The previous one is closed."""
        ...

    def corrupt(self, key: BlockKey) -> None:
        """Flip a bit of a stored block, bypassing the tier."""
        ...

    def expected_bytes(self, data: bytes) -> bytes:
        """Bytes that a read returns for a block written with `data`: equal unless the tier is lossy."""
        ...

    async def close(self) -> None:
        """Release the resources of a case."""
        ...


Case = Callable[[Harness], Awaitable[None]]


def chain(name: str, num_blocks: int) -> list[TierBlock]:
    """Blocks of one prefix, each the parent of the next."""
    blocks: list[TierBlock] = []
    parent, parent_hash = None, None
    for position in range(num_blocks):
        key = BlockKey(hashlib.blake2b(f"{name}/{position}".encode(), digest_size=16).digest())
        sequence_hash = SequenceHash(int.from_bytes(key[:8], "little"))
        blocks.append(TierBlock(key, sequence_hash, parent, parent_hash, position))
        parent, parent_hash = key, sequence_hash
    return blocks


class _Bench:
    """A tier, and the memory that its blocks are copied from and to."""

    def __init__(self, tier: LowerTier, expected_bytes: Callable[[bytes], bytes]) -> None:
        self.tier = tier
        self.expected_bytes = expected_bytes
        self.memory = SlotMemory(SHAPE, NUM_SLOTS)

    def fill(self, blocks: Sequence[TierBlock]) -> list[int]:
        """Fill the first slots with the contents of these blocks; return their checksums."""
        for slot, block in enumerate(blocks):
            with self.memory.block(slot) as view:
                view[:] = _contents(block)
        return self.memory.checksums(_slots(len(blocks)), _keys(blocks)).tolist()  # type: ignore[no-any-return]

    def wipe(self) -> None:
        for slot in range(NUM_SLOTS):
            with self.memory.block(slot) as view:
                view[:] = bytes(len(view))

    def holds(self, slot: int, block: TierBlock) -> bool:
        with self.memory.block(slot) as view:
            return view == self.expected_bytes(_contents(block))

    async def write(self, blocks: Sequence[TierBlock]) -> None:
        await self.tier.write(blocks, self.fill(blocks), self.memory, _slots(len(blocks)))
        self.wipe()

    async def read(self, blocks: Sequence[TierBlock]) -> list[bool]:
        """Read each block into its own slot and check its bytes; return which blocks were read."""
        self.wipe()
        checksums = await self.tier.read(blocks, self.memory, _slots(len(blocks)))
        expect(len(checksums) == len(blocks), "one result for each block")
        sums = self.memory.checksums(_slots(len(blocks)), _keys(blocks)).tolist()
        for slot, (block, checksum) in enumerate(zip(blocks, checksums, strict=True)):
            if checksum is not None:
                expect(self.holds(slot, block), f"block {slot} is read as it was written")
                expect(checksum == sums[slot], f"block {slot} is read with its checksum")
        return [checksum is not None for checksum in checksums]


def _contents(block: TierBlock) -> bytes:
    """Random numbers of the block's dtype, like KV."""
    draw = np.random.default_rng(int.from_bytes(block.key[:4], "little"))
    return draw.standard_normal(SHAPE.block_bytes // 2).astype(np.float16).tobytes()


def _slots(count: int) -> Numbers:
    return np.arange(count, dtype=np.int64)


def _keys(blocks: Sequence[TierBlock]) -> list[BlockKey]:
    return [block.key for block in blocks]


@asynccontextmanager
async def _bench(harness: Harness) -> AsyncIterator[_Bench]:
    tier = await harness.open()
    await tier.start()
    bench = _Bench(tier, harness.expected_bytes)
    try:
        yield bench
        tier.check_integrity()
    finally:
        await tier.close()
        bench.memory.close()


async def _find(tier: LowerTier, blocks: Sequence[TierBlock]) -> list[bool]:
    await tier.lookup(_keys(blocks))
    return [tier.has(block.key) for block in blocks]


# --- cases


async def written_blocks_are_read_back(harness: Harness) -> None:
    blocks = chain("a", 9)
    async with _bench(harness) as bench:
        expect(not any(await _find(bench.tier, blocks)), "a new tier is empty")
        await bench.write(blocks)
        expect(
            all(bench.tier.has(block.key) and bench.tier.has_or_pending(block.key) for block in blocks),
            "written blocks are found",
        )
        expect(bench.tier.stats.num_stored == 9, "stored blocks are counted")
        expect(await bench.read(blocks[3:7]) == [True] * 4, "a part can be read")
        expect(await bench.read(blocks) == [True] * 9, "all can be read")
        expect(bench.tier.stats.num_loaded == 13, "loaded blocks are counted")


async def blocks_survive_reopening(harness: Harness) -> None:
    blocks = chain("a", 20)
    async with _bench(harness) as bench:
        await bench.write(blocks)
    async with _bench(harness) as bench:
        others = chain("b", 20)
        expect(not any(await _find(bench.tier, others)), "unwritten blocks are not found")
        expect(await _find(bench.tier, blocks) == [True] * 20, "all blocks are found")
        expect(await bench.read(blocks) == [True] * 20, "all blocks can be read")


async def partial_prefix_is_found(harness: Harness) -> None:
    blocks = chain("a", 31)
    async with _bench(harness) as bench:
        await bench.write(blocks[:23])
    async with _bench(harness) as bench:
        expect(await _find(bench.tier, blocks) == [True] * 23 + [False] * 8, "the first 23 are found")


async def corrupt_block_is_not_returned(harness: Harness) -> None:
    blocks = chain("a", 6)
    async with _bench(harness) as bench:
        await bench.write(blocks)
        harness.corrupt(blocks[2].key)
        expect(
            await bench.read(blocks) == [True, True, False, True, True, True],
            "all but the corrupt block are read",
        )
        expect(bench.tier.stats.failures["corrupt"] == 1, "the failure is counted")
        expect(not bench.tier.has(blocks[2].key), "the corrupt block is dropped")


async def removed_blocks_are_not_found(harness: Harness) -> None:
    blocks = chain("a", 6)
    async with _bench(harness) as bench:
        await bench.write(blocks)
        bench.tier.forget(_keys(blocks[4:]))
        expect(
            [bench.tier.has(block.key) for block in blocks] == [True] * 4 + [False] * 2,
            "two blocks are removed",
        )
        bench.tier.forget()
        expect(not any(bench.tier.has(block.key) for block in blocks), "all blocks are removed")
        while bench.tier.has_pending_work:
            await bench.tier.write([], [], bench.memory, _slots(0))
        await bench.write(blocks)
        expect(await bench.read(blocks) == [True] * 6, "removed blocks can be written again")


async def rewriting_is_idempotent(harness: Harness) -> None:
    blocks = chain("a", 8)
    async with _bench(harness) as bench:
        await bench.write(blocks[:6])
        await bench.write(blocks)
        expect(bench.tier.stats.num_stored == 8, "each block is written once")
        expect(await bench.read(blocks) == [True] * 8, "all blocks can be read")


async def cancelled_write_stops_before_returning(harness: Harness) -> None:
    """The slots are reused afterwards: their new contents must not reach the tier."""
    blocks = chain("a", 24)
    async with _bench(harness) as bench:
        sums = bench.fill(blocks)
        for delay_s in (0.0, 0.001, 0.005):
            try:
                async with asyncio.timeout(delay_s):
                    await bench.tier.write(blocks, sums, bench.memory, _slots(24))
            except TimeoutError:
                pass
            bench.wipe()
            present = [block for block in blocks if bench.tier.has(block.key)]
            expect(all(await bench.read(present)), "stored blocks are intact")
            bench.fill(blocks)


async def reads_during_writes_are_correct(harness: Harness) -> None:
    old, new = chain("old", 12), chain("new", 12)
    async with _bench(harness) as bench:
        await bench.write(old)
        other = _Bench(bench.tier, bench.expected_bytes)
        sums = other.fill(new)
        try:
            _, read = await asyncio.gather(
                bench.tier.write(new, sums, other.memory, _slots(12)), bench.read(old)
            )
            expect(read == [True] * 12, "old blocks are read")
            expect(await bench.read(new) == [True] * 12, "new blocks are read")
        finally:
            other.memory.close()


CASES: tuple[Case, ...] = cases_in(__name__)


async def run_case(case: Case, harness: Harness, timeout_s: float = 120.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await case(harness)
    finally:
        await harness.close()
