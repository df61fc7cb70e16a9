"""TierBooks: what lies in which slot of a tier, who reads it, and what goes when room is needed. Pure.

Owns the state, name, checksum and readers of every slot. Knows no bytes and no clock: who calls it moves those. As in a
pool, a block is found by its key from `register` on; unlike there, nobody computes in a slot, so that a block has no
holder but who writes or reads it, and one whose parent is not here is of use all the same: the parent may lie in
another tier. Still, of two blocks of a chain the deeper goes first: only those that none here follows can go, and the
one before them after them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NewType, cast

from kvolt.core.errors import ConfigError, KvoltError
from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Cleared, Tier
from kvolt.kv.changes import Change, ChangeLog, ToldHashes
from kvolt.kv.lifecycle import BlockId, BlockMove, BlockState, next_state
from kvolt.kv.names import Names
from kvolt.kv.tiers.eviction import new_eviction

Slot = NewType("Slot", int)

_LOOKS = 1024
"""Blocks that are looked at for one that can go."""


@dataclass(frozen=True, slots=True)
class TierBlock:
    """A block as a tier keeps it."""

    key: BlockKey
    sequence_hash: SequenceHash
    parent: BlockKey | None
    parent_hash: SequenceHash | None
    position: int
    """In its sequence."""


@dataclass(slots=True)
class _Entry:
    block: TierBlock
    slot: Slot
    state: BlockState
    num_holders: int
    checksum: int = 0
    asked_at: int = 0
    """A number that grows with each time that any block is asked for."""

    def move(self, move: BlockMove) -> None:
        self.state = next_state(BlockId(self.slot), self.state, move)


class TierBooks:
    """See the module."""

    def __init__(self, tier: Tier, num_slots: int, eviction: str = "lru", is_durable: bool = False) -> None:
        """`is_durable`: what is evicted is `condemned` first, until `bury` says that it is known to have gone."""
        if num_slots < 1:
            raise ConfigError(f"the {tier} tier holds no block", key=f"{tier}", remedy="give it more room")
        self.tier = tier
        self.num_slots = num_slots
        self._is_durable = is_durable
        self._eviction = new_eviction(eviction, num_slots)
        self._entries: dict[BlockKey, _Entry] = {}
        """That are written, or can be found."""
        self._condemned: dict[Slot, _Entry] = {}
        self._free: list[Slot] = []
        """A heap: the lowest first, so that the end of a tier that shrank comes free."""
        self._num_touched = 0
        """Slots that were ever used: a large tier at rest costs nothing."""
        self._num_children: dict[BlockKey, int] = {}
        """Of keys that blocks here follow, whether they are here or not."""
        self._unwanted: set[BlockKey] = set()
        """Held by somebody, and forgotten when nobody does any more."""
        self._num_writing = 0
        self._num_asked = 0
        self._hashes = ToldHashes()
        self._log = ChangeLog(2 * num_slots, tier)

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._entries) - self._num_writing

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return max(self.num_slots - len(self._entries) - len(self._condemned), 0)

    def __iter__(self) -> Iterator[BlockKey]:
        """Keys of the blocks that can be found now."""
        return iter([key for key, entry in self._entries.items() if _is_found(entry)])

    # --- finding

    def has(self, key: BlockKey) -> bool:
        entry = self._entries.get(key)
        return entry is not None and _is_found(entry) and key not in self._unwanted

    def knows(self, key: BlockKey) -> bool:
        """Whether it is here, or about to be."""
        return key in self._entries

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many of `keys`, from the first on, are here. Changes nothing."""
        for index, key in enumerate(keys):
            if not self.has(key):
                return index
        return len(keys)

    def block(self, key: BlockKey) -> TierBlock:
        return self._found(key).block

    def checksum(self, key: BlockKey) -> int:
        return self._found(key).checksum

    def slot(self, key: BlockKey) -> Slot:
        return self._found(key).slot

    def hold(self, keys: Iterable[BlockKey], *, is_asked: bool = True) -> list[Slot]:
        """They stay as they are until `release`. All must be here. `is_asked`: by somebody who wants them, which keeps
        them for longer."""
        entries = [self._found(key) for key in keys]
        self._num_asked += is_asked
        for entry in reversed(entries):
            if not entry.num_holders:
                entry.move(BlockMove.ACQUIRE)
            entry.num_holders += 1
            if is_asked:
                entry.asked_at = self._num_asked
                if self._is_leaf(entry):
                    self._eviction.touch(entry.block.key)
        return [entry.slot for entry in entries]

    def release(self, keys: Iterable[BlockKey]) -> None:
        for key in keys:
            entry = self._found(key)
            entry.num_holders -= 1
            if not entry.num_holders:
                entry.move(BlockMove.RELEASE)
                if key in self._unwanted:
                    self.forget([key])
        self._shrink()

    # --- writing

    def reserve(self, blocks: Sequence[TierBlock]) -> list[tuple[int, Slot]]:
        """Slots to be written for those that are not here: their places in `blocks`, and slots. Others go for them;
        fewer where too much is read and written. Each ends with `register` or `cancel`."""
        found: list[tuple[int, Slot]] = []
        for index, block in enumerate(blocks):
            if block.key in self._entries:
                continue
            slot = self._take_slot()
            if slot is None:
                break
            self._enter(_Entry(block, slot, BlockState.FREE, 1))
            found.append((index, slot))
        return found

    def _enter(self, entry: _Entry) -> None:
        block = entry.block
        entry.move(BlockMove.ALLOCATE)
        self._entries[block.key] = entry
        self._num_writing += 1
        self._follow(block)

    def _follow(self, block: TierBlock) -> None:
        """The one before it cannot go any more."""
        if block.parent is not None:
            above = self._entries.get(block.parent)
            if above is not None and _is_found(above) and self._is_leaf(above):
                self._eviction.drop(block.parent)
            self._num_children[block.parent] = self._num_children.get(block.parent, 0) + 1

    def seal(self, key: BlockKey, checksum: int) -> None:
        """Its bytes are in its slot."""
        entry = self._entries[key]
        entry.move(BlockMove.SEAL)
        entry.checksum = checksum

    def register(self, keys: Iterable[BlockKey]) -> None:
        """They can be found from now on, and are let go by who wrote them."""
        self._num_asked += 1
        for key in keys:
            entry = self._entries[key]
            entry.move(BlockMove.REGISTER)
            self._num_writing -= 1
            entry.asked_at = self._num_asked
            self._tell(entry.block)
            if self._is_leaf(entry):
                self._eviction.admit(key)
            entry.num_holders -= 1
            entry.move(BlockMove.RELEASE)
        self._shrink()

    def cancel(self, keys: Iterable[BlockKey]) -> None:
        """What was reserved for them was not written."""
        for key in keys:
            entry = self._entries.pop(key)
            entry.move(BlockMove.RELEASE)
            self._num_writing -= 1
            self._leave(entry)
            self._give_back(entry.slot)

    def restore(self, block: TierBlock, slot: Slot, checksum: int) -> None:
        """It was found in its slot, where nobody reads or writes yet."""
        entry = _Entry(block, slot, BlockState.FREE, 0, checksum)
        entry.move(BlockMove.RESTORE)
        self._entries[block.key] = entry
        self._follow(block)
        self._num_touched = max(self._num_touched, slot + 1)
        self._tell(block)
        if self._is_leaf(entry):
            self._eviction.admit(block.key)

    def restored(self) -> None:
        """All has been: what no block lies in is free."""
        used = {entry.slot for entry in self._entries.values()}
        self._free = [Slot(slot) for slot in range(self._num_touched) if slot not in used]
        self._shrink()

    # --- going

    def forget(self, keys: Iterable[BlockKey]) -> int:
        """They are not found any more, as far as nobody is at them; how many."""
        num_gone = 0
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.state is BlockState.INACTIVE:
                if self._is_leaf(entry):
                    self._eviction.drop(key)
                self._remove(entry)
                num_gone += 1
        return num_gone

    def disown(self, key: BlockKey) -> None:
        """It is not found from now on, and goes when nobody is at it any more."""
        if self.has(key) and not self.forget([key]):
            self._unwanted.add(key)

    def resize(self, num_slots: int) -> None:
        """Hold so many from now on; what is too much goes, as soon as nobody reads it."""
        if num_slots < 1:
            raise ConfigError(
                f"the {self.tier} tier holds no block", key=f"{self.tier}", remedy="give it more room"
            )
        self.num_slots = num_slots
        self._eviction.resize(num_slots)
        # Or all that there is would be too much to tell.
        self._log.limit = max(self._log.limit, 2 * num_slots)
        self._shrink()

    @property
    def end(self) -> int:
        """Every slot from this on is free."""
        used = [entry.slot for entry in self._entries.values()]
        return max([*used, *self._condemned], default=-1) + 1

    def condemned(self) -> list[Slot]:
        """Slots of blocks that are not found any more: `bury` them once that would be known after a crash, too."""
        return list(self._condemned)

    def bury(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            entry = self._condemned.pop(slot)
            entry.move(BlockMove.EVICT)
            self._give_back(slot)

    def take_changes(self) -> tuple[Change, ...]:
        """Since the last time, in order; where that was too much, all that there is now."""
        is_lost = self._log.is_lost
        changes = self._log.take()
        if not is_lost:
            return changes
        for entry in self._entries.values():
            if _is_found(entry):
                self._log.store_run(*_told(entry.block))
        return (Cleared(self.tier), *self._log.take())

    # ---

    def _shrink(self) -> None:
        """As far as nobody is at what is too much."""
        while len(self._entries) > self.num_slots and self._evict_one():
            pass

    def _is_leaf(self, entry: _Entry) -> bool:
        """Whether none here follows it."""
        return entry.block.key not in self._num_children

    def _found(self, key: BlockKey) -> _Entry:
        entry = self._entries.get(key)
        if entry is None or not _is_found(entry):
            raise KvoltError(f"no block {key.hex()} is in the {self.tier} tier")
        return entry

    def _take_slot(self) -> Slot | None:
        """A free one, made free if need be. What is condemned has its slot still: it is another's only later."""
        while len(self._entries) + len(self._condemned) >= self.num_slots:
            if self._is_durable or not self._evict_one():
                return None
        if self._free:
            return heapq.heappop(self._free)
        self._num_touched += 1
        return Slot(self._num_touched - 1)

    def make_room(self, count: int) -> None:
        """For a durable tier, ahead of `reserve`: so many slots are free or condemned after this, if that can be."""
        while self.num_free + len(self._condemned) < count and self._evict_one():
            pass

    def _evict_one(self) -> bool:
        key = self._eviction.evict(self._is_inactive)
        entry = self._some_inactive() if key is None else self._entries[cast("BlockKey", key)]
        if entry is None:
            return False
        self._remove(entry)
        return True

    def _some_inactive(self) -> _Entry | None:
        """Where somebody is at every block that none follows. Not looked for long: that passes."""
        some = islice(self._entries.values(), _LOOKS)
        return next((entry for entry in some if entry.state is BlockState.INACTIVE), None)

    def _is_inactive(self, key: object) -> bool:
        return self._entries[key].state is BlockState.INACTIVE  # type: ignore[index]

    def _remove(self, entry: _Entry) -> None:
        block = entry.block
        del self._entries[block.key]
        self._unwanted.discard(block.key)
        self._leave(entry)
        gone = self._hashes.remove_all([block.sequence_hash])
        self._log.remove_run(gone)
        if self._is_durable:
            entry.move(BlockMove.CONDEMN)
            self._condemned[entry.slot] = entry
        else:
            entry.move(BlockMove.EVICT)
            self._give_back(entry.slot)

    def _leave(self, entry: _Entry) -> None:
        """The one before it can go once no other follows it: at once, if it was asked for no later."""
        parent = entry.block.parent
        if parent is None:
            return
        left = self._num_children[parent] - 1
        if left:
            self._num_children[parent] = left
            return
        del self._num_children[parent]
        above = self._entries.get(parent)
        if above is not None and _is_found(above):
            self._eviction.admit(parent, is_old=above.asked_at <= entry.asked_at)

    def _give_back(self, slot: Slot) -> None:
        heapq.heappush(self._free, slot)

    def _tell(self, block: TierBlock) -> None:
        self._hashes.add_all([block.sequence_hash])
        self._log.store_run(*_told(block))

    def check_integrity(self) -> None:
        """AssertionError, with the story, where the books contradict themselves."""
        slots = [entry.slot for entry in self._entries.values()] + list(self._condemned)
        assert len(set(slots)) == len(slots), f"two blocks have one slot: {slots}"
        assert not set(slots) & set(self._free), "a slot is free, and in use"
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert len(slots) + len(self._free) == self._num_touched, "a slot is lost"
        writing = [entry for entry in self._entries.values() if not _is_found(entry)]
        assert len(writing) == self._num_writing, f"{len(writing)} are written, {self._num_writing} counted"
        children: dict[BlockKey, int] = {}
        for entry in self._entries.values():
            assert (entry.num_holders > 0) == entry.state.is_held, f"wrong holders: {entry}"
            if entry.block.parent is not None:
                children[entry.block.parent] = children.get(entry.block.parent, 0) + 1
        assert children == self._num_children, "children are miscounted"
        assert all(self._entries[key].num_holders for key in self._unwanted), "what nobody holds is not gone"
        num_leaves = sum(_is_found(entry) and self._is_leaf(entry) for entry in self._entries.values())
        assert len(self._eviction) == num_leaves, f"{num_leaves} none follows, {len(self._eviction)} could go"


def _told(block: TierBlock) -> tuple[Names, SequenceHash | None, int]:
    return Names([block.key], [block.sequence_hash]), block.parent_hash, block.position


def _is_found(entry: _Entry) -> bool:
    return entry.state is BlockState.REGISTERED or entry.state is BlockState.INACTIVE
