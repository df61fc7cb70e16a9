"""The simulated engine's blocks: their content, in place of KV, and the names of blocks without content.

A computed block holds the fingerprint of the tokens, salt and adapter it was computed from, four times. Fingerprints
are independent of block keys: a block that was swapped, damaged in transfer, never filled, or found by an ambiguous
key differs from what its reader expects. Owns the content and its verification. Knows no pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import xxhash

from kvolt.core.block_key import BlockKeyContext, KvLayout
from kvolt.core.errors import InvalidRequest
from kvolt.core.hashing import token_bytes
from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.request import Request
from kvolt.kv import BlockId, BlockNames
from kvolt.transfer.memory.layout import SlabLayout
from kvolt.transfer.memory.slabs import Slab

NAME = "sim"
"""Name of the layout and of the data type."""
_FINGERPRINT_BYTES = 16
_COPIES = 4
BLOCK_BYTES = _COPIES * _FINGERPRINT_BYTES
_FORMAT = "sim-2"
"""Version of the content: tiers may keep blocks of another release."""

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
    """See the module. Grows with the highest block used; pools allocate low block numbers first."""

    def __init__(self) -> None:
        self._bytes: bytearray | memoryview = bytearray()

    def share(self, num_blocks: int, block_size: int) -> Slab:
        """Move the blocks to memory that other processes can map."""
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

    def compute(self, block: BlockId, fingerprint: Fingerprint, corruption: int = 0) -> None:
        """Fill a block. With `corruption`, its content is wrong, like KV computed by attention to wrong blocks."""
        if corruption:
            fingerprint = xxhash.xxh3_128_digest(fingerprint, corruption)
        self.write(block, fingerprint * _COPIES)

    def check(self, blocks: Sequence[BlockId], expected: Sequence[Fingerprint]) -> int:
        """Hash of the blocks whose content differs from the expected one; 0 if all are correct."""
        corruption = 0
        for block, fingerprint in zip(blocks, expected, strict=True):
            data = self.read(block)
            if data != fingerprint * _COPIES:
                corruption = xxhash.xxh3_64_intdigest(data, corruption) | 1
        return corruption


class ExpectedKv:
    """Fingerprints of the full blocks of one growing sequence."""

    __slots__ = ("_block_size", "_parent", "fingerprints")

    def __init__(self, model: str, block_size: int, request: Request) -> None:
        self._block_size = block_size
        identity = "\0".join((model, request.lora or "", request.salt or ""))
        self._parent = xxhash.xxh3_64_intdigest(identity.encode(), block_size)
        self.fingerprints: list[Fingerprint] = []

    def reach(self, tokens: list[int], num_blocks: int) -> None:
        """Compute the fingerprints of the first `num_blocks` blocks, each over all tokens up to its end."""
        size = self._block_size
        for start in range(len(self.fingerprints) * size, num_blocks * size, size):
            fingerprint = xxhash.xxh3_128_digest(token_bytes(tokens[start : start + size]), self._parent)
            self.fingerprints.append(fingerprint)
            self._parent = int.from_bytes(fingerprint[:8], "little")


class TraceNaming:
    """Like TokenNaming for a trace request, whose tokens are unknown.

    The request has one hash per full block of its prompt: equal hashes are equal blocks. Generated blocks are unique to
    the request. Must not be used where block content is kept: these hashes do not identify content.
    """

    __slots__ = ("_seed", "names")

    def __init__(self, request: Request, block_size: int) -> None:
        num_blocks = request.num_prompt_tokens // block_size
        if request.block_size != block_size or len(request.sequence_hashes) < num_blocks:
            raise InvalidRequest(
                f"a trace request needs the hashes of its {num_blocks} blocks of {block_size} tokens",
                param="sequence_hashes",
            )
        self._seed = xxhash.xxh3_64_intdigest(request.request_id.encode())
        self.names = _names(request.sequence_hashes[:num_blocks])

    def reach(self, tokens: list[int], num_blocks: int) -> None:
        if num_blocks <= len(self.names):  # the usual case
            return
        positions = (position.to_bytes(8, "little") for position in range(len(self.names), num_blocks))
        self.names.extend(_names([xxhash.xxh3_64_intdigest(each, self._seed) for each in positions]))


def _names(hashes: Sequence[int]) -> BlockNames:
    """Block names from hashes. The hash is also the key: trace blocks have no content."""
    return BlockNames(cast("list[BlockKey]", list(hashes)), cast("list[SequenceHash]", list(hashes)))
