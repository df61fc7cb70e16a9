"""The bytes of vLLM's and SGLang's KV events: msgpack, a batch is an array of time, events and data-parallel rank.

An event is a map with its `type`, or, from older versions, an array with the type first. Both shapes are read into
the same structs; fields that we have no use for are passed over. Owns the formats and nothing of their meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

EngineHash = int | bytes
"""An engine's own name of a block, a number with or without sign or a byte string: opaque, and its own."""


class Engine(StrEnum):
    """Whose arrays they are. (The maps of both are alike.)"""

    VLLM = "vllm"
    SGLANG = "sglang"


ExtraKeys = tuple[tuple[Any, ...] | None, ...]


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks one below the other."""

    block_hashes: tuple[EngineHash, ...]
    parent_block_hash: EngineHash | None = None
    token_ids: tuple[int, ...] = ()
    """Of all the blocks; none where the block is only copied to another tier."""
    block_size: int = 0
    lora_id: int | str | None = None
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: ExtraKeys | None = None
    """What else went into the engine's hashes, for each block (vLLM)."""
    cache_salt: str | None = None
    """Of SGLang; vLLM has it among the extra keys."""
    group_idx: int | None = None
    """Which layers' blocks these are, in models whose layers keep unlike caches (vLLM)."""
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    block_hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True):
    pass


ForeignEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class ForeignBatch:
    events: tuple[ForeignEvent, ...]
    dp_rank: int | None
    num_unreadable: int
    """Events of a type, or in a shape, that is not known here."""


class _Batch(msgspec.Struct, array_like=True):
    time: float
    events: tuple[msgspec.Raw, ...]
    dp_rank: int | None = None


class _Type(msgspec.Struct):
    type: str


class _TypeFirst(msgspec.Struct, array_like=True):
    type: str


# Arrays, the type first and then in this order. Later versions only ever add at the end.


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


def decode_batch(payload: bytes, engine: Engine) -> ForeignBatch:
    """msgspec.MsgspecError when it is no batch at all. Single events that cannot be read are counted."""
    try:
        batch = _decode_batch(payload)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
    events: list[ForeignEvent] = []
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
    return ForeignBatch(tuple(events), batch.dp_rank, num_unreadable)


def _is_map(raw: msgspec.Raw) -> bool:
    first = memoryview(raw)[0]
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def _decode_map(raw: msgspec.Raw) -> ForeignEvent | None:
    match _decode_type(raw).type:
        case "BlockStored":
            return _decode_stored(raw)
        case "BlockRemoved":
            return _decode_removed(raw)
        case "AllBlocksCleared":
            return AllBlocksCleared()
    return None


def _decode_row(raw: msgspec.Raw, engine: Engine) -> ForeignEvent | None:
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
