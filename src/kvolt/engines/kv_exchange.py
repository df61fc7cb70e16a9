"""KvExchange: block export, import, holds and allocations of an engine.

Implements KvVisible, KvMovable, KvAddressable and KvTierable for engines that use kvolt's scheduler. Knows no
layout: BlockMemory reads and writes whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol

from kvolt.core.block_key import KvBlock
from kvolt.core.errors import InvalidRequest, NotFound
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_events import Stored
from kvolt.core.request import Request
from kvolt.engines.contract import AttachedKv, HeldKv, KvAllocation, SealedKv
from kvolt.kv import BlockId, BlockName, BlockNames
from kvolt.scheduler.scheduler import Scheduler

_PINNED_SHARE = 0.125
"""Share of all blocks that may be pinned at a time for offload."""


class BlockMemory(Protocol):
    """Access to the bytes of an engine's blocks."""

    def read(self, block: BlockId) -> bytes:
        """A copy of the block."""

    def write(self, block: BlockId, data: bytes) -> None:
        """The caller has checked the length."""


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

    def __init__(
        self,
        scheduler: Scheduler,
        memory: BlockMemory,
        block_bytes: int,
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._block_bytes = block_bytes

    def keys(self, request: Request) -> list[BlockKey]:
        """Keys of the full blocks of a prompt."""
        return self._scheduler.prompt_keys(request)

    def match(self, request: Request) -> int:
        return self._scheduler.pool.match(self.keys(request)) * self._scheduler.limits.block_size

    def contents(self) -> tuple[Stored, ...]:
        return tuple(self._scheduler.pool.contents())

    def export_kv(self, keys: Sequence[BlockKey]) -> tuple[KvBlock, ...]:
        pool = self._scheduler.pool
        exported: list[KvBlock] = []
        parent: BlockKey | None = None
        position = 0
        for key in keys:
            block = pool.block_of(key)
            if block is None:
                break
            if not exported:
                lineage = pool.lineage(key)
                parent = lineage[-2].key if len(lineage) > 1 else None
                position = len(lineage) - 1
            name = pool.name_of(block)
            assert name is not None
            data = self._memory.read(block)
            exported.append(KvBlock(key, name.sequence_hash, parent, position, data).seal())
            parent, position = key, position + 1
        return tuple(exported)

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

    def import_kv(self, blocks: Sequence[KvBlock]) -> int:
        count = 0
        run: list[KvBlock] = []
        for block in blocks:
            if not block.is_intact or len(block.data) != self._block_bytes:
                break
            if run and block.parent != run[-1].key:
                num_imported = self._import_run(run)
                count += num_imported
                if num_imported < len(run):
                    return count
                run = []
            run.append(block)
        return count + self._import_run(run) if run else count

    def _import_run(self, run: Sequence[KvBlock]) -> int:
        """Import blocks each of which is the parent of the next."""
        scheduler = self._scheduler
        names = BlockNames()
        if run[0].parent is not None:
            names = scheduler.pool.lineage(run[0].parent)
            if len(names) != run[0].position:
                return 0  # the parent is not cached
        elif run[0].position:
            return 0
        num_before = len(names)
        for block in run:
            names.append(BlockName(block.key, block.sequence_hash))
        present = scheduler.pool.match(names.keys)
        incoming = scheduler.holds.allocate_incoming(names)
        for index, block_id in incoming:
            self._memory.write(block_id, run[index - num_before].data)
        scheduler.incoming.commit(incoming)
        return present - num_before + len(incoming)
