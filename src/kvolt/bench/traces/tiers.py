"""Cache hits of KV tiers with given sizes on a trace, by eviction policy. Pure.

A block is a hit only if all blocks before it are hits, in any tier. `best_hits` is the upper bound: Belady's optimal
eviction for one cache of the total size, with independent blocks.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from kvolt.core.block_key import BLOCK_KEY_BYTES
from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Tier
from kvolt.core.trace import TraceRecord
from kvolt.kv.tiers.slot_table import SlotTable, TierBlock


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Hit counts over all prompt blocks of a trace."""

    num_blocks: int
    by_tier: tuple[int, ...]
    """Hits in each tier, fastest first."""

    @property
    def hit_rate(self) -> float:
        return sum(self.by_tier) / self.num_blocks if self.num_blocks else 0.0


def best_hits(records: Iterable[TraceRecord], capacity: int) -> tuple[int, int]:
    """Number of requested blocks, and the maximum hits of a cache with this capacity."""
    requested = [block for record in records for block in record.hash_ids]
    following: dict[int, deque[int]] = {}
    for at, block in enumerate(requested):
        following.setdefault(block, deque()).append(at)
    held: dict[int, int] = {}
    by_next: list[tuple[int, int]] = []
    num_hits = 0
    for block in requested:
        upcoming = following[block]
        upcoming.popleft()
        next_at = upcoming[0] if upcoming else len(requested)
        num_hits += block in held
        held[block] = next_at
        heapq.heappush(by_next, (-next_at, block))
        while len(held) > capacity:
            negative, farthest = heapq.heappop(by_next)
            if held.get(farthest) == -negative:
                del held[farthest]
    return len(requested), num_hits


def found_in_tiers(records: Iterable[TraceRecord], sizes: Sequence[int], eviction: str = "lru") -> Found:
    """Simulate inclusive tiers with these sizes, fastest first."""
    tiers = [SlotTable(Tier.HOST, size, eviction) for size in sizes]
    num_blocks, by_tier = 0, [0] * len(tiers)
    for record in records:
        blocks = _blocks(record.hash_ids)
        keys = [block.key for block in blocks]
        num_blocks += len(blocks)
        num_found = 0
        for key in keys:
            level = next((index for index, tier in enumerate(tiers) if tier.has(key)), None)
            if level is None:
                break
            by_tier[level] += 1
            num_found += 1
        for tier in tiers:
            present = [key for key in keys[:num_found] if tier.has(key)]
            tier.hold(present)
            new = [blocks[each].key for each, _ in tier.reserve(blocks)]
            for key in new:
                tier.seal(key, 0)
            tier.register(reversed(new))  # deepest first, so that parents are more recent
            tier.release(present)
            tier.take_changes()
    return Found(num_blocks=num_blocks, by_tier=tuple(by_tier))


def _blocks(ids: Sequence[int]) -> list[TierBlock]:
    blocks: list[TierBlock] = []
    parent: BlockKey | None = None
    for position, each in enumerate(ids):
        key = BlockKey(each.to_bytes(BLOCK_KEY_BYTES, "little"))
        blocks.append(TierBlock(key, SequenceHash(each), parent, None, position))
        parent = key
    return blocks
