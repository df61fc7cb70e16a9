"""The names of blocks, in columns.

There is a name for each block of each sequence: as two lists they are cut, joined and told at the speed of lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self

import msgspec

from kvolt.core.ids import BlockKey, SequenceHash


class BlockName(msgspec.Struct, frozen=True, gc=False):
    """What a full block holds: its identity for stored bytes, and that for routing and events."""

    key: BlockKey
    sequence_hash: SequenceHash


@dataclass(slots=True)
class Names:
    """Those of blocks that follow each other. The lists are equally long."""

    keys: list[BlockKey] = field(default_factory=list)
    sequence_hashes: list[SequenceHash] = field(default_factory=list)

    @classmethod
    def of(cls, names: Iterable[BlockName]) -> Self:
        found = cls()
        for name in names:
            found.append(name)
        return found

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> BlockName:
        return BlockName(self.keys[index], self.sequence_hashes[index])

    def __iter__(self) -> Iterator[BlockName]:
        return map(BlockName, self.keys, self.sequence_hashes)

    def append(self, name: BlockName) -> None:
        self.keys.append(name.key)
        self.sequence_hashes.append(name.sequence_hash)

    def extend(self, other: Names) -> None:
        self.keys += other.keys
        self.sequence_hashes += other.sequence_hashes

    def part(self, start: int, end: int) -> Names:
        return Names(self.keys[start:end], self.sequence_hashes[start:end])

    def cut(self, start: int) -> Names:
        """Take away those from `start` on."""
        end = self.part(start, len(self.keys))
        del self.keys[start:], self.sequence_hashes[start:]
        return end
