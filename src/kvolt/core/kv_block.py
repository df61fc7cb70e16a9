"""A block of KV as it leaves one pool for another: its names, its bytes, and the checksum over both.

Owns what must be equal on both sides for the bytes to mean the same. Knows nothing of where the bytes lay or how
they travel: a transfer that does not copy puts a descriptor in the place of `data` and keeps the rest.
"""

from __future__ import annotations

import struct

import msgspec
from xxhash import xxh3_64

from kvolt.core.ids import BlockKey, SequenceHash

_pack_names = struct.Struct("<QQ?").pack


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """How the bytes of a block are laid out. Two engines with equal layouts can exchange blocks."""

    name: str
    """Names the order of the axes; also `EngineInfo.kv_layout` and part of every BlockKey."""
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    block_bytes: int


class KvBlock(msgspec.Struct, frozen=True):
    """One sealed block. `seal` makes one with its checksum; `intact` says whether it is still that one."""

    key: BlockKey
    sequence_hash: SequenceHash
    parent: BlockKey | None
    """None for the first block of a sequence."""
    position: int
    """Index of the block in its sequence."""
    data: bytes
    checksum: int = 0

    def seal(self) -> KvBlock:
        """The same block with the checksum of what it holds."""
        return msgspec.structs.replace(self, checksum=self._compute())

    @property
    def intact(self) -> bool:
        return self.checksum == self._compute()

    def _compute(self) -> int:
        """Over the names too: bytes that got under another block's name are as wrong as a flipped bit."""
        state = xxh3_64(self.key)
        state.update(_pack_names(self.sequence_hash, self.position, self.parent is not None))
        state.update(self.parent or b"")
        state.update(self.data)
        return state.intdigest()
