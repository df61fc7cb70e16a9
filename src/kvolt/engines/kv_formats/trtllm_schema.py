"""TensorRT-LLM's KV events as its KVCacheEventSerializer writes them: dictionaries, each with an id and a window.

Owns the format and nothing of its meaning. Fields that we have no use for are passed over.
"""

from __future__ import annotations

from typing import Any

import msgspec

EngineHash = int | str
"""TensorRT-LLM's own name of a block: opaque, and its own."""


class UniqueToken(msgspec.Struct, frozen=True):
    token_id: int | str
    """A string for what is no token of text."""
    token_extra_id: int = 0


class StoredBlock(msgspec.Struct, frozen=True):
    block_hash: EngineHash
    tokens: tuple[UniqueToken, ...]
    cache_level: int = 0
    mm_keys: tuple[Any, ...] = ()


class StoredData(msgspec.Struct, frozen=True, tag_field="type", tag="stored"):
    """Blocks one below the other."""

    blocks: tuple[StoredBlock, ...]
    parent_hash: EngineHash | None = None


class RemovedData(msgspec.Struct, frozen=True, tag_field="type", tag="removed"):
    block_hashes: tuple[EngineHash, ...]


class CreatedData(msgspec.Struct, frozen=True, tag_field="type", tag="created"):
    """The pools as they are made, before anything else."""

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
    """Of the layers whose blocks these are."""
    attention_dp_rank: int | None = None


def event_of(told: Any) -> TrtllmKvEvent | None:
    """None for an event of a type, or in a shape, that is not known here."""
    try:
        return msgspec.convert(told, TrtllmKvEvent)
    except msgspec.ValidationError:
        return None
