"""SimMemory: the bytes of the simulated engine's blocks, which stand in for KV.

A block that was computed holds its key, four times over: bytes that say what they should be, so that a block which
was mixed up, damaged on its way or never filled is known by who reads it. Owns the bytes and what they must be. Knows
no pool: which block has which key is told.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvolt.core.block_key import BLOCK_KEY_BYTES, BlockKeyContext
from kvolt.core.ids import BlockKey
from kvolt.core.kv_block import KvLayout
from kvolt.core.request import Request
from kvolt.kv import BlockId
from kvolt.transfer.layout import SlabLayout
from kvolt.transfer.memory import Slab

NAME = "sim"
"""Of the layout, and of the data type."""
_COPIES = 4
BLOCK_BYTES = _COPIES * BLOCK_KEY_BYTES


def layout(block_size: int) -> KvLayout:
    return KvLayout(
        name=NAME,
        dtype=NAME,
        num_layers=1,
        num_kv_heads=1,
        head_dim=BLOCK_BYTES,
        block_size=block_size,
        block_bytes=BLOCK_BYTES,
    )


def key_context(model: str, block_size: int, request: Request) -> BlockKeyContext:
    return BlockKeyContext(
        weights_hash=f"sim/{model}",
        dtype=NAME,
        block_size=block_size,
        layout=NAME,
        lora=request.lora,
        salt=request.salt,
    )


class SimMemory:
    """See the module. Grows with the blocks that are used: pools give out the first ones first."""

    def __init__(self) -> None:
        self._bytes: bytearray | memoryview = bytearray()

    def share(self, num_blocks: int, block_size: int) -> Slab:
        """Move to a memory that other processes can map, with room for so many blocks."""
        slab = Slab.shared(num_blocks, BLOCK_BYTES, SlabLayout.of_rank(layout(block_size)))
        slab.memory[: len(self._bytes)] = self._bytes
        self._bytes = slab.memory
        return slab

    def read(self, block: BlockId) -> bytes:
        return bytes(self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

    def write(self, block: BlockId, data: bytes) -> None:
        start, end = block * BLOCK_BYTES, (block + 1) * BLOCK_BYTES
        if end > len(self._bytes):
            assert isinstance(self._bytes, bytearray)
            self._bytes.extend(bytes(end - len(self._bytes)))
        self._bytes[start:end] = data

    def compute(self, block: BlockId, key: BlockKey) -> None:
        """Fill a block with what belongs there."""
        self.write(block, key * _COPIES)

    def confusion(self, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> int:
        """What reading these blocks as those of `keys` does to a model: 0 when all hold what they should."""
        found = 0
        for block, key in zip(blocks, keys, strict=True):
            data = self.read(block)
            if data != key * _COPIES:
                found = xxhash.xxh3_64_intdigest(data, found) | 1
        return found
