"""Conformance suite of the LowerTier port: what a tier below the host's memory promises, whatever it is made of.

    for case in CASES: await run_case(case, harness)

A harness says how to open the tier over one place, again after it was closed, and how to spoil a block at rest.
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
from kvolt.testing.discovery.observer import expect
from kvolt.transfer.memory.slabs import Numbers

SHAPE = BlockShape(3000, 2, "float16")
"""No whole number of pages, of two ranks."""
NUM_SLOTS = 32


class Harness(Protocol):
    """What the suite needs besides the port."""

    async def open(self) -> LowerTier:
        """The tier over its one place, with room for 32 blocks of `SHAPE` or more. Of each the one before is closed."""
        ...

    def spoil(self, key: BlockKey) -> None:
        """Change a bit of a block that is there, behind the tier's back."""
        ...

    def kept(self, data: bytes) -> bytes:
        """What comes back of a block with these bytes: the same, but of a tier that is lossy."""
        ...

    async def close(self) -> None:
        """What is over when a case is."""
        ...


Case = Callable[[Harness], Awaitable[None]]


def chain(name: str, num_blocks: int) -> list[TierBlock]:
    """Blocks one below the other."""
    blocks: list[TierBlock] = []
    parent, parent_hash = None, None
    for position in range(num_blocks):
        key = BlockKey(hashlib.blake2b(f"{name}/{position}".encode(), digest_size=16).digest())
        sequence_hash = SequenceHash(int.from_bytes(key[:8], "little"))
        blocks.append(TierBlock(key, sequence_hash, parent, parent_hash, position))
        parent, parent_hash = key, sequence_hash
    return blocks


class _Bench:
    """A tier, and a memory that its blocks come from and go to."""

    def __init__(self, tier: LowerTier, kept: Callable[[bytes], bytes]) -> None:
        self.tier = tier
        self.kept = kept
        self.memory = SlotMemory(SHAPE, NUM_SLOTS)

    def fill(self, blocks: Sequence[TierBlock]) -> list[int]:
        """Slots from the first on get what these hold; checksums."""
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
            return view == self.kept(_contents(block))

    async def write(self, blocks: Sequence[TierBlock]) -> None:
        await self.tier.write(blocks, self.fill(blocks), self.memory, _slots(len(blocks)))
        self.wipe()

    async def read(self, blocks: Sequence[TierBlock]) -> list[bool]:
        """Which of these came, each into a slot of its own. What came is what was written, or this fails."""
        self.wipe()
        came = await self.tier.read(blocks, self.memory, _slots(len(blocks)))
        expect(len(came) == len(blocks), "one answer for each block")
        sums = self.memory.checksums(_slots(len(blocks)), _keys(blocks)).tolist()
        for slot, (block, checksum) in enumerate(zip(blocks, came, strict=True)):
            if checksum is not None:
                expect(self.holds(slot, block), f"block {slot} came as it was written")
                expect(checksum == sums[slot], f"block {slot} came with its checksum")
        return [checksum is not None for checksum in came]


def _contents(block: TierBlock) -> bytes:
    """Numbers of its dtype, such as KV is."""
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
    bench = _Bench(tier, harness.kept)
    try:
        yield bench
        tier.check_integrity()
    finally:
        await tier.close()
        bench.memory.close()


async def _find(tier: LowerTier, blocks: Sequence[TierBlock]) -> list[bool]:
    await tier.look(_keys(blocks))
    return [tier.has(block.key) for block in blocks]


# --- cases


async def what_is_written_comes_back(harness: Harness) -> None:
    blocks = chain("a", 9)
    async with _bench(harness) as bench:
        expect(not any(await _find(bench.tier, blocks)), "nothing is there at first")
        await bench.write(blocks)
        expect(
            all(bench.tier.has(block.key) and bench.tier.knows(block.key) for block in blocks), "it is there"
        )
        expect(bench.tier.stats.num_stored == 9, "and counted")
        expect(await bench.read(blocks[3:7]) == [True] * 4, "some of it comes")
        expect(await bench.read(blocks) == [True] * 9, "all of it comes")
        expect(bench.tier.stats.num_loaded == 13, "and is counted")


async def it_is_found_by_who_opens_it_next(harness: Harness) -> None:
    blocks = chain("a", 20)
    async with _bench(harness) as bench:
        await bench.write(blocks)
    async with _bench(harness) as bench:
        others = chain("b", 20)
        expect(not any(await _find(bench.tier, others)), "what is not there is not found")
        expect(await _find(bench.tier, blocks) == [True] * 20, "all of it is found")
        expect(await bench.read(blocks) == [True] * 20, "and comes")


async def the_end_of_what_is_there_is_found(harness: Harness) -> None:
    blocks = chain("a", 31)
    async with _bench(harness) as bench:
        await bench.write(blocks[:23])
    async with _bench(harness) as bench:
        expect(await _find(bench.tier, blocks) == [True] * 23 + [False] * 8, "the first 23 are there")


async def what_is_spoiled_does_not_come(harness: Harness) -> None:
    blocks = chain("a", 6)
    async with _bench(harness) as bench:
        await bench.write(blocks)
        harness.spoil(blocks[2].key)
        expect(
            await bench.read(blocks) == [True, True, False, True, True, True],
            "one does not come, the others do",
        )
        expect(bench.tier.stats.failures["corrupt"] == 1, "which is counted")
        expect(not bench.tier.has(blocks[2].key), "and it is not asked for again")


async def what_is_forgotten_is_not_found(harness: Harness) -> None:
    blocks = chain("a", 6)
    async with _bench(harness) as bench:
        await bench.write(blocks)
        bench.tier.forget(_keys(blocks[4:]))
        expect(
            [bench.tier.has(block.key) for block in blocks] == [True] * 4 + [False] * 2, "two are forgotten"
        )
        bench.tier.forget()
        expect(not any(bench.tier.has(block.key) for block in blocks), "all are forgotten")
        while bench.tier.has_chores:
            await bench.tier.write([], [], bench.memory, _slots(0))
        await bench.write(blocks)
        expect(await bench.read(blocks) == [True] * 6, "and can be written again")


async def writing_it_again_changes_nothing(harness: Harness) -> None:
    blocks = chain("a", 8)
    async with _bench(harness) as bench:
        await bench.write(blocks[:6])
        await bench.write(blocks)
        expect(bench.tier.stats.num_stored == 8, "each is written once")
        expect(await bench.read(blocks) == [True] * 8, "and comes back")


async def a_write_that_is_given_up_is_over_when_it_returns(harness: Harness) -> None:
    """The slots are another's afterwards: what is read then must not be theirs."""
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
            expect(all(await bench.read(present)), "what is there is whole")
            bench.fill(blocks)


async def reading_while_it_writes_is_right(harness: Harness) -> None:
    old, new = chain("old", 12), chain("new", 12)
    async with _bench(harness) as bench:
        await bench.write(old)
        other = _Bench(bench.tier, bench.kept)
        sums = other.fill(new)
        try:
            _, came = await asyncio.gather(
                bench.tier.write(new, sums, other.memory, _slots(12)), bench.read(old)
            )
            expect(came == [True] * 12, "what was there comes")
            expect(await bench.read(new) == [True] * 12, "and what came meanwhile")
        finally:
            other.memory.close()


CASES: tuple[Case, ...] = (
    what_is_written_comes_back,
    it_is_found_by_who_opens_it_next,
    the_end_of_what_is_there_is_found,
    what_is_spoiled_does_not_come,
    what_is_forgotten_is_not_found,
    writing_it_again_changes_nothing,
    a_write_that_is_given_up_is_over_when_it_returns,
    reading_while_it_writes_is_right,
)


def name(case: Case) -> str:
    return getattr(case, "__name__", repr(case))


async def run_case(case: Case, harness: Harness, timeout_s: float = 120.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await case(harness)
    finally:
        await harness.close()
