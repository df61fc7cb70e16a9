"""The KV of the toy engine: blocks by key, those that nobody holds evicted oldest first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_block import KvBlock
from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored


@dataclass(slots=True, eq=False)
class Entry:
    """A full block. One whose parent has no name gets none, and is found by nobody."""

    key: BlockKey
    sequence_hash: SequenceHash
    parent: Entry | None
    position: int
    data: bytes
    num_holders: int = 0
    named: bool = False

    def export(self) -> KvBlock:
        parent = self.parent.key if self.parent else None
        return KvBlock(self.key, self.sequence_hash, parent, self.position, self.data).seal()

    def told(self) -> Stored:
        parent = self.parent.sequence_hash if self.parent else None
        return Stored.of([self.sequence_hash], parent, self.position)


class Store:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_reserved = 0
        """By requests and handoffs, each for all that it can ever need."""
        self.named: dict[BlockKey, Entry] = {}
        self.idle: OrderedDict[BlockKey, Entry] = OrderedDict()
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

    def evict(self, entry: Entry) -> None:
        del self.named[entry.key]
        entry.named = False
        self.changes.append(Removed.of([entry.sequence_hash]))

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
        self.idle.pop(entry.key, None)
        return entry

    def add(self, entry: Entry) -> Entry:
        """Held; the one that is here already if there is one."""
        if entry.parent is not None and not entry.parent.named:
            entry.num_holders = 1
            return entry
        known = self.named.get(entry.key)
        if known is None:
            known = self.named[entry.key] = entry
            entry.named = True
            self.changes.append(entry.told())
        return self.hold(known)

    def release(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            entry.num_holders -= 1
            if not entry.num_holders and entry.named:
                self.idle[entry.key] = entry

    def take_in(self, block: KvBlock, block_bytes: int) -> bool:
        if block.key in self.named:
            return True
        parent = None if block.parent is None else self.named.get(block.parent)
        orphan = block.parent is not None and parent is None
        full = self.num_reserved + len(self.idle) >= self.num_blocks
        if orphan or full or not self.accepts(block, block_bytes):
            return False
        entry = Entry(block.key, block.sequence_hash, parent, block.position, block.data)
        self.release([self.add(entry)])
        if parent is not None and not parent.num_holders:
            self.idle.move_to_end(parent.key)  # never before its child
        return True

    def accepts(self, block: KvBlock, block_bytes: int) -> bool:
        return block.intact and len(block.data) == block_bytes

    def clear(self) -> int:
        num_blocks = len(self.named)
        for entry in self.named.values():
            entry.named = False
        self.named.clear()
        self.idle.clear()
        self.changes.append(Cleared())
        return num_blocks
