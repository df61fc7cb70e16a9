"""Which worker holds which block, in plain Python: the definition of the index, and what runs where no compiler was.

A block is a key of one dictionary; its value is an integer with a bit for every worker and tier that holds it. To
find a prompt is to AND the integers of its blocks, from the first on, until no worker is left: a bit that is still
set has been set in every block before. So the answer is exact whatever was removed in between, and costs what the
longest match costs, not what the workers hold.

Must not know time, tokens, bytes of KV, or who the workers are: they are numbered slots. `router.index` is what others
import; `_index_native.c` is the same in C.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from operator import index as whole

import numpy as np
import numpy.typing as npt

from kvolt.core.kv_digest import EMPTY_DIGEST, digest_of, mix
from kvolt.core.kv_events import TIER_LEVEL

NUM_TIERS = len(TIER_LEVEL)
OWN_TIERS = 3
MAX_SLOTS = 8192
"""Workers at a time: as many as the native index can name in 16 bits together with the tier."""

DEFAULT_MAX_BYTES = 1024**3
MIN_MAX_BYTES = 64 * 1024

Hashes = Sequence[int] | bytes | bytearray | npt.NDArray[np.uint64]
"""Unsigned 64-bit numbers, or their bytes in the machine's order (little-endian wherever kvolt runs)."""

# What CPython takes, rounded up: a key of two digits and its place in a dictionary that is two thirds full or less; a
# value that grows with the slots; a place in a set. A test holds them against tracemalloc.
_BLOCK_BYTES = 48 + 104 + 28
_SLOT_BYTES = 4 * NUM_TIERS / 30
_PAIR_BYTES = 48
_WORKER_BYTES = NUM_TIERS * 256 + 256

_STORED_AT_ONCE = 4096
"""So many blocks of one call may lie above the cap until it is looked at again."""
_CROWDED = 0.75
"""Of the cap. Below it nobody will be evicted soon, and a find need not keep the blocks in order of use."""


class BlockIndex:
    """Blocks by SequenceHash, their holders by slot and tier. At most `max_bytes`: beyond, those go that were stored
    or found the longest ago, and of one prompt the deepest first. What was evicted is not found, and nothing else
    changes.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        max_bytes = whole(max_bytes)
        if max_bytes < MIN_MAX_BYTES:
            raise ValueError(
                f"an index of {max_bytes} bytes holds nothing: max_bytes is {MIN_MAX_BYTES} or more"
            )
        self._max_bytes = max_bytes
        self._masks: dict[int, int] = {}  # in order of use, where that matters: see _CROWDED
        self._workers: list[_Worker | None] = []
        self._free_slots: list[int] = []
        self._num_pairs = 0
        self._device_bits = 0  # the bit of tier 0 of every slot

    @property
    def num_bytes(self) -> int:
        block_bytes = _BLOCK_BYTES + int(len(self._workers) * _SLOT_BYTES)
        num_pair_bytes = self._num_pairs * _PAIR_BYTES + len(self._workers) * _WORKER_BYTES
        return len(self._masks) * block_bytes + num_pair_bytes

    @property
    def num_pairs(self) -> int:
        """A pair is a block in a tier of a worker."""
        return self._num_pairs

    @property
    def num_blocks(self) -> int:
        return len(self._masks)

    def add_worker(self) -> int:
        """A slot, the lowest that is free."""
        if self._free_slots:
            slot = heappop(self._free_slots)
            self._workers[slot] = _Worker()
            return slot
        slot = len(self._workers)
        if slot == MAX_SLOTS:
            raise ValueError(f"an index has room for {MAX_SLOTS} workers")
        self._workers.append(_Worker())
        self._device_bits |= 1 << slot * NUM_TIERS
        self._evict_beyond_cap()
        return slot

    def remove_worker(self, slot: int) -> None:
        """And all that it holds."""
        self.clear(slot)
        self._workers[slot] = None
        heappush(self._free_slots, whole(slot))

    def store(self, slot: int, hashes: Hashes, tier: int = 0) -> None:
        """These blocks are there now, in any order; known ones are no error."""
        names = _checked(hashes)  # first: it runs code of others where the items are no plain ints
        worker, bit = self._place(slot, tier)
        held, masks = worker.held[tier], self._masks
        is_crowded = self._is_crowded()
        # The last block first: it is the deepest, and the first to go.
        for left in range(len(names), 0, -_STORED_AT_ONCE):
            for name in reversed(names[max(left - _STORED_AT_ONCE, 0) : left]):
                mask = masks.pop(name, 0) if is_crowded else masks.get(name, 0)
                masks[name] = mask | bit
                if not mask & bit:
                    held.add(name)
                    worker.digests[tier] ^= mix(name)
                    self._num_pairs += 1
            self._evict_beyond_cap()

    def remove(self, slot: int, hashes: Hashes, tier: int = 0) -> None:
        """These blocks are gone from there; unknown ones are no error."""
        names = _checked(hashes)
        worker, bit = self._place(slot, tier)
        held = worker.held[tier]
        for name in names:
            if name in held:
                held.remove(name)
                worker.digests[tier] ^= mix(name)
                self._drop(name, bit)

    def clear(self, slot: int, tier: int | None = None) -> None:
        """All blocks of the worker, or those of one tier."""
        for level in range(NUM_TIERS) if tier is None else (tier,):
            worker, bit = self._place(slot, level)
            for name in worker.held[level]:
                self._drop(name, bit)
            worker.forget(level)

    def find(self, hashes: Hashes) -> npt.NDArray[np.int32]:
        """By slot: how many of the prompt's blocks, from the first on, it holds on its device."""
        found: npt.NDArray[np.int32] = self._found(_checked(hashes), num_levels=1)[0]
        return found

    def find_tiers(self, hashes: Hashes) -> npt.NDArray[np.int32]:
        """By tier and slot: the same, where a block counts that is held in this tier or a faster one."""
        return self._found(_checked(hashes), num_levels=NUM_TIERS)

    def find_own(self, hashes: Hashes) -> npt.NDArray[np.int32]:
        """The same of the tiers that are a worker's own: device, host, disk."""
        return self._found(_checked(hashes), num_levels=OWN_TIERS)

    def digest(self, slot: int, tier: int = 0) -> tuple[int, int]:
        """How many blocks are held there, and their digest (`core.kv_digest`)."""
        worker, _ = self._place(slot, tier)
        return len(worker.held[tier]), worker.digests[tier]

    def contents(self, slot: int, tier: int = 0) -> list[int]:
        """What is held there, in no order."""
        worker, _ = self._place(slot, tier)
        return list(worker.held[tier])

    def num_evicted(self, slot: int, tier: int = 0) -> int:
        """How many of its blocks the cap has cost it since it was last clear: until then digests cannot agree."""
        worker, _ = self._place(slot, tier)
        return worker.num_evicted[tier]

    def check_integrity(self) -> None:
        """AssertionError if its parts disagree. For tests: costs all of the index."""
        masks: dict[int, int] = {}
        places = [(slot, worker) for slot, worker in enumerate(self._workers) if worker is not None]
        for slot, worker in places:
            for tier, held in enumerate(worker.held):
                if worker.digests[tier] != digest_of(held):
                    raise AssertionError("the index is broken: a worker's digest is wrong")
                for name in held:
                    masks[name] = masks.get(name, 0) | 1 << (slot * NUM_TIERS + tier)
        if masks != self._masks or sum(mask.bit_count() for mask in masks.values()) != self._num_pairs:
            raise AssertionError("the index is broken: blocks and workers disagree")

    def _place(self, slot: int, tier: int) -> tuple[_Worker, int]:
        slot, tier = whole(slot), whole(tier)
        worker = self._workers[slot] if 0 <= slot < len(self._workers) else None
        if worker is None:
            raise IndexError(f"no worker has slot {slot}")
        if not 0 <= tier < NUM_TIERS:
            raise ValueError(f"there is no tier {tier}: they are 0 to {NUM_TIERS - 1}")
        return worker, 1 << (slot * NUM_TIERS + tier)

    def _drop(self, name: int, bit: int) -> None:
        mask = self._masks[name] & ~bit
        self._num_pairs -= 1
        if mask:
            self._masks[name] = mask
        else:
            del self._masks[name]

    def _found(self, names: array[int], num_levels: int) -> npt.NDArray[np.int32]:
        found = np.zeros((num_levels, len(self._workers)), dtype=np.int32)
        depths = [self._walk(names, level, found[level]) for level in range(num_levels)]
        if self._is_crowded():
            for name in reversed(names[: max(depths)]):
                self._masks[name] = self._masks.pop(name)
        return found

    def _walk(self, names: Iterable[int], level: int, found: npt.NDArray[np.int32]) -> int:
        """Down the prompt with those who hold all of it so far in tiers up to this one; how deep anybody gets."""
        alive, depth, masks = self._device_bits, 0, self._masks
        for name in names:
            mask = masks.get(name, 0)
            for _ in range(level):
                mask |= mask >> 1  # each step brings one more tier to the bit of the device
            left = alive & mask
            if left != alive:
                if depth:
                    found[self._slots_of(alive & ~left)] = depth
                alive = left
                if not alive:
                    return depth
            depth += 1
        if alive and depth:
            found[self._slots_of(alive)] = depth
        return depth

    def _slots_of(self, device_bits: int) -> npt.NDArray[np.bool_]:
        num_bits = len(self._workers) * NUM_TIERS
        packed = np.frombuffer(device_bits.to_bytes(num_bits // 8 + 1, "little"), dtype=np.uint8)
        return np.unpackbits(packed, count=num_bits, bitorder="little")[::NUM_TIERS].view(np.bool_)

    def _is_crowded(self) -> bool:
        return self.num_bytes > self._max_bytes * _CROWDED

    def _evict_beyond_cap(self) -> None:
        while self.num_bytes > self._max_bytes and self._masks:
            name = next(iter(self._masks))
            mask = self._masks.pop(name)
            while mask:
                lowest = mask & -mask
                mask ^= lowest
                slot, tier = divmod(lowest.bit_length() - 1, NUM_TIERS)
                worker = self._workers[slot]
                assert worker is not None  # a slot is given back with nothing in it
                worker.held[tier].remove(name)
                worker.digests[tier] ^= mix(name)
                worker.num_evicted[tier] += 1
                self._num_pairs -= 1


class _Worker:
    """What one slot holds, by tier."""

    __slots__ = ("digests", "held", "num_evicted")

    def __init__(self) -> None:
        self.held: list[set[int]] = [set() for _ in range(NUM_TIERS)]
        self.digests = [EMPTY_DIGEST] * NUM_TIERS
        self.num_evicted = [0] * NUM_TIERS

    def forget(self, tier: int) -> None:
        self.held[tier] = set()
        self.digests[tier] = EMPTY_DIGEST
        self.num_evicted[tier] = 0


def _checked(hashes: Hashes) -> array[int]:
    """TypeError for what is no whole number, OverflowError for one that has no place in 64 bits without a sign."""
    return array("Q", hashes)
