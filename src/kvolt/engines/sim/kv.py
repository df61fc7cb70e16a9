"""SimMemory: the bytes of the simulated engine's blocks, which stand in for KV.

A computed block holds the fingerprint of the tokens, salt and adapter that it was computed from, four times over. The
fingerprint is independent of block keys: a block that was swapped, damaged on its way, never filled, or found under a
key that says too little differs from what the reader expects. Owns the bytes and what they must be. Knows no pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvolt.core.block_key import BlockKeyContext
from kvolt.core.hashing import token_bytes
from kvolt.core.kv_block import KvLayout
from kvolt.core.request import Request
from kvolt.kv import BlockId
from kvolt.transfer.memory.layout import SlabLayout
from kvolt.transfer.memory.slabs import Slab

NAME = "sim"
"""Of the layout, and of the data type."""
_FINGERPRINT_BYTES = 16
_COPIES = 4
BLOCK_BYTES = _COPIES * _FINGERPRINT_BYTES
_FORMAT = "sim-2"
"""Changes with what blocks hold: tiers may keep blocks of another release."""

Fingerprint = bytes


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
        weights_hash=f"{_FORMAT}/{model}",
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

    def compute(self, block: BlockId, fingerprint: Fingerprint, confusion: int = 0) -> None:
        """Fill a block. KV computed by attention to wrong blocks (a `confusion`) is wrong, too."""
        if confusion:
            fingerprint = xxhash.xxh3_128_digest(fingerprint, confusion)
        self.write(block, fingerprint * _COPIES)

    def confusion(self, blocks: Sequence[BlockId], expected: Sequence[Fingerprint]) -> int:
        """What reading these blocks does to a model that expects those contents: 0 when all are right."""
        found = 0
        for block, fingerprint in zip(blocks, expected, strict=True):
            data = self.read(block)
            if data != fingerprint * _COPIES:
                found = xxhash.xxh3_64_intdigest(data, found) | 1
        return found


class ExpectedKv:
    """Fingerprints of the full blocks of one growing sequence."""

    __slots__ = ("_block_size", "_parent", "fingerprints")

    def __init__(self, model: str, block_size: int, request: Request) -> None:
        self._block_size = block_size
        identity = "\0".join((model, request.lora or "", request.salt or ""))
        self._parent = xxhash.xxh3_64_intdigest(identity.encode(), block_size)
        self.fingerprints: list[Fingerprint] = []

    def reach(self, tokens: list[int], num_blocks: int) -> None:
        """Work out the first `num_blocks`, each covering all tokens before it."""
        size = self._block_size
        for start in range(len(self.fingerprints) * size, num_blocks * size, size):
            fingerprint = xxhash.xxh3_128_digest(token_bytes(tokens[start : start + size]), self._parent)
            self.fingerprints.append(fingerprint)
            self._parent = int.from_bytes(fingerprint[:8], "little")
