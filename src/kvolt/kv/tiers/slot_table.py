"""SlotTable: blocks in the slots of one tier, their holders and eviction. Pure.

Owns state, name, checksum and holders of every slot. Knows no bytes and no clock; the caller moves the bytes. As in a
pool, a block is indexed by its key from `register` on. Unlike in a pool, nothing computes in a slot, so holders are
only writers and readers, and a block is useful without its parent, which may be in another tier. Chains are still
evicted from their end: only leaves, blocks without a child in this tier, are eviction candidates.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, NewType, cast

import msgspec
from msgspec import Meta

from kvolt.core.block_key import BLOCK_KEY_BYTES
from kvolt.core.errors import ConfigError, KvoltError
from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Cleared, Tier
from kvolt.kv.changes import Change, ChangeLog
from kvolt.kv.lifecycle import BlockId, BlockMove, BlockState, next_state
from kvolt.kv.names import BlockNames
from kvolt.kv.tiers.eviction import new_eviction

Slot = NewType("Slot", int)

_KEY, _HASH = Meta(min_length=BLOCK_KEY_BYTES, max_length=BLOCK_KEY_BYTES), Meta(ge=0)
_MAX_SCAN = 1024
"""Blocks scanned for an inactive one if no leaf can be evicted."""


class TierBlock(msgspec.Struct, frozen=True, array_like=True):
    """A block as a tier keeps it, and as processes name it to each other."""

    key: Annotated[BlockKey, _KEY]
    sequence_hash: Annotated[SequenceHash, _HASH]
    parent: Annotated[BlockKey, _KEY] | None
    parent_hash: Annotated[SequenceHash, _HASH] | None
    position: Annotated[int, Meta(ge=0, lt=1 << 32)]
    """Position in its sequence."""


@dataclass(slots=True)
class _Entry:
    block: TierBlock
    slot: Slot
    state: BlockState
    num_holders: int
    checksum: int = 0
    accessed_at: int = 0
    """Logical time of the last access."""

    def move(self, move: BlockMove) -> None:
        self.state = next_state(BlockId(self.slot), self.state, move)


class SlotTable:
    """See the module."""

    def __init__(self, tier: Tier, num_slots: int, eviction: str = "lru", is_durable: bool = False) -> None:
        """`is_durable`: evicted slots are reused only after `complete_eviction`."""
        _check_room(tier, num_slots)
        self.tier = tier
        self.num_slots = num_slots
        self._is_durable = is_durable
        self._eviction = new_eviction(eviction, num_slots)
        self._entries: dict[BlockKey, _Entry] = {}
        """Blocks being written and indexed blocks."""
        self._evicting: dict[Slot, _Entry] = {}
        self._free: list[Slot] = []
        """Heap, lowest slot first, so that the end of a shrunk tier becomes free."""
        self._num_touched = 0
        """Slots ever used, so an idle large tier costs nothing."""
        self._num_children: dict[BlockKey, int] = {}
        """Children in this tier by parent key, whether or not the parent is in it."""
        self._invalid: set[BlockKey] = set()
        """Held blocks to remove on release."""
        self._num_writing = 0
        self._num_accesses = 0
        self._log = ChangeLog(2 * num_slots, tier)

    def __len__(self) -> int:
        """Number of indexed blocks."""
        return len(self._entries) - self._num_writing

    @property
    def num_free(self) -> int:
        """Empty slots."""
        return max(self.num_slots - len(self._entries) - len(self._evicting), 0)

    def __iter__(self) -> Iterator[BlockKey]:
        """Keys of the indexed blocks."""
        return iter([key for key, entry in self._entries.items() if _is_indexed(entry)])

    # --- lookup

    def has(self, key: BlockKey) -> bool:
        entry = self._entries.get(key)
        return entry is not None and _is_indexed(entry) and key not in self._invalid

    def has_or_pending(self, key: BlockKey) -> bool:
        """Whether the block is here or being written."""
        return key in self._entries

    def match(self, keys: Sequence[BlockKey]) -> int:
        """Length of the prefix of `keys` in this tier. Changes nothing."""
        for index, key in enumerate(keys):
            if not self.has(key):
                return index
        return len(keys)

    def block(self, key: BlockKey) -> TierBlock:
        return self._entry(key).block

    def checksum(self, key: BlockKey) -> int:
        return self._entry(key).checksum

    def slot(self, key: BlockKey) -> Slot:
        return self._entry(key).slot

    def hold(self, keys: Iterable[BlockKey], *, is_access: bool = True) -> list[Slot]:
        """Keep these indexed blocks unchanged until `release`. `is_access`: count as an access for eviction."""
        entries = [self._entry(key) for key in keys]
        self._num_accesses += is_access
        for entry in reversed(entries):
            if not entry.num_holders:
                entry.move(BlockMove.ACQUIRE)
            entry.num_holders += 1
            if is_access:
                entry.accessed_at = self._num_accesses
                if self._is_leaf(entry):
                    self._eviction.touch(entry.block.key)
        return [entry.slot for entry in entries]

    def release(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            entry = self._entry(key)
            entry.num_holders -= 1
            if not entry.num_holders:
                entry.move(BlockMove.RELEASE)
                if key in self._invalid:
                    self.forget([key])
        self._shrink()

    # --- writing

    def reserve(self, blocks: Sequence[TierBlock]) -> list[tuple[int, Slot]]:
        """Reserve slots for the missing blocks, evicting others; return (index in `blocks`, slot) pairs.

        Fewer if too many slots are held. Each ends with `register` or `cancel`.
        """
        reserved: list[tuple[int, Slot]] = []
        for index, block in enumerate(blocks):
            if block.key in self._entries:
                continue
            slot = self._allocate_slot()
            if slot is None:
                break
            self._insert(_Entry(block, slot, BlockState.FREE, 1))
            reserved.append((index, slot))
        return reserved

    def _insert(self, entry: _Entry) -> None:
        block = entry.block
        entry.move(BlockMove.ALLOCATE)
        self._entries[block.key] = entry
        self._num_writing += 1
        self._add_child(block)

    def _add_child(self, block: TierBlock) -> None:
        """Count the block as a child of its parent, which is then no eviction candidate."""
        if block.parent is not None:
            parent = self._entries.get(block.parent)
            if parent is not None and _is_indexed(parent) and self._is_leaf(parent):
                self._eviction.drop(block.parent)
            self._num_children[block.parent] = self._num_children.get(block.parent, 0) + 1

    def seal(self, key: BlockKey, checksum: int) -> None:
        """Record the checksum of the written bytes."""
        entry = self._entries[key]
        entry.move(BlockMove.SEAL)
        entry.checksum = checksum

    def register(self, keys: Iterable[BlockKey]) -> None:
        """Index written blocks and release the writer's hold."""
        self._num_accesses += 1
        for key in keys:
            entry = self._entries[key]
            entry.move(BlockMove.REGISTER)
            self._num_writing -= 1
            entry.accessed_at = self._num_accesses
            self._log.store_run(*_run_of(entry.block))
            if self._is_leaf(entry):
                self._eviction.admit(key)
            entry.num_holders -= 1
            entry.move(BlockMove.RELEASE)
        self._shrink()

    def cancel(self, keys: Iterable[BlockKey]) -> None:
        """Free slots that were reserved and not written."""
        for key in keys:
            entry = self._entries.pop(key)
            entry.move(BlockMove.RELEASE)
            self._num_writing -= 1
            self._remove_child(entry)
            heapq.heappush(self._free, entry.slot)

    def restore(self, block: TierBlock, slot: Slot, checksum: int) -> None:
        """Index a block found in its slot at startup."""
        entry = _Entry(block, slot, BlockState.FREE, 0, checksum)
        entry.move(BlockMove.RESTORE)
        self._entries[block.key] = entry
        self._add_child(block)
        self._num_touched = max(self._num_touched, slot + 1)
        self._log.store_run(*_run_of(block))
        if self._is_leaf(entry):
            self._eviction.admit(block.key)

    def finish_restore(self) -> None:
        """Free the slots without a block, after all `restore` calls."""
        used = {entry.slot for entry in self._entries.values()}
        self._free = [Slot(slot) for slot in range(self._num_touched) if slot not in used]
        self._shrink()

    # --- removal

    def forget(self, keys: Iterable[BlockKey]) -> int:
        """Remove these blocks unless held; return how many."""
        num_removed = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.state is BlockState.INACTIVE:
                if self._is_leaf(entry):
                    self._eviction.drop(key)
                self._remove(entry)
                num_removed += 1
        return num_removed

    def invalidate(self, key: BlockKey) -> None:
        """Hide a corrupt block now and remove it once it is not held."""
        if self.has(key) and not self.forget([key]):
            self._invalid.add(key)

    def resize(self, num_slots: int) -> None:
        """Change the capacity; excess blocks are evicted once not held."""
        _check_room(self.tier, num_slots)
        self.num_slots = num_slots
        self._eviction.resize(num_slots)
        # The log must be able to hold the complete contents.
        self._log.limit = max(self._log.limit, 2 * num_slots)
        self._shrink()

    @property
    def end(self) -> int:
        """First slot from which on all are free."""
        used = [entry.slot for entry in self._entries.values()]
        return max([*used, *self._evicting], default=-1) + 1

    def evicting_slots(self) -> list[Slot]:
        """Slots of evicted blocks whose removal is not durable yet; see `complete_eviction`."""
        return list(self._evicting)

    def complete_eviction(self, slots: Iterable[Slot]) -> None:
        """Free evicted slots whose removal is durable."""
        for slot in slots:
            entry = self._evicting.pop(slot)
            entry.move(BlockMove.EVICT)
            heapq.heappush(self._free, slot)

    def take_changes(self) -> tuple[Change, ...]:
        """Changes since the last call, in order; the complete contents if there were too many."""
        is_lost = self._log.is_lost
        changes = self._log.take()
        if not is_lost:
            return changes
        indexed = (entry.block for entry in self._entries.values() if _is_indexed(entry))
        return (Cleared(self.tier), *self._log.complete(map(_run_of, indexed)))

    def _shrink(self) -> None:
        """Evict excess blocks that are not held."""
        while len(self._entries) > self.num_slots and self._evict_one():
            pass

    def _is_leaf(self, entry: _Entry) -> bool:
        """Whether it has no child in this tier."""
        return entry.block.key not in self._num_children

    def _entry(self, key: BlockKey) -> _Entry:
        entry = self._entries.get(key)
        if entry is None or not _is_indexed(entry):
            raise KvoltError(f"block {key.hex()} is not in the {self.tier} tier")
        return entry

    def _allocate_slot(self) -> Slot | None:
        """Free slot, evicting if necessary. Slots of durable tiers are not reusable immediately after eviction."""
        while len(self._entries) + len(self._evicting) >= self.num_slots:
            if self._is_durable or not self._evict_one():
                return None
        if self._free:
            return heapq.heappop(self._free)
        self._num_touched += 1
        return Slot(self._num_touched - 1)

    def make_room(self, count: int) -> None:
        """For durable tiers, before `reserve`: evict until `count` slots are free or evicting, if possible."""
        while self.num_free + len(self._evicting) < count and self._evict_one():
            pass

    def _evict_one(self) -> bool:
        key = self._eviction.evict(self._is_inactive)
        entry = self._find_inactive() if key is None else self._entries[cast("BlockKey", key)]
        if entry is None:
            return False
        self._remove(entry)
        return True

    def _find_inactive(self) -> _Entry | None:
        """Any inactive block, if all leaves are held. Bounded scan, since that is temporary."""
        candidates = islice(self._entries.values(), _MAX_SCAN)
        return next((entry for entry in candidates if entry.state is BlockState.INACTIVE), None)

    def _is_inactive(self, key: object) -> bool:
        return self._entries[key].state is BlockState.INACTIVE  # type: ignore[index]

    def _remove(self, entry: _Entry) -> None:
        block = entry.block
        del self._entries[block.key]
        self._invalid.discard(block.key)
        self._remove_child(entry)
        self._log.remove_run([block.sequence_hash])
        if self._is_durable:
            entry.move(BlockMove.START_EVICTION)
            self._evicting[entry.slot] = entry
        else:
            entry.move(BlockMove.EVICT)
            heapq.heappush(self._free, entry.slot)

    def _remove_child(self, entry: _Entry) -> None:
        """Uncount a child; a parent without children becomes an eviction candidate, as the oldest if not accessed
        since."""
        parent = entry.block.parent
        if parent is None:
            return
        num_left = self._num_children[parent] - 1
        if num_left:
            self._num_children[parent] = num_left
            return
        del self._num_children[parent]
        parent_entry = self._entries.get(parent)
        if parent_entry is not None and _is_indexed(parent_entry):
            self._eviction.admit(parent, is_old=parent_entry.accessed_at <= entry.accessed_at)

    def check_integrity(self) -> None:
        """AssertionError if the table is inconsistent."""
        slots = [entry.slot for entry in self._entries.values()] + list(self._evicting)
        assert len(set(slots)) == len(slots), f"two blocks in one slot: {slots}"
        assert not set(slots) & set(self._free), "a slot is free and in use"
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert len(slots) + len(self._free) == self._num_touched, "a slot is lost"
        writing = [entry for entry in self._entries.values() if not _is_indexed(entry)]
        assert len(writing) == self._num_writing, f"{len(writing)} being written, {self._num_writing} counted"
        children: dict[BlockKey, int] = {}
        for entry in self._entries.values():
            assert (entry.num_holders > 0) == entry.state.is_held, f"wrong holders: {entry}"
            if entry.block.parent is not None:
                children[entry.block.parent] = children.get(entry.block.parent, 0) + 1
        assert children == self._num_children, "children are miscounted"
        assert all(self._entries[key].num_holders for key in self._invalid), "an invalid block is not held"
        num_leaves = sum(_is_indexed(entry) and self._is_leaf(entry) for entry in self._entries.values())
        assert len(self._eviction) == num_leaves, (
            f"{num_leaves} leaves, {len(self._eviction)} eviction candidates"
        )


def _run_of(block: TierBlock) -> tuple[BlockNames, SequenceHash | None, int]:
    return BlockNames([block.key], [block.sequence_hash]), block.parent_hash, block.position


def _is_indexed(entry: _Entry) -> bool:
    return entry.state is BlockState.REGISTERED or entry.state is BlockState.INACTIVE


def _check_room(tier: Tier, num_slots: int) -> None:
    if num_slots < 1:
        raise ConfigError(
            f"the {tier} tier has no room for a block", key=f"{tier}", remedy="give it more room"
        )
