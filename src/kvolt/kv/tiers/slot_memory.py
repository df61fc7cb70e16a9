"""SlotMemory: host memory in equal slots, one per block, with copies from and to engine memory.

A slot holds a whole block: the pieces of all ranks concatenated, so a block exists for all ranks or none. Slots are
page-aligned for direct file I/O. Memory is allocated in shareable parts as slots are first used. Keys are used only as
checksum seeds; which slot holds which block is not known here.

The checksum of a block combines those of its pieces (`transfer.memory.checksum`), each seeded by block key and rank, so
that bytes of another block or rank fail verification.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from kvolt.core.errors import ConfigError
from kvolt.core.ids import BlockKey
from kvolt.transfer.memory.device_memory import DeviceMemory, blocks_per_step, checksums, copy_checked
from kvolt.transfer.memory.pieces import Pieces, Sums
from kvolt.transfer.memory.slabs import Numbers, Slab

PAGE_BYTES = 4096
_PART_BYTES = 256 << 20
_MAX_PARTS = 64
_STEP_BYTES = 256 << 20
"""Bytes per copy call; a cancelled copy ends between two calls."""
_SEED_BYTES = 8
_RANK_KEY = 0x9E3779B97F4A7C15
_FOLD_KEY = np.uint64(0xD6E8FEB86659FD93)


class BlockShape(msgspec.Struct, frozen=True):
    """Shape of blocks in a tier: one equal piece per rank."""

    piece_bytes: int
    num_ranks: int = 1
    dtype: str = ""
    """Data type of the values; empty if unknown."""

    @classmethod
    def of(cls, slabs: Sequence[Slab]) -> BlockShape:
        """Shape of the blocks of an engine, from its slab per rank."""
        dtypes = {"" if slab.layout is None else slab.layout.block.dtype for slab in slabs}
        sizes = {slab.block_bytes for slab in slabs}
        if len(sizes) != 1:
            raise ConfigError(
                f"block sizes differ between ranks: {sorted(sizes)}",
                key="tiers",
                remedy="disable tiers, or use a TP degree that divides the KV heads evenly",
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
    """Checksums of blocks in an engine's slabs, one per rank."""
    folded = np.zeros(len(blocks), dtype=np.uint64)
    for rank, slab in enumerate(slabs):
        sums = np.empty(len(blocks), dtype=np.uint64)
        checksums(slab.contents, slab.pieces(blocks), rank_seeds(keys, rank), sums)
        folded = folded * _FOLD_KEY + sums
    return folded


class SlotMemory:
    """See the module. No copy may be in progress on `close`."""

    def __init__(self, shape: BlockShape, num_slots: int, device: DeviceMemory | None = None) -> None:
        """`num_slots`: capacity. `device`: pin the memory for it."""
        self.shape = shape
        self.num_slots = num_slots
        self._device = device
        self._unpin: list[Callable[[], None]] = []
        self._growing = threading.Lock()
        # Few parts even of a large memory: each needs descriptors here and in every peer.
        part_bytes = max(_PART_BYTES, num_slots * shape.slot_bytes // _MAX_PARTS)
        self._per_part = max(min(part_bytes // shape.slot_bytes, num_slots), 1)
        self._parts: list[Slab] = []

    @property
    def num_bytes(self) -> int:
        """Allocated bytes."""
        return sum(part.memory.nbytes for part in self._parts)

    def close(self) -> None:
        while self._unpin:
            self._unpin.pop()()
        while self._parts:
            self._parts.pop().close()

    @property
    def num_allocated(self) -> int:
        """Allocated slots."""
        return min(len(self._parts) * self._per_part, self.num_slots)

    def steps(self) -> Iterator[int]:
        """Arguments for successive `grow_to` calls, one per part."""
        yield from range(self._per_part, self.num_slots, self._per_part)
        yield self.num_slots

    def grow_to(self, num_slots: int) -> None:
        """Allocate at least `num_slots` slots. OSError if out of memory. Thread-safe."""
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
        """Change the capacity and free memory beyond it and beyond `end`, the end of used slots. `grow_to`
        allocates."""
        with self._growing:
            self.num_slots = num_slots
            needed = -(-max(num_slots, end) // self._per_part)
            while len(self._parts) > needed:
                if self._unpin:
                    self._unpin.pop()()
                self._parts.pop().close()

    def by_part(self, slots: Numbers) -> Iterator[tuple[Slab, Numbers, Numbers]]:
        """Yield (part, slot numbers in the part, indexes in `slots`); allocates as needed."""
        if len(slots):
            self.grow_to(int(slots.max()) + 1)
        parts = slots // self._per_part
        for number in np.unique(parts).tolist():
            indexes = np.flatnonzero(parts == number)
            yield self._parts[number], slots[indexes] - number * self._per_part, indexes

    def block(self, slot: int) -> memoryview:
        """Bytes of the block in a slot, without padding. Must be released after use."""
        [(part, [number], _)] = self.by_part(np.asarray([slot], dtype=np.int64))
        start = int(number) * self.shape.slot_bytes
        return part.memory[start : start + self.shape.block_bytes]

    def fill(self, slots: Numbers, keys: Sequence[BlockKey], slabs: Sequence[Slab], blocks: Numbers) -> Sums:
        """Copy engine blocks into slots; return their checksums. Any thread, with its own slabs."""
        return self._copy(slots, keys, slabs, blocks, is_in=True)

    def empty(self, slots: Numbers, keys: Sequence[BlockKey], slabs: Sequence[Slab], blocks: Numbers) -> Sums:
        """Copy slots into engine blocks; return the checksums of the copies."""
        return self._copy(slots, keys, slabs, blocks, is_in=False)

    def checksums(self, slots: Numbers, keys: Sequence[BlockKey]) -> Sums:
        """Checksums of the blocks in these slots."""
        folded = np.zeros(len(slots), dtype=np.uint64)
        for rank in range(self.shape.num_ranks):
            sums = np.empty(len(slots), dtype=np.uint64)
            for part, numbers, indexes in self.by_part(slots):
                part_sums = np.empty(len(indexes), dtype=np.uint64)
                seeds = rank_seeds([keys[each] for each in indexes.tolist()], rank)
                checksums(part.contents, self.pieces(numbers, rank), seeds, part_sums)
                sums[indexes] = part_sums
            folded = folded * _FOLD_KEY + sums
        return folded

    def _copy(
        self, slots: Numbers, keys: Sequence[BlockKey], slabs: Sequence[Slab], blocks: Numbers, *, is_in: bool
    ) -> Sums:
        folded = np.zeros(len(slots), dtype=np.uint64)
        for rank, slab in enumerate(slabs):
            sums = np.empty(len(slots), dtype=np.uint64)
            for part, numbers, indexes in self.by_part(slots):
                slot_pieces, slab_pieces = self.pieces(numbers, rank), slab.pieces(blocks[indexes])
                batch_blocks = blocks_per_step(part.contents, slab.contents, slot_pieces, _STEP_BYTES)
                for first in range(0, len(indexes), batch_blocks):
                    batch = indexes[first : first + batch_blocks]
                    in_part = slot_pieces.slice(first, len(batch))
                    in_slab = slab_pieces.slice(first, len(batch))
                    seeds = rank_seeds([keys[each] for each in batch.tolist()], rank)
                    batch_sums = np.empty(len(batch), dtype=np.uint64)
                    if is_in:
                        copy_checked(part.contents, in_part, slab.contents, in_slab, seeds, batch_sums)
                    else:
                        copy_checked(slab.contents, in_slab, part.contents, in_part, seeds, batch_sums)
                    sums[batch] = batch_sums
            folded = folded * _FOLD_KEY + sums
        return folded

    def pieces(self, numbers: Numbers, rank: int) -> Pieces:
        """Pieces of one rank in slots of a part."""
        shape = self.shape
        return Pieces(numbers * shape.slot_bytes + rank * shape.piece_bytes, shape.piece_bytes)
