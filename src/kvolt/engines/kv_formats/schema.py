"""Wire format of vLLM's and SGLang's KV events: msgpack; a batch is an array of time, events and data-parallel rank.

An event is a map with a `type` or, in older versions, an array with the type first. Both forms are decoded to the
same structs; unused fields are ignored. Owns the formats, not their meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

EngineHash = int | bytes
"""An engine's hash of a block, a signed or unsigned number or a byte string; opaque."""


class Engine(StrEnum):
    """The engine that sent the events. Their array forms differ; the maps are the same."""

    VLLM = "vllm"
    SGLANG = "sglang"


ExtraKeys = tuple[tuple[Any, ...] | None, ...]


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
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


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    block_hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True):
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


class _Type(msgspec.Struct):
    type: str


class _TypeFirst(msgspec.Struct, array_like=True):
    type: str


# Array forms: the type, then fields in this order. Later versions only append fields.


class _VllmStored(msgspec.Struct, array_like=True):
    type: str
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


class _SglangStored(msgspec.Struct, array_like=True):
    type: str
    block_hashes: tuple[EngineHash, ...]
    parent_block_hash: EngineHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | str | None = None
    medium: str | None = None
    metadata: _SglangMetadata | None = None


class _Removed(msgspec.Struct, array_like=True):
    type: str
    block_hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group_idx: int | None = None


_decode_batch = msgspec.msgpack.Decoder(_Batch).decode
_decode_type = msgspec.msgpack.Decoder(_Type).decode
_decode_type_first = msgspec.msgpack.Decoder(_TypeFirst).decode
_decode_stored = msgspec.msgpack.Decoder(BlockStored).decode
_decode_removed = msgspec.msgpack.Decoder(BlockRemoved).decode
_decode_vllm_stored = msgspec.msgpack.Decoder(_VllmStored).decode
_decode_sglang_stored = msgspec.msgpack.Decoder(_SglangStored).decode
_decode_removed_row = msgspec.msgpack.Decoder(_Removed).decode

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_batch(payload: bytes, engine: Engine) -> EngineBatch:
    """Decode a batch. MsgspecError if it is not a batch; events that cannot be decoded are only counted."""
    try:
        batch = _decode_batch(payload)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
    events: list[EngineEvent] = []
    num_unreadable = 0
    for raw in batch.events:
        try:
            event = _decode_map(raw) if _is_map(raw) else _decode_row(raw, engine)
        except _UNREADABLE:
            event = None
        if event is None:
            num_unreadable += 1
        else:
            events.append(event)
    return EngineBatch(tuple(events), batch.dp_rank, num_unreadable)


def _is_map(raw: msgspec.Raw) -> bool:
    first = memoryview(raw)[0]
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def _decode_map(raw: msgspec.Raw) -> EngineEvent | None:
    match _decode_type(raw).type:
        case "BlockStored":
            return _decode_stored(raw)
        case "BlockRemoved":
            return _decode_removed(raw)
        case "AllBlocksCleared":
            return AllBlocksCleared()
    return None


def _decode_row(raw: msgspec.Raw, engine: Engine) -> EngineEvent | None:
    match _decode_type_first(raw).type, engine:
        case "BlockStored", Engine.VLLM:
            return _of_vllm(_decode_vllm_stored(raw))
        case "BlockStored", Engine.SGLANG:
            return _of_sglang(_decode_sglang_stored(raw))
        case "BlockRemoved", _:
            removed = _decode_removed_row(raw)
            return BlockRemoved(
                block_hashes=removed.block_hashes, medium=removed.medium, group_idx=removed.group_idx
            )
        case "AllBlocksCleared", _:
            return AllBlocksCleared()
    return None


def _of_vllm(row: _VllmStored) -> BlockStored:
    return BlockStored(
        block_hashes=row.block_hashes,
        parent_block_hash=row.parent_block_hash,
        token_ids=row.token_ids,
        block_size=row.block_size,
        lora_id=row.lora_id,
        lora_name=row.lora_name,
        medium=row.medium,
        extra_keys=row.extra_keys,
        group_idx=row.group_idx,
        kv_cache_spec_kind=row.kv_cache_spec_kind,
    )


def _of_sglang(row: _SglangStored) -> BlockStored:
    return BlockStored(
        block_hashes=row.block_hashes,
        parent_block_hash=row.parent_block_hash,
        token_ids=row.token_ids,
        block_size=row.block_size,
        lora_id=row.lora_id,
        medium=row.medium,
        cache_salt=row.metadata.cache_salt if row.metadata is not None else None,
    )
