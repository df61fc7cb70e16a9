"""SlotMemory: memory of the host in equal slots, one for each block, and the ways of blocks into it and out of it.

A slot holds a whole block: what each rank has of it, one after the other, so that a block is there for all ranks or for
none. It begins at a page, for files that are read past the kernel's cache. The memory comes in parts as slots are first
used, each of which other processes could map. Knows no names but as seeds of checksums, and not which slot holds what.

The checksum of a block is made of those of its pieces (`transfer.checksum`), each seeded by the block's key and the
rank: bytes under another name, or of another rank, are as wrong as a flipped bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from kvolt.core.errors import ConfigError
from kvolt.core.ids import BlockKey
from kvolt.transfer.memory.device_memory import DeviceMemory, Sums, blocks_at_once, checksums, copy_checked
from kvolt.transfer.memory.slabs import Numbers, Pieces, Slab

PAGE_BYTES = 4096
_PART_BYTES = 256 << 20
_MOST_PARTS = 64
_TURN_BYTES = 256 << 20
"""Copied at a time: between two of these a copy that nobody waits for any more ends."""
_SEED_BYTES = 8
_RANK_KEY = 0x9E3779B97F4A7C15
_FOLD_KEY = np.uint64(0xD6E8FEB86659FD93)


class BlockShape(msgspec.Struct, frozen=True):
    """Of blocks in a tier: so many equal pieces, one of each rank."""

    piece_bytes: int
    num_ranks: int = 1
    dtype: str = ""
    """Of the values in them; empty where they are bytes of no known meaning."""

    @classmethod
    def of(cls, slabs: Sequence[Slab]) -> BlockShape:
        """Of an engine's memory, by its ranks."""
        dtypes = {"" if slab.layout is None else slab.layout.block.dtype for slab in slabs}
        sizes = {slab.block_bytes for slab in slabs}
        if len(sizes) != 1:
            raise ConfigError(
                f"ranks have blocks of {sorted(sizes)} bytes: tiers keep those of equal ranks",
                key="tiers",
                remedy="serve without tiers, or with ranks that share the heads evenly",
            )
        return cls(sizes.pop(), len(slabs), dtypes.pop() if len(dtypes) == 1 else "")

    @property
    def block_bytes(self) -> int:
        return self.piece_bytes * self.num_ranks

    @property
    def slot_bytes(self) -> int:
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES


def rank_seeds(keys: Sequence[BlockKey], rank: int) -> bytes:
    seeds = b"".join(key[:_SEED_BYTES] for key in keys)
    if not rank:
        return seeds
    return (np.frombuffer(seeds, dtype="<u8") ^ np.uint64(rank * _RANK_KEY % 2**64)).tobytes()


def block_checksums(slabs: Sequence[Slab], blocks: Numbers, keys: Sequence[BlockKey]) -> Sums:
    """Of what lies in these blocks of an engine's memory, by its ranks."""
    folded = np.zeros(len(blocks), dtype=np.uint64)
    for rank, slab in enumerate(slabs):
        sums = np.empty(len(blocks), dtype=np.uint64)
        checksums(slab.contents, slab.pieces(blocks), rank_seeds(keys, rank), sums)
        folded = folded * _FOLD_KEY + sums
    return folded


class SlotMemory:
    """See the module. `close` gives it back; nothing may be under way."""

    def __init__(self, shape: BlockShape, num_slots: int, device: DeviceMemory | None = None) -> None:
        """`num_slots`: the most that there will be. `device`: that should reach it fast."""
        self.shape = shape
        self.num_slots = num_slots
        self._device = device
        self._unpin: list[Callable[[], None]] = []
        self._growing = threading.Lock()
        # Not many parts of a large one: each takes descriptors here and with every peer.
        part_bytes = max(_PART_BYTES, num_slots * shape.slot_bytes // _MOST_PARTS)
        self._per_part = max(min(part_bytes // shape.slot_bytes, num_slots), 1)
        self._parts: list[Slab] = []

    @property
    def num_bytes(self) -> int:
        """That it takes now."""
        return sum(part.memory.nbytes for part in self._parts)

    def close(self) -> None:
        while self._unpin:
            self._unpin.pop()()
        while self._parts:
            self._parts.pop().close()

    @property
    def num_reached(self) -> int:
        """Slots that there are now."""
        return min(len(self._parts) * self._per_part, self.num_slots)

    def steps(self) -> Iterator[int]:
        """For `reach`, part by part up to all of it."""
        yield from range(self._per_part, self.num_slots, self._per_part)
        yield self.num_slots

    def reach(self, num_slots: int) -> None:
        """There are so many slots after this. OSError where the host has no more. Any thread."""
        if len(self._parts) * self._per_part >= num_slots:
            return
        with self._growing:
            while len(self._parts) * self._per_part < num_slots:
                node = None if self._device is None else self._device.numa_node
                part = Slab.shared(self._per_part, self.shape.slot_bytes, node=node)
                if self._device is not None:
                    self._unpin.append(self._device.pin(part.memory))
                self._parts.append(part)

    def resize(self, num_slots: int, end: int) -> None:
        """So many from now on; memory is given back as far as no slot from `end` on is used. More comes by `reach`."""
        with self._growing:
            self.num_slots = num_slots
            needed = -(-max(num_slots, end) // self._per_part)
            while len(self._parts) > needed:
                if self._unpin:
                    self._unpin.pop()()
                self._parts.pop().close()

    def by_part(self, slots: Numbers) -> Iterator[tuple[Slab, Numbers, Numbers]]:
        """The memory that slots lie in, their numbers in it, and which of `slots` they are. Grows where it must."""
        if len(slots):
            self.reach(int(slots.max()) + 1)
        parts = slots // self._per_part
        for number in np.unique(parts).tolist():
            which = np.flatnonzero(parts == number)
            yield self._parts[number], slots[which] - number * self._per_part, which

    def block(self, slot: int) -> memoryview:
        """The bytes of the block in a slot, without what fills it up to a page. To be released after use."""
        [(part, [number], _)] = self.by_part(np.asarray([slot], dtype=np.int64))
        start = int(number) * self.shape.slot_bytes
        return part.memory[start : start + self.shape.block_bytes]

    def fill(self, slots: Numbers, keys: Sequence[BlockKey], slabs: Sequence[Slab], blocks: Numbers) -> Sums:
        """Blocks of an engine's memory into slots; their checksums. For any thread, with slabs of
        its own."""
        return self._copy(slots, keys, slabs, blocks, is_in=True)

    def empty(self, slots: Numbers, keys: Sequence[BlockKey], slabs: Sequence[Slab], blocks: Numbers) -> Sums:
        """Slots into blocks of an engine's memory; the checksums of what arrived there."""
        return self._copy(slots, keys, slabs, blocks, is_in=False)

    def checksums(self, slots: Numbers, keys: Sequence[BlockKey]) -> Sums:
        """Of what lies in these slots."""
        folded = np.zeros(len(slots), dtype=np.uint64)
        for rank in range(self.shape.num_ranks):
            sums = np.empty(len(slots), dtype=np.uint64)
            for part, numbers, which in self.by_part(slots):
                of_part = np.empty(len(which), dtype=np.uint64)
                seeds = rank_seeds([keys[each] for each in which.tolist()], rank)
                checksums(part.contents, self.pieces(numbers, rank), seeds, of_part)
                sums[which] = of_part
            folded = folded * _FOLD_KEY + sums
        return folded

    def _copy(
        self, slots: Numbers, keys: Sequence[BlockKey], slabs: Sequence[Slab], blocks: Numbers, *, is_in: bool
    ) -> Sums:
        folded = np.zeros(len(slots), dtype=np.uint64)
        for rank, slab in enumerate(slabs):
            sums = np.empty(len(slots), dtype=np.uint64)
            for part, numbers, which in self.by_part(slots):
                ours, theirs = self.pieces(numbers, rank), slab.pieces(blocks[which])
                at_once = blocks_at_once(part.contents, slab.contents, ours, _TURN_BYTES)
                for first in range(0, len(which), at_once):
                    some = which[first : first + at_once]
                    here, there = ours.part(first, len(some)), theirs.part(first, len(some))
                    seeds = rank_seeds([keys[each] for each in some.tolist()], rank)
                    of_some = np.empty(len(some), dtype=np.uint64)
                    if is_in:
                        copy_checked(part.contents, here, slab.contents, there, seeds, of_some)
                    else:
                        copy_checked(slab.contents, there, part.contents, here, seeds, of_some)
                    sums[some] = of_some
            folded = folded * _FOLD_KEY + sums
        return folded

    def pieces(self, numbers: Numbers, rank: int) -> Pieces:
        """Where slots of a part have what is of one rank."""
        shape = self.shape
        return Pieces(numbers * shape.slot_bytes + rank * shape.piece_bytes, shape.piece_bytes)
