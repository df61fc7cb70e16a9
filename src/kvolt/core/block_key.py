"""BlockKey: identity of a block wherever its bytes are stored or shared.

Defines the derivation and its format version. A collision would serve the KV of another prompt, so the key covers
everything that affects the bytes of a block, and fields are framed so that no two inputs share an encoding.
Tensor-parallel degree and rank are excluded: they identify the stored shard, not the block.

    context key = blake2b-256(person "kvolt.context", every context field as u64 length + bytes)
    BlockKey    = blake2b-128(key = context key, parent | tokens | media ...)
                  parent  16 bytes: the previous BlockKey, or ROOT
                  tokens  block_size * u32, a fixed length since block_size is in the context
                  media   per extent, by position: i64 start relative to the block, u64 length,
                          u64 digest length, digest

All integers are little-endian. A change requires a new FORMAT_VERSION; stored blocks of the old version then miss.
Unlike in the routing hash, media includes its position: swapped images share placeholder tokens, but not KV.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import cast

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.core.hashing import MediaExtent, TokenBlocks, TokenIds, check_block_size, cut_blocks, utf8
from kvolt.core.ids import BlockKey

FORMAT_VERSION = 1
BLOCK_KEY_BYTES = 16
ROOT = b"kvolt block root"

_CONTEXT_PERSON = b"kvolt.context"
_CONTEXT_KEY_BYTES = 32
_pack_u64 = struct.Struct("<Q").pack
_pack_extent = struct.Struct("<qQQ").pack


class BlockKeyContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything besides tokens and media that the KV of a block depends on.

    `lora` must identify the adapter's weights if an adapter can be replaced under its name. An empty `lora` or
    `salt` means none.
    """

    weights_hash: str
    dtype: str
    block_size: int
    layout: str
    lora: str | None = None
    salt: str | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        check_block_size(self.block_size)
        if not 0 <= self.format_version < 2**64:
            raise ConfigError(
                "block format version out of range", key="format_version", remedy=f"use {FORMAT_VERSION}"
            )

    def derive_key(self) -> bytes:
        """Derive the 32-byte hash key of this context's blocks."""
        fields = (
            _pack_u64(self.format_version),
            utf8(self.weights_hash, "weights_hash"),
            utf8(self.lora or "", "lora"),
            utf8(self.dtype, "dtype"),
            _pack_u64(self.block_size),
            utf8(self.layout, "layout"),
            utf8(self.salt or "", "salt"),
        )
        framed = b"".join(part for value in fields for part in (_pack_u64(len(value)), value))
        return blake2b(framed, digest_size=_CONTEXT_KEY_BYTES, person=_CONTEXT_PERSON).digest()


@lru_cache(maxsize=256)
def _keyed(context: BlockKeyContext) -> blake2b:
    """Empty hash state with the key of a context, to be copied. Cached: most requests share a few contexts."""
    return blake2b(digest_size=BLOCK_KEY_BYTES, key=context.derive_key())


class BlockKeyChain:
    """Keys of the full blocks of a growing sequence. Extending costs only the new tokens."""

    def __init__(self, context: BlockKeyContext, media: Iterable[MediaExtent] = ()) -> None:
        self.context = context
        self.keys: list[BlockKey] = []
        self._blocks = TokenBlocks(context.block_size, list(media))
        self._keyed = _keyed(context)

    @property
    def num_tokens(self) -> int:
        return self._blocks.num_tokens

    def extend(self, tokens: TokenIds) -> list[BlockKey]:
        """Append tokens and return the keys of the blocks they complete. Changes nothing if it raises."""
        block_size = self.context.block_size
        start = self._blocks.num_blocks * block_size
        data, media = self._blocks.push(tokens)
        if not data:
            return []
        new_state = self._keyed.copy
        parent: bytes = self.keys[-1] if self.keys else ROOT
        digests: list[bytes] = []
        for index, (block,) in enumerate(cut_blocks(data, block_size)):
            state = new_state()
            state.update(parent + block)
            if media is not None and media[index]:
                state.update(_media_bytes(media[index], start + index * block_size))
            parent = state.digest()
            digests.append(parent)
        keys = cast("list[BlockKey]", digests)
        self.keys += keys
        return keys

    def append(self, block: bytes) -> BlockKey:
        """Append one full block, given as token bytes; three times as fast as `extend`.

        Only for sequences without media and without an open block.
        """
        state = self._keyed.copy()
        state.update((self.keys[-1] if self.keys else ROOT) + block)
        key = cast("BlockKey", state.digest())
        self._blocks.num_blocks += 1
        self.keys.append(key)
        return key


def _media_bytes(extents: Sequence[MediaExtent], block_start: int) -> bytes:
    return b"".join(
        _pack_extent(extent.start - block_start, extent.length, len(extent.digest)) + extent.digest
        for extent in extents
    )


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
