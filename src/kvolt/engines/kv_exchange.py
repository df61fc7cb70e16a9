"""KvExchange: an engine's blocks as others ask for them: what is here, what leaves, what comes in.

Owns the rules of the KvVisible, KvMovable, KvPlaced and KvTierable protocols for engines with our scheduler. Knows no
layout: the memory reads and writes whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol

from kvolt.core.errors import InvalidRequest, NotFound
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_block import KvBlock
from kvolt.core.kv_events import Stored
from kvolt.core.request import Request
from kvolt.engines.contract import KvHeld, KvRoom, KvTaken, SealedKv
from kvolt.kv import BlockId, BlockName, Names
from kvolt.scheduler.scheduler import Scheduler

_PINNED_SHARE = 0.125
"""Of all blocks, those that are held at a time for who copies them elsewhere."""


class BlockMemory(Protocol):
    """Where the bytes of an engine's blocks lie."""

    def read(self, block: BlockId) -> bytes:
        """A copy."""
        ...

    def write(self, block: BlockId, data: bytes) -> None:
        """The caller has checked the length."""
        ...


def held_of(blocks: Sequence[BlockId], names: Names) -> KvHeld:
    """Of the blocks of a sequence those that are named, which are the full ones."""
    return KvHeld(tuple(blocks[: len(names)]), tuple(names.keys), tuple(names.sequence_hashes))


def _sealed(blocks: Sequence[BlockId], names: Names, first: int, hold_s: float) -> SealedKv:
    above = names[first - 1] if first else None
    return SealedKv(
        first,
        tuple(blocks[first:]),
        tuple(names.keys[first:]),
        tuple(names.sequence_hashes[first:]),
        None if above is None else above.key,
        None if above is None else above.sequence_hash,
        hold_s,
    )


def _adopted(room: KvRoom) -> list[tuple[int, BlockId]]:
    return [(index, BlockId(block)) for index, block in enumerate(room.blocks, room.num_present)]


class KvExchange:
    """See the module. To be used between steps, or by the thread that plans them."""

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
        """Of the full blocks of a prompt."""
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

    def hold(self, request_id: RequestId) -> KvHeld:
        """NotFound when nothing is kept for it any more."""
        kept = self._scheduler.kept(request_id)
        if kept is None:
            raise NotFound(f"no blocks are kept of {request_id}", kind="handoff", name=request_id)
        return held_of(*kept)

    def pin_sealed(self, name: RequestId, hold_s: float) -> tuple[SealedKv, ...]:
        """As of KvTierable; who calls it sees to it that they are let go after that time."""
        pool = self._scheduler.pool
        return tuple(
            _sealed(*each, hold_s)
            for each in self._scheduler.pin_sealed(name, max(int(pool.num_blocks * _PINNED_SHARE), 1))
        )

    def make_room(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvRoom:
        if len(hashes) != len(keys):
            raise InvalidRequest(f"{len(keys)} blocks have {len(hashes)} hashes", param="sequence_hashes")
        names = Names(list(keys), list(hashes))
        num_present = self._scheduler.pool.match(names.keys)
        adopted = self._scheduler.adopt(names)
        return KvRoom(num_present, tuple(block for _, block in adopted))

    def settle(
        self, room: KvRoom, num_filled: int, keep_for: RequestId | None = None, expires_at: float = inf
    ) -> None:
        self._scheduler.seal_adopted(_adopted(room), num_filled, keep_for, expires_at)

    def take(self, room: KvRoom, num_last: int, request_id: RequestId) -> KvTaken:
        """As `KvTierable.take_kv`."""
        if not 0 <= num_last <= len(room.blocks):
            raise InvalidRequest(f"{num_last} of {len(room.blocks)} blocks", param="num_last")
        if not room.blocks:
            return KvTaken()
        taken = self._scheduler.take_adopted(_adopted(room), num_last, request_id)
        return KvTaken() if taken is None else KvTaken(True, *taken)

    def import_kv(self, blocks: Sequence[KvBlock]) -> int:
        count = 0
        run: list[KvBlock] = []
        for block in blocks:
            if not block.intact or len(block.data) != self._block_bytes:
                break
            if run and block.parent != run[-1].key:
                taken = self._import_run(run)
                count += taken
                if taken < len(run):
                    return count
                run = []
            run.append(block)
        return count + self._import_run(run) if run else count

    def _import_run(self, run: Sequence[KvBlock]) -> int:
        """Blocks each of which follows the one before."""
        scheduler = self._scheduler
        names = Names()
        if run[0].parent is not None:
            names = scheduler.pool.lineage(run[0].parent)
            if len(names) != run[0].position:
                return 0  # its parent is not here
        elif run[0].position:
            return 0
        num_before = len(names)
        for block in run:
            names.append(BlockName(block.key, block.sequence_hash))
        present = scheduler.pool.match(names.keys)
        adopted = scheduler.adopt(names)
        for index, block_id in adopted:
            self._memory.write(block_id, run[index - num_before].data)
        scheduler.seal_adopted(adopted)
        return present - num_before + len(adopted)
