"""InstanceSlots: the index slots of a worker's ranks, and each action on them."""

from __future__ import annotations

import numpy as np
import pytest

from kvolt.core.kv_events import (
    HASHES_DTYPE,
    Cleared,
    KvChange,
    KvDigest,
    KvEvent,
    Removed,
    Stored,
    Tier,
    digest_of,
)
from kvolt.router.index.prefix_index_python import MAX_SLOTS, MIN_MAX_BYTES, BlockIndex
from kvolt.router.ingest.feed import Comparison, IngestStats
from kvolt.router.ingest.slots import InstanceSlots


def stored(*hashes: int, tier: Tier = Tier.DEVICE) -> Stored:
    return Stored.from_hashes(hashes, tier=tier)


def removed(*hashes: int, tier: Tier = Tier.DEVICE) -> Removed:
    return Removed.from_hashes(hashes, tier)


def packed(*hashes: int) -> bytes:
    return np.array(hashes, dtype=HASHES_DTYPE).tobytes()


class Lab:
    def __init__(self, *dp_ranks: int, max_bytes: int = 10_000_000) -> None:
        self.index = BlockIndex(max_bytes)
        self.stats = IngestStats()
        self.slots = InstanceSlots(self.index, dp_ranks or (0,), self.stats)

    def apply(self, *changes: KvChange, dp_rank: int = 0) -> None:
        self.slots.apply([KvEvent(number, 1, change, dp_rank) for number, change in enumerate(changes)])

    def held(self, dp_rank: int = 0, level: int = 0) -> set[int]:
        slot = self.slots.slot_of(dp_rank)
        assert slot is not None
        return set(self.index.contents(slot, level))


def test_each_rank_is_a_slot_of_its_own() -> None:
    lab = Lab(0, 4)
    lab.apply(stored(1, 2), stored(1, tier=Tier.HOST))
    lab.apply(stored(3), dp_rank=4)
    assert (lab.held(), lab.held(level=1), lab.held(4)) == ({1, 2}, {1}, {3})
    lab.apply(removed(1), removed(7))
    assert (lab.held(), lab.held(level=1)) == ({2}, {1})
    lab.apply(Cleared(Tier.HOST))
    assert (lab.held(), lab.held(level=1), lab.held(4)) == ({2}, set(), {3})
    lab.apply(stored(5, tier=Tier.DISK), Cleared())
    assert (lab.held(), lab.held(level=2), lab.held(4)) == (set(), set(), {3})
    lab.apply(stored(5), dp_rank=9)
    assert lab.slots.slot_of(9) is None
    assert lab.stats.num_unknown_ranks == 1
    lab.slots.clear()
    assert lab.index.num_pairs == 0


def test_close_frees_the_slots() -> None:
    lab = Lab(0, 1)
    lab.apply(stored(1))
    lab.slots.close()
    lab.slots.close()
    assert lab.slots.slot_of(0) is None
    assert lab.index.num_pairs == 0
    assert sorted(lab.index.add_worker() for _ in range(3)) == [0, 1, 2], "two of them used again"


def test_without_free_slots_nothing_is_allocated() -> None:
    index = BlockIndex(10**9)
    for _ in range(MAX_SLOTS - 1):
        index.add_worker()
    with pytest.raises(ValueError, match="room"):
        InstanceSlots(index, (0, 1), IngestStats())
    assert index.add_worker() == MAX_SLOTS - 1, "the first of the two is free again"


def test_a_snapshot_replaces_all_blocks() -> None:
    lab = Lab(0, 1)
    lab.apply(stored(*range(10)), stored(3, tier=Tier.HOST))
    lab.apply(stored(77), dp_rank=1)
    lab.slots.replace({(0, Tier.DEVICE): packed(5, 6, 100, 2**64 - 1), (0, Tier.DISK): packed(8)})
    assert lab.held() == {5, 6, 100, 2**64 - 1}
    assert (lab.held(level=1), lab.held(level=2), lab.held(1)) == (set(), {8}, set())
    lab.slots.replace({(9, Tier.DEVICE): packed(1)})
    assert lab.index.num_pairs == 0, "a rank that is not registered has no place"


def test_only_what_differs_is_touched() -> None:
    lab = Lab()
    touched: list[tuple[str, int]] = []

    class Watched(BlockIndex):
        def store(self, slot: int, hashes: object, tier: int = 0) -> None:
            touched.append(("store", len(hashes) // 8))  # type: ignore[arg-type]
            super().store(slot, hashes, tier)  # type: ignore[arg-type]

        def remove(self, slot: int, hashes: object, tier: int = 0) -> None:
            touched.append(("remove", len(hashes) // 8))  # type: ignore[arg-type]
            super().remove(slot, hashes, tier)  # type: ignore[arg-type]

    index = Watched()
    slots = InstanceSlots(index, (0,), lab.stats)
    slots.replace({(0, Tier.DEVICE): packed(*range(1000))})
    slots.replace({(0, Tier.DEVICE): packed(*range(3, 1001))})
    assert touched == [("store", 1000), ("remove", 3), ("store", 1)]
    assert set(index.contents(0)) == set(range(3, 1001))


def test_digests_are_held_against_the_index() -> None:
    lab = Lab(0, 1)
    lab.apply(stored(1, 2), stored(9, tier=Tier.HOST))
    right = KvDigest(2, digest_of((1, 2)))
    host = KvDigest(1, digest_of((9,)), tier=Tier.HOST)
    assert lab.slots.compare((right, host, KvDigest(0, 0, 1))) is Comparison.AGREE
    assert lab.slots.compare(()) is Comparison.AGREE
    assert lab.slots.compare((KvDigest(5, 5, dp_rank=8),)) is Comparison.AGREE, "not ours to say"
    for wrong in (KvDigest(2, 1), KvDigest(1, right.digest), KvDigest(2, right.digest, 1)):
        assert lab.slots.compare((right, wrong)) is Comparison.DIFFER


def test_an_index_that_is_full_is_no_mismatch() -> None:
    lab = Lab(max_bytes=MIN_MAX_BYTES)
    everything = range(100_000)
    lab.slots.replace({(0, Tier.DEVICE): packed(*everything)})
    reported = KvDigest(len(everything), digest_of(everything))
    assert 0 < len(lab.held()) < len(everything)
    assert lab.slots.compare((reported,)) is Comparison.CROWDED
    lab.slots.replace({(0, Tier.DEVICE): packed(1, 2)})
    assert lab.held() == {1, 2}
    assert lab.slots.compare((KvDigest(2, digest_of((1, 2))),)) is Comparison.AGREE, "counted anew"
