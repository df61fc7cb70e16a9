"""Wire format of vLLM's and SGLang's KV events: msgpack; a batch is an array of time, events and data-parallel rank.

An event is a map with a `type` or, in older versions, an array with the type first. Both forms are decoded to the
same structs; unused fields are ignored. Owns the formats, not their meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from kvolt.core.errors import MALFORMED

EngineHash = int | bytes
"""An engine's hash of a block, a signed or unsigned number or a byte string; opaque."""


class SourceEngine(StrEnum):
    """The engine that sent the events. Their array forms differ; the maps are the same."""

    VLLM = "vllm"
    SGLANG = "sglang"


ExtraKeys = tuple[tuple[Any, ...] | None, ...]


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Consecutive blocks of one sequence."""

    block_hashes: tuple[EngineHash, ...]
    parent_block_hash: EngineHash | None = None
    token_ids: tuple[int, ...] = ()
    """Tokens of all blocks; empty if the blocks were only copied to another tier."""
    block_size: int = 0
    lora_id: int | str | None = None
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: ExtraKeys | None = None
    """Additional inputs of the engine's hash of each block (vLLM)."""
    cache_salt: str | None = None
    """SGLang's cache salt; vLLM's is one of the extra keys."""
    group_idx: int | None = None
    """KV cache group of the layers, in models with several kinds of caches (vLLM)."""
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    block_hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    pass


EngineEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EngineBatch:
    events: tuple[EngineEvent, ...]
    dp_rank: int | None
    num_unreadable: int
    """Number of events of an unknown type or form."""


class _Batch(msgspec.Struct, array_like=True):
    time: float
    events: tuple[msgspec.Raw, ...]
    dp_rank: int | None = None


# Array forms: the type, then fields in this order. Later versions only append fields.


class _VllmStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: tuple[EngineHash, ...]
    parent_block_hash: EngineHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: ExtraKeys | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _SglangMetadata(msgspec.Struct):
    cache_salt: str | None = None


class _SglangStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: tuple[EngineHash, ...]
    parent_block_hash: EngineHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | str | None = None
    medium: str | None = None
    metadata: _SglangMetadata | None = None


class _Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


_Row = _VllmStored | _SglangStored | _Removed | _Cleared

_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_map = msgspec.msgpack.Decoder(EngineEvent).decode
_DECODE_ROW: dict[SourceEngine, Callable[[msgspec.Raw], _Row]] = {
    SourceEngine.VLLM: msgspec.msgpack.Decoder(_VllmStored | _Removed | _Cleared).decode,
    SourceEngine.SGLANG: msgspec.msgpack.Decoder(_SglangStored | _Removed | _Cleared).decode,
}


def decode_batch(payload: bytes, engine: SourceEngine) -> EngineBatch:
    """Decode a batch. MsgspecError if it is not a batch; events that cannot be decoded are only counted."""
    try:
        batch = _decode_batch(payload)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
    events: list[EngineEvent] = []
    num_unreadable = 0
    for raw in batch.events:
        try:
            events.append(_decode_map(raw) if _is_map(raw) else _event_of(_DECODE_ROW[engine](raw)))
        except MALFORMED:
            num_unreadable += 1
    return EngineBatch(tuple(events), batch.dp_rank, num_unreadable)


def _is_map(raw: msgspec.Raw) -> bool:
    first = memoryview(raw)[0]
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def _event_of(row: _Row) -> EngineEvent:
    fields = msgspec.structs.asdict(row)
    match row:
        case _VllmStored():
            return BlockStored(**fields)
        case _SglangStored():
            metadata = fields.pop("metadata")
            return BlockStored(**fields, cache_salt=metadata.cache_salt if metadata is not None else None)
        case _Removed():
            return BlockRemoved(**fields)
        case _Cleared():
            return AllBlocksCleared()
