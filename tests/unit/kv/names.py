"""Names of made-up blocks, and a router's view of a pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Removed, Stored
from kvolt.kv import BlockId, BlockName, BlockNames, BlockPool, Change


def name_of(path: Sequence[int]) -> BlockName:
    """The name of the block at the end of a path of small numbers. Routing hashes know them modulo 8 only."""
    routed = 1
    for number in path:
        routed = routed * 8 + number % 8
    return BlockName(BlockKey(bytes(path)), SequenceHash(routed))


def names_of(path: Sequence[int]) -> BlockNames:
    """Those of a block and all before it."""
    return BlockNames.of(name_of(path[:end]) for end in range(1, len(path) + 1))


def keys_of(path: Sequence[int]) -> list[BlockKey]:
    return names_of(path).keys


def put(pool: BlockPool, path: Sequence[int]) -> list[BlockId]:
    """Hold the blocks of a path: what is there, and the rest allocated and registered."""
    names = names_of(path)
    blocks = pool.acquire(names.keys)
    num_found = len(blocks)
    fresh = pool.allocate(len(names) - num_found)
    assert fresh is not None
    blocks += fresh
    for position in range(num_found, len(names)):
        pool.register(blocks[position], names[position], blocks[position - 1] if position else None, position)
    return blocks


@dataclass
class Mirror:
    """What a router knows of a pool from its changes alone."""

    positions: dict[SequenceHash, int | None] = field(default_factory=dict)

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            if isinstance(change, Stored):
                assert change.sequence_hashes
                assert change.parent is None or change.parent in self.positions, f"no parent for {change}"
                assert change.start_position is not None
                assert (change.parent is None) == (change.start_position == 0)
                for index, block in enumerate(change.sequence_hashes, change.start_position):
                    self.positions[block] = index
            elif isinstance(change, Removed):
                for sequence_hash in change.sequence_hashes:
                    del self.positions[sequence_hash]  # a router must not be told twice
            else:
                self.positions.clear()


def seen(pool: BlockPool) -> dict[SequenceHash, int | None]:
    """The same, from all that the pool holds."""
    mirror = Mirror()
    mirror.apply(pool.contents())
    return mirror.positions
