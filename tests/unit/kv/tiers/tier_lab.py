"""Blocks with names and bytes, and a memory that they lie in, for tests of tiers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.kv.disk import fp8_python
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.transfer.memory.slabs import Slab

BLOCK_BYTES = 5000
"""No whole number of pages."""


def sequence(name: str, num_blocks: int) -> list[TierBlock]:
    """The blocks of one, each following the one before."""
    blocks: list[TierBlock] = []
    parent: TierBlock | None = None
    for position in range(num_blocks):
        key = BlockKey(hashlib.blake2b(f"{name}/{position}".encode(), digest_size=16).digest())
        sequence_hash = SequenceHash(int.from_bytes(key[:8], "little"))
        if parent is None:
            block = TierBlock(key, sequence_hash, None, None, position)
        else:
            block = TierBlock(key, sequence_hash, parent.key, parent.sequence_hash, position)
        blocks.append(block)
        parent = block
    return blocks


def keys(blocks: Sequence[TierBlock]) -> list[BlockKey]:
    return [block.key for block in blocks]


def contents(block: TierBlock, rank: int = 0, num_bytes: int = BLOCK_BYTES) -> bytes:
    """What a block of that name holds."""
    seed = int.from_bytes(block.key[:4], "little") + rank
    return np.random.default_rng(seed).bytes(num_bytes)


def in_eight_bits(data: bytes, shape: BlockShape) -> bytes:
    """What comes back of a block that was kept in eight bits, by the definition."""
    kind = fp8_python.KINDS.index(shape.dtype)
    num_values = shape.piece_bytes // fp8_python.WIDTHS[kind]
    packed, back = bytearray(fp8_python.packed_bytes(num_values)), bytearray(shape.block_bytes)
    start = np.zeros(1, dtype=np.int64)
    for rank in range(shape.num_ranks):
        here = np.asarray([rank * shape.piece_bytes], dtype=np.int64)
        fp8_python.encode(memoryview(packed), start, memoryview(data), here, num_values, kind)
        fp8_python.decode(memoryview(back), here, memoryview(packed), start, num_values, kind)
    return bytes(back)


class Device:
    """An engine's memory, of so many ranks."""

    def __init__(self, num_blocks: int, num_ranks: int = 1, block_bytes: int = BLOCK_BYTES) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.slabs = tuple(Slab.shared(num_blocks, block_bytes) for _ in range(num_ranks))

    def compute(self, blocks: Sequence[TierBlock], numbers: Sequence[int]) -> None:
        for block, number in zip(blocks, numbers, strict=True):
            for rank, slab in enumerate(self.slabs):
                data = contents(block, rank, self.block_bytes)
                slab.memory[number * self.block_bytes : (number + 1) * self.block_bytes] = data

    def wipe(self) -> None:
        for slab in self.slabs:
            slab.memory[:] = bytes(slab.memory.nbytes)

    def holds(self, block: TierBlock, number: int) -> bool:
        return all(
            slab.memory[number * self.block_bytes : (number + 1) * self.block_bytes]
            == contents(block, rank, self.block_bytes)
            for rank, slab in enumerate(self.slabs)
        )

    def close(self) -> None:
        for slab in self.slabs:
            slab.close()


@contextmanager
def device(num_blocks: int = 64, num_ranks: int = 1, block_bytes: int = BLOCK_BYTES) -> Iterator[Device]:
    made = Device(num_blocks, num_ranks, block_bytes)
    try:
        yield made
    finally:
        made.close()


class Clock:
    """One that stands still."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s
