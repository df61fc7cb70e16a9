"""BlockHolds: blocks held for transfers to and from other workers and tiers.

- kept: blocks of a finished request, until a peer has fetched them
- orphaned: blocks of a failed request, while a peer may still be reading them
- pinned: blocks being copied to another tier
- deferred: blocks that were given up, which the step in flight may still use
- incoming: blocks allocated for received KV, until it is complete (then they may become `prefetched_blocks`)

Knows no deadlines and moves no bytes. Holds that are not released reduce the engine's capacity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from kvolt.core.ids import BlockKey, RequestId
from kvolt.kv import BlockId, BlockNames, BlockPool, SealedLog


@dataclass(slots=True)
class _Chain:
    """Blocks from the start of a sequence; the last ones may be unnamed."""

    blocks: list[BlockId]
    names: BlockNames
    num_present: int = 0
    """For incoming blocks: how many of the chain were in the pool already."""
    is_cleared: bool = False
    """Whether the cache was cleared since: blocks that arrive later must not be registered."""


class BlockHolds:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._kept: dict[RequestId, _Chain] = {}
        self._orphaned: dict[RequestId, list[BlockId]] = {}
        self._pinned: dict[RequestId, list[list[BlockId]]] = {}
        """By the name under which they are released."""
        self._deferred: list[list[BlockId]] = []
        self._incoming: dict[BlockId, _Chain] = {}  # by the first block to be filled

    def __iter__(self) -> Iterator[BlockId]:
        """Every block, once per hold."""
        held = (each.blocks for each in chain(self._kept.values(), self._incoming.values()))
        pinned = chain.from_iterable(self._pinned.values())
        return chain.from_iterable(chain(held, self._orphaned.values(), pinned, self._deferred))

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._kept or request_id in self._orphaned or request_id in self._pinned

    def keep(self, request_id: RequestId, blocks: list[BlockId], names: BlockNames) -> None:
        """Hold the blocks of a finished request; ownership passes from the caller."""
        self._kept[request_id] = _Chain(blocks, names)

    def find(self, request_id: RequestId) -> tuple[list[BlockId], BlockNames] | None:
        """The blocks of a request and the names of the full ones; None if none are kept."""
        held = self._kept.get(request_id)
        return None if held is None else (held.blocks, held.names)

    def keep_orphaned(self, request_id: RequestId, blocks: list[BlockId]) -> None:
        """Hold the blocks of a sequence that ended early, no longer available to peers; ownership passes from
        the caller."""
        self._orphaned[request_id] = blocks

    def orphan(self, request_id: RequestId) -> None:
        """Turn the kept blocks of a request into orphaned ones."""
        held = self._kept.pop(request_id, None)
        if held is not None:
            self.keep_orphaned(request_id, held.blocks)

    def pin_sealed(self, name: RequestId, most_blocks: int) -> list[tuple[list[BlockId], BlockNames, int]]:
        """Pin blocks that were named since the last call and are still cached, until `release_kept(name)`.

        Returns for each run of them the chain that it ends and its start in the chain. At most `most_blocks`
        of the free blocks are pinned (few while requests run); the rest follows in the next call. The first
        call returns nothing: it only starts the log.
        """
        pool = self._pool
        if pool.sealed is None:
            pool.sealed = SealedLog(pool.num_blocks)
        pinned: list[tuple[list[BlockId], BlockNames, int]] = []
        fewest_free = pool.num_free - most_blocks
        while pool.sealed and pool.num_free > fewest_free:
            tip, first = pool.sealed.pop_run()
            blocks, names = self.pin(name, tip)
            if len(blocks) > first:
                pinned.append((blocks, names, first))
        return pinned

    def pin(self, name: RequestId, tip: BlockKey) -> tuple[list[BlockId], BlockNames]:
        """Hold a block and all blocks before it in its sequence; empty if it is no longer cached."""
        names = self._pool.lineage(tip)
        blocks = self._pool.acquire(names.keys)
        if blocks:
            self._pinned.setdefault(name, []).append(blocks)
        return blocks, names

    def release_kept(self, request_id: RequestId) -> bool:
        """Release kept and pinned blocks, and defer orphaned ones; returns whether any were kept or orphaned."""
        for blocks in self._pinned.pop(request_id, ()):
            self._pool.release(reversed(blocks))
        orphaned = self._orphaned.pop(request_id, None)
        if orphaned:
            self.defer(orphaned)
        held = self._kept.pop(request_id, None)
        if held is not None:
            self._pool.release(reversed(held.blocks))
        return bool(orphaned) or held is not None

    @property
    def has_deferred(self) -> bool:
        return bool(self._deferred)

    def defer(self, blocks: list[BlockId]) -> None:
        """Hold blocks until `release_deferred`; ownership passes from the caller."""
        self._deferred.append(blocks)

    def release_deferred(self) -> None:
        for blocks in self._deferred:
            self._pool.release(reversed(blocks))
        self._deferred.clear()

    def allocate_incoming(self, names: BlockNames) -> list[tuple[int, BlockId]]:
        """Allocate a block for each of `names` that is not cached; the caller fills them and commits.

        `names` must start at the first block of a sequence. Returns (index, block) pairs, fewer if the pool
        is full.
        """
        present = self._pool.acquire(names.keys)
        allocated = self._pool.allocate(min(len(names) - len(present), self._pool.num_free))
        if not allocated:
            self._pool.release(reversed(present))
            return []
        self._incoming[allocated[0]] = _Chain(present + allocated, names, len(present))
        return list(enumerate(allocated, len(present)))

    def clear(self) -> None:
        """Mark incoming blocks as cleared: they were computed before the cache was cleared."""
        for held in self._incoming.values():
            held.is_cleared = True

    def attach_last(
        self, incoming: Sequence[tuple[int, BlockId]], start: int, keys: Sequence[BlockKey]
    ) -> tuple[int, list[BlockId]]:
        """Hand the filled incoming blocks from index `start` on to the caller. Returns the end index and the
        blocks: all that remain, or none if their keys differ. The first incoming block stays, since the hold
        is found by it."""
        held = self._incoming[incoming[0][1]]
        start, end = max(start, held.num_present + 1), len(held.blocks)
        is_other = end > len(keys) or held.names.keys[end - 1] != keys[end - 1]
        if start >= end or is_other or held.is_cleared:
            return end, []
        attached = held.blocks[start:]
        del held.blocks[start:]
        return end, attached

    def commit_incoming(
        self, incoming: Sequence[tuple[int, BlockId]], num_filled: int | None = None
    ) -> list[BlockKey]:
        """Register the first `num_filled` incoming blocks (None: all) as cached and free the rest. Returns
        the keys up to the last filled block, including those present before."""
        if not incoming:
            return []
        held = self._incoming.pop(incoming[0][1])
        end = len(held.blocks)  # fewer than allocated if some were attached
        if num_filled is not None:
            end = min(end, held.num_present + num_filled)
        if held.is_cleared:
            end = held.num_present
        self._pool.register_run(held.blocks, held.names, held.num_present, end)
        self._pool.release(reversed(held.blocks))
        return held.names.keys[:end]
