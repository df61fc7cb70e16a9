"""StandaloneIndex: posted events in order, once, or refused with the expected one."""

from __future__ import annotations

import pytest

from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import Cleared, KvChange, KvDigest, Removed, Stored, Tier, pack_hashes
from kvolt.router.service.standalone_state import EventsMissed, StandaloneEvent, StandaloneIndex

A, B = InstanceId("a"), InstanceId("b")


def stored(*hashes: int, event_id: int | None = None, epoch: int = 1, dp_rank: int = 0) -> StandaloneEvent:
    return StandaloneEvent(Stored.from_hashes(hashes), dp_rank, event_id, epoch)


def event(change: KvChange) -> StandaloneEvent:
    return StandaloneEvent(change)


def an_index(*dp_ranks: int) -> StandaloneIndex:
    index = StandaloneIndex()
    index.add_worker(A, dp_ranks or (0,))
    index.add_worker(B, (0,))
    return index


def held(
    index: StandaloneIndex, worker: InstanceId = A, dp_rank: int = 0, tier: Tier = Tier.DEVICE
) -> list[int]:
    return sorted(index.contents(worker, dp_rank, tier))


def test_what_is_posted_is_found_and_what_is_removed_is_not() -> None:
    index = an_index(0, 1)
    assert index.post(A, [stored(1, 2, 3), stored(1, dp_rank=1)]) == 2
    index.post(B, [stored(1, 2)])
    found = index.find((1, 2, 3))
    slots = [index.slot_of(A), index.slot_of(A, 1), index.slot_of(B)]
    assert [int(found[slot]) for slot in slots if slot is not None] == [3, 1, 2]
    index.post(A, [event(Removed.from_hashes([2])), event(Stored.from_hashes([9], tier=Tier.HOST))])
    assert held(index) == [1, 3]
    assert held(index, tier=Tier.HOST) == [9]
    index.post(A, [event(Cleared())])
    assert index.digests(A) == [KvDigest(1, index.index.digest(index.slot_of(A, 1) or 0)[1], 1)]
    assert index.contents(InstanceId("nobody"), 0, Tier.DEVICE) == []


def test_numbered_events_may_repeat_but_not_skip() -> None:
    index = an_index()
    assert index.post(A, [stored(1, event_id=5), stored(2, event_id=6)]) == 2
    assert index.post(A, [stored(2, event_id=6), stored(3, event_id=7)]) == 1
    with pytest.raises(EventsMissed, match="received event 9, expected event 8") as missed:
        index.post(A, [stored(4, event_id=9)])
    assert (missed.value.epoch, missed.value.expected_id) == (1, 8)
    assert held(index) == [1, 2, 3], "nothing of it was taken"
    with pytest.raises(EventsMissed):
        index.post(A, [stored(4, event_id=8), stored(5, event_id=10)])
    assert held(index) == [1, 2, 3]
    assert index.post(A, [stored(4, event_id=8), stored(5, event_id=9)]) == 2


def test_a_new_epoch_begins_with_nothing() -> None:
    index = an_index()
    index.post(A, [stored(1, event_id=0)])
    assert index.post(A, [stored(2, event_id=1), stored(7, event_id=0, epoch=2)]) == 1
    assert held(index) == [7]
    assert index.post(A, [stored(3, event_id=2, epoch=1)]) == 0, "of the life before"
    assert held(index) == [7]


def test_all_blocks_anew_heal_a_gap() -> None:
    index = an_index(0, 1)
    index.post(A, [stored(1, 2, event_id=0), stored(5, event_id=1, dp_rank=1)])
    index.replace(
        A, {(0, Tier.DEVICE): pack_hashes([2, 3]), (0, Tier.HOST): pack_hashes([8])}, epoch=1, next_id=40
    )
    assert held(index) == [2, 3]
    assert held(index, tier=Tier.HOST) == [8]
    assert held(index, dp_rank=1) == []
    assert index.post(A, [stored(4, event_id=40)]) == 1


def test_a_worker_that_is_not_believed_has_to_post_all_anew() -> None:
    index = an_index()
    index.resync(A)  # nothing was numbered: nothing to be doubted
    index.post(A, [stored(1, event_id=0)])
    index.resync(A)
    index.resync(InstanceId("nobody"))
    with pytest.raises(EventsMissed, match="expected a snapshot") as missed:
        index.post(A, [stored(2, event_id=1)])
    assert missed.value.expected_id is None
    index.replace(A, {(0, Tier.DEVICE): pack_hashes([1])}, epoch=1, next_id=1)
    assert index.post(A, [stored(2, event_id=1)]) == 1
    index.resync(A)
    assert index.post(A, [stored(3, event_id=0, epoch=2)]) == 1, "a new life is believed"
    assert index.post(A, [stored(4, event_id=1, epoch=2)]) == 1


def test_workers_come_and_go_with_their_slots() -> None:
    index = an_index()
    index.post(A, [stored(1)])
    version = index.slots_version
    index.add_worker(A, (0,))
    assert (index.slots_version, held(index)) == (version, [1]), "the same again changes nothing"
    index.add_worker(A, (0, 1))
    assert index.slots_version != version
    assert held(index) == []
    index.drop_worker(A)
    index.drop_worker(A)
    assert index.slot_of(A) is None
    with pytest.raises(KeyError):
        index.post(A, [stored(1)])
    assert index.digests(A) == []
    assert index.index.num_pairs == 0
