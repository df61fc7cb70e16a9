"""KvExchange: keys, holds and allocations of an engine's blocks.

Implements KvVisible, KvAddressable and KvTierable for engines that use kvolt's scheduler. Knows no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from kvolt.core.errors import InvalidRequest, NotFound
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_events import Stored
from kvolt.core.request import Request
from kvolt.engines.contract import AttachedKv, HeldKv, KvAllocation, SealedKv
from kvolt.kv import BlockId, BlockNames
from kvolt.scheduler.scheduler import Scheduler

_PINNED_SHARE = 0.125
"""Share of all blocks that may be pinned at a time for offload."""


def to_held_kv(blocks: Sequence[BlockId], names: BlockNames) -> HeldKv:
    """The named (full) blocks of a sequence."""
    return HeldKv(tuple(blocks[: len(names)]), tuple(names.keys), tuple(names.sequence_hashes))


def _sealed(blocks: Sequence[BlockId], names: BlockNames, first: int, hold_s: float) -> SealedKv:
    parent = names[first - 1] if first else None
    return SealedKv(
        first,
        tuple(blocks[first:]),
        tuple(names.keys[first:]),
        tuple(names.sequence_hashes[first:]),
        None if parent is None else parent.key,
        None if parent is None else parent.sequence_hash,
        hold_s,
    )


def _incoming(allocation: KvAllocation) -> list[tuple[int, BlockId]]:
    return [(index, BlockId(block)) for index, block in enumerate(allocation.blocks, allocation.num_present)]


class KvExchange:
    """See the module. Must be called between steps, or by the thread that plans them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def keys(self, request: Request) -> list[BlockKey]:
        """Keys of the full blocks of a prompt."""
        return self._scheduler.prompt_keys(request)

    def match(self, request: Request) -> int:
        return self._scheduler.pool.match(self.keys(request)) * self._scheduler.limits.block_size

    def contents(self) -> tuple[Stored, ...]:
        return tuple(self._scheduler.pool.contents())

    def held(self, request_id: RequestId) -> HeldKv:
        """NotFound if nothing is held for the request."""
        kept = self._scheduler.holds.find(request_id)
        if kept is None:
            raise NotFound(f"no blocks are kept for {request_id}", kind="handoff", name=request_id)
        return to_held_kv(*kept)

    def pin_sealed(self, name: RequestId, hold_s: float) -> tuple[SealedKv, ...]:
        """As in KvTierable. The caller must release them after `hold_s`."""
        pool = self._scheduler.pool
        return tuple(
            _sealed(*each, hold_s)
            for each in self._scheduler.holds.pin_sealed(name, max(int(pool.num_blocks * _PINNED_SHARE), 1))
        )

    def allocate_kv(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvAllocation:
        if len(hashes) != len(keys):
            raise InvalidRequest(f"{len(keys)} blocks have {len(hashes)} hashes", param="sequence_hashes")
        names = BlockNames(list(keys), list(hashes))
        num_present = self._scheduler.pool.match(names.keys)
        incoming = self._scheduler.holds.allocate_incoming(names)
        return KvAllocation(num_present, tuple(block for _, block in incoming))

    def commit(
        self,
        allocation: KvAllocation,
        num_filled: int,
        keep_for: RequestId | None = None,
        expires_at: float = inf,
    ) -> None:
        self._scheduler.incoming.commit(_incoming(allocation), num_filled, keep_for, expires_at)

    def attach(self, allocation: KvAllocation, num_last: int, request_id: RequestId) -> AttachedKv:
        """As in `KvTierable.attach_kv`."""
        if not 0 <= num_last <= len(allocation.blocks):
            raise InvalidRequest(f"{num_last} of {len(allocation.blocks)} blocks", param="num_last")
        if not allocation.blocks:
            return AttachedKv()
        counts = self._scheduler.incoming.attach(_incoming(allocation), num_last, request_id)
        return AttachedKv() if counts is None else AttachedKv(True, *counts)
