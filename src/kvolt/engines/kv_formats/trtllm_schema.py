"""Format of TensorRT-LLM's KV events, as written by its KVCacheEventSerializer: dictionaries with an id and a window.

Owns the format, not its meaning. Unused fields are ignored.
"""

from __future__ import annotations

from typing import Any

import msgspec

EngineHash = int | str
"""TensorRT-LLM's hash of a block; opaque."""


class UniqueToken(msgspec.Struct, frozen=True):
    token_id: int | str
    """A string for media."""
    token_extra_id: int = 0


class StoredBlock(msgspec.Struct, frozen=True):
    block_hash: EngineHash
    tokens: tuple[UniqueToken, ...]
    cache_level: int = 0
    mm_keys: tuple[Any, ...] = ()


class StoredData(msgspec.Struct, frozen=True, tag_field="type", tag="stored"):
    """Consecutive blocks of one sequence."""

    blocks: tuple[StoredBlock, ...]
    parent_hash: EngineHash | None = None


class RemovedData(msgspec.Struct, frozen=True, tag_field="type", tag="removed"):
    block_hashes: tuple[EngineHash, ...]


class CreatedData(msgspec.Struct, frozen=True, tag_field="type", tag="created"):
    """Creation of the pools; the first event."""

    num_blocks_per_cache_level: tuple[int, ...]


class Diff(msgspec.Struct, frozen=True):
    new_value: int
    old_value: int


class UpdatedData(msgspec.Struct, frozen=True, tag_field="type", tag="updated"):
    block_hash: EngineHash
    cache_level: Diff | None = None


class TrtllmKvEvent(msgspec.Struct, frozen=True):
    event_id: int
    data: StoredData | RemovedData | CreatedData | UpdatedData
    window_size: int | None = None
    """Attention window of the layers that these blocks belong to."""
    attention_dp_rank: int | None = None


def decode_event(event: Any) -> TrtllmKvEvent | None:
    """Decode an event; None if its type or form is unknown."""
    try:
        return msgspec.convert(event, TrtllmKvEvent)
    except msgspec.ValidationError:
        return None
