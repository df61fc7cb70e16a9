"""Converts the changes of `tier_events` to vLLM's KV events. Runs in vLLM's processes."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from kvolt.core.kv_events import Tier
from kvolt.engines.vllm.plugins.tier_events import RemovedRun, StoredRun

_MEDIA = {Tier.HOST: MEDIUM_CPU, Tier.DISK: MEDIUM_STORAGE}
_GROUP = 0
"""The only KV cache group, see `tier_connector`."""


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
