"""Prefix index in plain Python: the reference implementation, used if the native one was not built.

A dictionary maps block hashes to an integer with one bit per worker and tier that holds the block. A lookup ANDs the
integers of a prompt's blocks until no worker is left; a bit that is still set was set in every block before. So the
result is exact whatever was removed in between, and the cost depends on the longest match, not on what workers hold.

Workers are numbered slots. Knows no time, tokens or KV bytes. Import `prefix_index` instead; `_index_native.c` is the
same in C.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from operator import index as whole

import numpy as np
import numpy.typing as npt

from kvolt.core.kv_events import EMPTY_DIGEST, TIER_LEVEL, digest_of, mix_hash

NUM_TIERS = len(TIER_LEVEL)
OWN_TIERS = 3
MAX_SLOTS = 8192
"""Concurrent workers: the native index names worker and tier in 16 bits."""

DEFAULT_MAX_BYTES = 1024**3
MIN_MAX_BYTES = 64 * 1024

Hashes = Sequence[int] | bytes | bytearray | npt.NDArray[np.uint64]
"""Unsigned 64-bit numbers, or their bytes in native order (little-endian on all supported platforms)."""

# CPython object sizes, rounded up: a key of two digits with its place in a dictionary that is at most two
# thirds full, a value that grows with the slots, a place in a set. A test compares them with tracemalloc.
_BLOCK_BYTES = 48 + 104 + 28
_SLOT_BYTES = 4 * NUM_TIERS / 30
_PAIR_BYTES = 48
_WORKER_BYTES = NUM_TIERS * 256 + 256

_STORED_AT_ONCE = 4096
"""Blocks of one call stored between checks of the memory cap."""
_CROWDED = 0.75
"""Share of the cap below which eviction is far and lookups do not maintain the order of use."""


class BlockIndex:
    """Blocks by SequenceHash with their holders by slot and tier.

    Bounded by `max_bytes`: beyond it the least recently stored or found blocks are evicted, of one prompt the deepest
    first.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        max_bytes = whole(max_bytes)
        if max_bytes < MIN_MAX_BYTES:
            raise ValueError(
                f"an index of {max_bytes} bytes holds nothing: max_bytes is {MIN_MAX_BYTES} or more"
            )
        self._max_bytes = max_bytes
        self._masks: dict[int, int] = {}  # in order of use when crowded: see _CROWDED
        self._workers: list[_Worker | None] = []
        self._free_slots: list[int] = []
        self._num_pairs = 0
        self._device_bits = 0  # the tier 0 bits of all slots

    @property
    def num_bytes(self) -> int:
        block_bytes = _BLOCK_BYTES + int(len(self._workers) * _SLOT_BYTES)
        num_pair_bytes = self._num_pairs * _PAIR_BYTES + len(self._workers) * _WORKER_BYTES
        return len(self._masks) * block_bytes + num_pair_bytes

    @property
    def num_pairs(self) -> int:
        """Number of (block, worker, tier) entries."""
        return self._num_pairs

    @property
    def num_blocks(self) -> int:
        return len(self._masks)

    def add_worker(self) -> int:
        """Allocate the lowest free slot."""
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
        """Free a slot with all its blocks."""
        self.clear(slot)
        self._workers[slot] = None
        heappush(self._free_slots, whole(slot))

    def store(self, slot: int, hashes: Hashes, tier: int = 0) -> None:
        """Add blocks in any order. Idempotent."""
        names = _checked(hashes)  # first: converting items may run foreign code
        worker, bit = self._worker_and_bit(slot, tier)
        blocks, masks = worker.held[tier], self._masks
        is_crowded = self._is_crowded()
        # Last block first: the deepest is the first to be evicted.
        for remaining in range(len(names), 0, -_STORED_AT_ONCE):
            for name in reversed(names[max(remaining - _STORED_AT_ONCE, 0) : remaining]):
                mask = masks.pop(name, 0) if is_crowded else masks.get(name, 0)
                masks[name] = mask | bit
                if not mask & bit:
                    blocks.add(name)
                    worker.digests[tier] ^= mix_hash(name)
                    self._num_pairs += 1
            self._evict_beyond_cap()

    def remove(self, slot: int, hashes: Hashes, tier: int = 0) -> None:
        """Remove blocks. Unknown ones are ignored."""
        names = _checked(hashes)
        worker, bit = self._worker_and_bit(slot, tier)
        blocks = worker.held[tier]
        for name in names:
            if name in blocks:
                blocks.remove(name)
                worker.digests[tier] ^= mix_hash(name)
                self._drop(name, bit)

    def clear(self, slot: int, tier: int | None = None) -> None:
        """Remove all blocks of a worker, or those of one tier."""
        for level in range(NUM_TIERS) if tier is None else (tier,):
            worker, bit = self._worker_and_bit(slot, level)
            for name in worker.held[level]:
                self._drop(name, bit)
            worker.forget(level)

    def find(self, hashes: Hashes) -> npt.NDArray[np.int32]:
        """Number of leading blocks of a prompt that each slot holds on its device."""
        depths: npt.NDArray[np.int32] = self._lookup(_checked(hashes), num_levels=1)[0]
        return depths

    def find_tiers(self, hashes: Hashes) -> npt.NDArray[np.int32]:
        """The same by tier and slot, each tier including the faster ones."""
        return self._lookup(_checked(hashes), num_levels=NUM_TIERS)

    def find_local_tiers(self, hashes: Hashes) -> npt.NDArray[np.int32]:
        """The same for the tiers of a worker itself: device, host, disk."""
        return self._lookup(_checked(hashes), num_levels=OWN_TIERS)

    def digest(self, slot: int, tier: int = 0) -> tuple[int, int]:
        """Number of blocks and their digest (`core.kv_events`)."""
        worker, _ = self._worker_and_bit(slot, tier)
        return len(worker.held[tier]), worker.digests[tier]

    def contents(self, slot: int, tier: int = 0) -> list[int]:
        """All blocks of a slot and tier, unordered."""
        worker, _ = self._worker_and_bit(slot, tier)
        return list(worker.held[tier])

    def num_evicted(self, slot: int, tier: int = 0) -> int:
        """Blocks evicted by the cap since the last clear. Digests cannot agree until then."""
        worker, _ = self._worker_and_bit(slot, tier)
        return worker.num_evicted[tier]

    def check_integrity(self) -> None:
        """Raise AssertionError if the parts disagree. For tests: visits the whole index."""
        masks: dict[int, int] = {}
        entries = [(slot, worker) for slot, worker in enumerate(self._workers) if worker is not None]
        for slot, worker in entries:
            for tier, blocks in enumerate(worker.held):
                if worker.digests[tier] != digest_of(blocks):
                    raise AssertionError("the index is broken: a worker's digest is wrong")
                for name in blocks:
                    masks[name] = masks.get(name, 0) | 1 << (slot * NUM_TIERS + tier)
        if masks != self._masks or sum(mask.bit_count() for mask in masks.values()) != self._num_pairs:
            raise AssertionError("the index is broken: blocks and workers disagree")

    def _worker_and_bit(self, slot: int, tier: int) -> tuple[_Worker, int]:
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

    def _lookup(self, names: array[int], num_levels: int) -> npt.NDArray[np.int32]:
        depths = np.zeros((num_levels, len(self._workers)), dtype=np.int32)
        longest = max(self._walk(names, level, depths[level]) for level in range(num_levels))
        if self._is_crowded():
            for name in reversed(names[:longest]):
                self._masks[name] = self._masks.pop(name)
        return depths

    def _walk(self, names: Iterable[int], level: int, depths: npt.NDArray[np.int32]) -> int:
        """Depth of each slot's match in tiers up to `level`, into `depths`; returns the longest."""
        alive, depth, masks = self._device_bits, 0, self._masks
        for name in names:
            mask = masks.get(name, 0)
            for _ in range(level):
                mask |= mask >> 1  # move the next tier to the device bit
            remaining = alive & mask
            if remaining != alive:
                if depth:
                    depths[self._slots_of(alive & ~remaining)] = depth
                alive = remaining
                if not alive:
                    return depth
            depth += 1
        if alive and depth:
            depths[self._slots_of(alive)] = depth
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
                assert worker is not None  # a free slot holds nothing
                worker.held[tier].remove(name)
                worker.digests[tier] ^= mix_hash(name)
                worker.num_evicted[tier] += 1
                self._num_pairs -= 1


class _Worker:
    """Blocks of one slot, by tier."""

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
    """Convert to 64-bit integers. Raises TypeError for non-integers, OverflowError beyond 64 bits."""
    return array("Q", hashes)
