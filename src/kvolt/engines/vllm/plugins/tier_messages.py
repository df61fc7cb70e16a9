"""Messages between the two halves of the tier connector, sent with vLLM's steps, and the tiers' KV events as vLLM's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Tier
from kvolt.engines.vllm.plugins.tier_events import RemovedRun, StoredRun
from kvolt.engines.vllm.plugins.tier_stats import TierCounters

_MEDIA = {Tier.HOST: MEDIUM_CPU, Tier.DISK: MEDIUM_STORAGE}
_GROUP = 0
"""The only KV cache group, see `tier_connector`."""


class BlockMove(NamedTuple):
    """Copy of one block of a request."""

    key: BlockKey
    parent: BlockKey | None
    position: int
    number: int
    """Block id in vLLM."""


@dataclass
class TierCommands(KVConnectorMetadata):  # type: ignore[misc]
    """To the workers, with a step."""

    loads: dict[str, list[BlockMove]] = field(default_factory=dict)
    """Blocks to load per request, before it continues."""
    stores: dict[str, list[BlockMove]] = field(default_factory=dict)
    """Blocks completed by the step, per request."""
    awaited: set[str] = field(default_factory=set)
    """Finished requests whose blocks are kept until they are copied."""
    preempted: set[str] = field(default_factory=set)
    """Requests whose blocks may be reused from this step on."""
    timed: int | None = None
    """Number of the step if its time is to be measured."""
    clear: bool = False
    """Clear the tiers first."""


@dataclass
class InitialTierUpdate(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From a worker at start: content of its tiers."""

    update: TierUpdate | None


@dataclass
class TierUpdate(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers: blocks stored in and removed from each tier, with the number of workers that report it."""

    stored: Counter[tuple[Tier, SequenceHash]] = field(default_factory=Counter)
    removed: Counter[tuple[Tier, SequenceHash]] = field(default_factory=Counter)
    step_s: dict[int, float] = field(default_factory=dict)
    """Step times, by step number."""
    counters: dict[Tier, TierCounters] = field(default_factory=dict)

    def aggregate(self, other: Any) -> TierUpdate:
        step_s, counters = dict(self.step_s), dict(self.counters)
        for number, took_s in other.step_s.items():
            step_s[number] = max(step_s.get(number, 0.0), took_s)
        for tier, other_counters in other.counters.items():
            counters[tier] = other_counters.combine(counters[tier]) if tier in counters else other_counters
        return TierUpdate(self.stored + other.stored, self.removed + other.removed, step_s, counters)


def key_of(name: bytes, identity: bytes) -> BlockKey:
    """`name`: vLLM's block hash, which covers all tokens before, the adapter and the salt. `identity`: everything else
    that determines the bytes."""
    return BlockKey(blake2b(name, digest_size=16, key=identity[:64]).digest())


def hash_of(key: BlockKey) -> SequenceHash:
    """Hash under which tiers report a block."""
    return SequenceHash(int.from_bytes(key[:8], "little"))


def event_of(change: StoredRun | RemovedRun, block_size: int) -> Any:
    if isinstance(change, RemovedRun):
        names = [maybe_convert_block_hash(name) for name in change.names]
        return BlockRemoved(block_hashes=names, medium=_MEDIA[change.tier], group_idx=_GROUP)
    parent = change.blocks[0].parent
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(block.name) for block in change.blocks],
        parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
        token_ids=[token for block in change.blocks for token in block.token_ids],
        block_size=block_size,
        lora_id=None,
        medium=_MEDIA[change.tier],
        lora_name=None,
        extra_keys=[block.extra_keys for block in change.blocks],
        group_idx=_GROUP,
    )


def extra_keys_of(request: Any, start: int, end: int) -> Any:
    """Extra keys as in vLLM's event for the same block on its device."""
    keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
    event_keys = to_event_extra_keys([keys])
    return None if event_keys is None else event_keys[0]
