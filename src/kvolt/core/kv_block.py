"""KvBlock: a KV block in transit between pools, with its ids, bytes and checksum, and the layout of the bytes.

Independent of memory and transport: a zero-copy transfer replaces `data` by a descriptor and keeps the other fields.
"""

from __future__ import annotations

import struct

import msgspec
from xxhash import xxh3_64

from kvolt.core.ids import BlockKey, SequenceHash

_pack_names = struct.Struct("<QQ?").pack


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of the bytes of a block. Engines with equal layouts can exchange blocks."""

    name: str
    """Name of the axis order; equals `EngineInfo.kv_layout` and is part of every BlockKey."""
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    block_bytes: int


class KvBlock(msgspec.Struct, frozen=True):
    """One complete block. `seal` adds the checksum, `is_intact` verifies it."""

    key: BlockKey
    sequence_hash: SequenceHash
    parent: BlockKey | None
    """None for the first block of a sequence."""
    position: int
    """Index of the block in its sequence."""
    data: bytes
    checksum: int = 0

    def seal(self) -> KvBlock:
        """Return a copy with its checksum."""
        return msgspec.structs.replace(self, checksum=self._compute())

    @property
    def is_intact(self) -> bool:
        return self.checksum == self._compute()

    def _compute(self) -> int:
        """Checksum over ids and bytes: bytes stored under the wrong id are corrupt too."""
        state = xxh3_64(self.key)
        state.update(_pack_names(self.sequence_hash, self.position, self.parent is not None))
        state.update(self.parent or b"")
        state.update(self.data)
        return state.intdigest()
