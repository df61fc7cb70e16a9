"""The KV of the toy engine: blocks by key in one memory, those that nobody holds evicted oldest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvolt.core.block_key import KvLayout
from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored
from kvolt.engines.contract import KvAllocation
from kvolt.transfer.memory.layout import SlabLayout
from kvolt.transfer.memory.slabs import Slab


@dataclass(slots=True, eq=False)
class Entry:
    """A full block. One whose parent has no name gets none, and is found by nobody."""

    key: BlockKey
    sequence_hash: SequenceHash
    parent: Entry | None
    position: int
    block: int
    """Its number in the memory."""
    place: memoryview
    """Its bytes there."""
    num_holders: int = 0
    named: bool = False

    @property
    def data(self) -> bytes:
        return bytes(self.place)

    def told(self) -> Stored:
        parent = self.parent.sequence_hash if self.parent else None
        return Stored.from_hashes([self.sequence_hash], parent, self.position)


@dataclass(slots=True)
class Room:
    """Blocks that somebody fills, and those that they follow; all held."""

    present: list[Entry]
    fresh: list[Entry]

    @property
    def num_blocks(self) -> int:
        return len(self.present) + len(self.fresh)


class Store:
    def __init__(self, num_blocks: int, layout: KvLayout) -> None:
        self.num_blocks = num_blocks
        self.num_reserved = 0
        """By requests, handoffs and rooms, each for all that it can ever need."""
        memory = memoryview(bytearray(num_blocks * layout.block_bytes))
        self.slab = Slab(memory, layout.block_bytes, layout=SlabLayout.of_rank(layout))
        self.free = list(range(num_blocks))
        self.named: dict[BlockKey, Entry] = {}
        self.idle: OrderedDict[BlockKey, Entry] = OrderedDict()
        self.rooms: dict[int, Room] = {}
        """By the first block that is to be filled."""
        self.changes: list[KvChange] = []

    def reserve(self, num_blocks: int) -> bool:
        if self.num_reserved + num_blocks > self.num_blocks:
            return False
        self.num_reserved += num_blocks
        self._make_room()
        return True

    def _make_room(self) -> None:
        while self.num_reserved + len(self.idle) > self.num_blocks:
            _, entry = self.idle.popitem(last=False)
            self.evict(entry)
            self.free.append(entry.block)

    def evict(self, entry: Entry) -> None:
        del self.named[entry.key]
        entry.named = False
        self.changes.append(Removed.from_hashes([entry.sequence_hash]))

    def acquire(self, keys: Sequence[BlockKey]) -> list[Entry]:
        found: list[Entry] = []
        for key in keys:
            entry = self.named.get(key)
            if entry is None:
                break
            found.append(self.hold(entry))
        return found

    def hold(self, entry: Entry) -> Entry:
        entry.num_holders += 1
        if entry.named:
            self.idle.pop(entry.key, None)
        return entry

    def new(self, key: BlockKey, sequence_hash: SequenceHash, parent: Entry | None) -> Entry:
        """Held, to be filled, and without a name yet. There is a block for who has reserved one."""
        block = self.free.pop()
        start, size = block * self.slab.block_bytes, self.slab.block_bytes
        position = parent.position + 1 if parent else 0
        place = self.slab.memory[start : start + size]
        return Entry(key, sequence_hash, parent, position, block, place, num_holders=1)

    def add(self, key: BlockKey, sequence_hash: SequenceHash, parent: Entry | None, data: bytes) -> Entry:
        """Held; the one that is here already if there is one."""
        entry = self.new(key, sequence_hash, parent)
        entry.place[: len(data)] = data
        return self.name(entry)

    def name(self, entry: Entry) -> Entry:
        """It is filled, and found from now on. In place of one that is here already, that one is held."""
        if self.is_orphan(entry):
            return entry
        known = self.named.get(entry.key)
        if known is not None:
            self.release([entry])
            return self.hold(known)
        self.named[entry.key] = entry
        entry.named = True
        self.changes.append(entry.told())
        return entry

    def is_orphan(self, entry: Entry) -> bool:
        return entry.parent is not None and not entry.parent.named

    def release(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            entry.num_holders -= 1
            if entry.num_holders:
                continue
            if entry.named:
                self.idle[entry.key] = entry
            else:
                self.free.append(entry.block)

    def allocate_kv(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvAllocation:
        room = Room(self.acquire(keys), [])
        num_present = len(room.present)
        num_blocks = min(len(keys), self.num_blocks - self.num_reserved)
        if num_blocks <= num_present:
            self.release(room.present)
            return KvAllocation(num_present, ())
        self.reserve(num_blocks)
        before = room.present[-1] if room.present else None
        for index in range(num_present, num_blocks):
            before = self.new(keys[index], hashes[index], before)
            room.fresh.append(before)
        self.rooms[room.fresh[0].block] = room
        return KvAllocation(num_present, tuple(entry.block for entry in room.fresh))

    def settle(self, first_block: int, num_filled: int, keep: bool = False) -> list[Entry]:
        """What is to be kept, if it is: reserved and held."""
        room = self.rooms.pop(first_block)
        self.num_reserved -= room.num_blocks
        held = room.present
        for entry in room.fresh[:num_filled]:
            entry.parent = held[-1] if held else None  # it may have come by another way meanwhile
            held.append(self.name(entry))
        self.release(room.fresh[num_filled:])
        if keep:
            self.num_reserved += len(held)
            return held
        self.release(held)
        return []

    def clear(self) -> int:
        num_blocks = len(self.named)
        for entry in self.named.values():
            entry.named = False
        self.named.clear()
        self.free += [entry.block for entry in self.idle.values()]
        self.idle.clear()
        self.changes.append(Cleared())
        return num_blocks
