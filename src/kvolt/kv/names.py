"""Block names, stored as two lists, so that slicing and joining the names of a sequence is as fast as list
operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self

import msgspec

from kvolt.core.ids import BlockKey, SequenceHash


class BlockName(msgspec.Struct, frozen=True, gc=False):
    """Identity of a full block: `key` for stored bytes, `sequence_hash` for routing and events."""

    key: BlockKey
    sequence_hash: SequenceHash


@dataclass(slots=True)
class BlockNames:
    """Names of consecutive blocks, in lists of equal length."""

    keys: list[BlockKey] = field(default_factory=list)
    sequence_hashes: list[SequenceHash] = field(default_factory=list)

    @classmethod
    def of(cls, names: Iterable[BlockName]) -> Self:
        columns = cls()
        for name in names:
            columns.append(name)
        return columns

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> BlockName:
        return BlockName(self.keys[index], self.sequence_hashes[index])

    def __iter__(self) -> Iterator[BlockName]:
        return map(BlockName, self.keys, self.sequence_hashes)

    def append(self, name: BlockName) -> None:
        self.keys.append(name.key)
        self.sequence_hashes.append(name.sequence_hash)

    def extend(self, other: BlockNames) -> None:
        self.keys += other.keys
        self.sequence_hashes += other.sequence_hashes

    def slice(self, start: int, end: int) -> BlockNames:
        return BlockNames(self.keys[start:end], self.sequence_hashes[start:end])

    def split_off(self, start: int) -> BlockNames:
        """Remove and return the names from `start` on."""
        end = self.slice(start, len(self.keys))
        del self.keys[start:], self.sequence_hashes[start:]
        return end
