"""Holds: blocks kept for the other end of a handoff.

Owns the blocks *kept* of a finished request until a peer has fetched them, those *left* of one that failed while a
peer may be reading them, those *pinned* while they are copied elsewhere, and those *adopted*: allocated for KV that
comes from elsewhere, until it is here (then they may be `arrivals`). Knows no deadlines and moves no bytes; who keeps
blocks must also release them, or the engine has that much less room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from kvolt.core.ids import BlockKey, RequestId
from kvolt.kv import BlockId, BlockPool, Names


@dataclass(slots=True)
class _Chain:
    """Blocks from the start of a sequence on; the last ones may have no name yet."""

    blocks: list[BlockId]
    names: Names
    num_present: int = 0
    """Of those adopted, how many were in the pool already."""
    is_forgotten: bool = False
    """Whether all was to be forgotten since: what comes for it is not to be found."""


class Holds:
    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._kept: dict[RequestId, _Chain] = {}
        self._left: dict[RequestId, list[BlockId]] = {}
        self._pinned: dict[RequestId, list[list[BlockId]]] = {}
        """By the name under which they are let go."""
        self._adopted: dict[BlockId, _Chain] = {}  # by the first block that is to be filled

    def __iter__(self) -> Iterator[BlockId]:
        """Every block, as often as it is held."""
        held = (each.blocks for each in chain(self._kept.values(), self._adopted.values()))
        pinned = chain.from_iterable(self._pinned.values())
        return chain.from_iterable(chain(held, self._left.values(), pinned))

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._kept or request_id in self._left or request_id in self._pinned

    def keep(self, request_id: RequestId, blocks: list[BlockId], names: Names) -> None:
        """Take over blocks from their holder."""
        self._kept[request_id] = _Chain(blocks, names)

    def kept(self, request_id: RequestId) -> tuple[list[BlockId], Names] | None:
        """The blocks of a request and the names of the full ones; None when none are kept."""
        held = self._kept.get(request_id)
        return None if held is None else (held.blocks, held.names)

    def leave(self, request_id: RequestId, blocks: list[BlockId]) -> None:
        """Take over blocks of one that is over before its end: they are held, but not to be had any more."""
        self._left[request_id] = blocks

    def forsake(self, request_id: RequestId) -> None:
        """What is kept of a request, if anything is, is left."""
        held = self._kept.pop(request_id, None)
        if held is not None:
            self.leave(request_id, held.blocks)

    def take_left(self, request_id: RequestId) -> list[BlockId]:
        """They are the caller's to release."""
        return self._left.pop(request_id, [])

    def pin(self, name: RequestId, tip: BlockKey) -> tuple[list[BlockId], Names]:
        """Hold a block and all before it in its sequence; none where it is not here any more."""
        names = self._pool.lineage(tip)
        blocks = self._pool.acquire(names.keys)
        if blocks:
            self._pinned.setdefault(name, []).append(blocks)
        return blocks, names

    def release_kept(self, request_id: RequestId) -> bool:
        for blocks in self._pinned.pop(request_id, ()):
            self._pool.release(reversed(blocks))
        held = self._kept.pop(request_id, None)
        if held is None:
            return False
        self._pool.release(reversed(held.blocks))
        return True

    def adopt(self, names: Names) -> list[tuple[int, BlockId]]:
        """A block for each of `names` that is not here, by its index: the caller fills them, then seals.

        `names` are those of a sequence from its first block on. The list ends where the pool is full.
        """
        present = self._pool.acquire(names.keys)
        fresh = self._pool.allocate(min(len(names) - len(present), self._pool.num_free))
        if not fresh:
            self._pool.release(reversed(present))
            return []
        self._adopted[fresh[0]] = _Chain(present + fresh, names, len(present))
        return list(enumerate(fresh, len(present)))

    def clear(self) -> None:
        """What comes for an `adopt` that is under way was computed before everything was to be forgotten."""
        for held in self._adopted.values():
            held.is_forgotten = True

    def take_last(
        self, adopted: Sequence[tuple[int, BlockId]], start: int, keys: Sequence[BlockKey]
    ) -> tuple[int, list[BlockId]]:
        """The blocks of an `adopt` from the place `start` of its sequence on, which are filled, become the caller's:
        all that are left of them, or none where they are not of these keys. Where they end, and they. The first block
        of the adoption stays: it goes by that."""
        held = self._adopted[adopted[0][1]]
        start, end = max(start, held.num_present + 1), len(held.blocks)
        is_other = end > len(keys) or held.names.keys[end - 1] != keys[end - 1]
        if start >= end or is_other or held.is_forgotten:
            return end, []
        taken = held.blocks[start:]
        del held.blocks[start:]
        return end, taken

    def seal_adopted(
        self, adopted: Sequence[tuple[int, BlockId]], num_filled: int | None = None
    ) -> list[BlockKey]:
        """The first `num_filled` of an `adopt` (None: all) are filled, and found from now on; the rest is freed.

        The keys of its sequence up to the last that is filled: those that were here already come first."""
        if not adopted:
            return []
        held = self._adopted.pop(adopted[0][1])
        end = len(held.blocks)  # fewer than there were, where some were taken
        if num_filled is not None:
            end = min(end, held.num_present + num_filled)
        if held.is_forgotten:
            end = held.num_present
        self._pool.register_run(held.blocks, held.names, held.num_present, end)
        self._pool.release(reversed(held.blocks))
        return held.names.keys[:end]
