"""Feed: events in order whatever was lost; each transition by what goes in and what comes out."""

from __future__ import annotations

import pytest

from kvolt.core.kv_events import KvDigest, KvEvent, KvEventBatch, Stored, Tier
from kvolt.core.kv_recovery import KvContents, KvEventsSince
from kvolt.router.ingest.feed import (
    Action,
    Apply,
    Check,
    Clear,
    Compared,
    Comparison,
    Doubted,
    Feed,
    FeedState,
    IngestStats,
    Input,
    Quiet,
    Refused,
    Replace,
    Replayed,
    Snapshotted,
    Told,
)

EPOCH = 7
DIGESTS = (KvDigest(1, 2),)
AGREE, DIFFER = Compared(Comparison.AGREE), Compared(Comparison.DIFFER)
NO_BLOCKS: dict[tuple[int, Tier], bytes] = {}


def event(event_id: int, epoch: int = EPOCH) -> KvEvent:
    return KvEvent(event_id, epoch, Stored.of([event_id]))


def batch(*ids: int, epoch: int = EPOCH, digests: tuple[KvDigest, ...] = ()) -> KvEventBatch:
    return KvEventBatch(tuple(event(each, epoch) for each in ids), digests=digests)


def told(*ids: int, epoch: int = EPOCH, num_bytes: int = 10) -> Told:
    return Told(batch(*ids, epoch=epoch), num_bytes)


def snapshot(next_id: int = 0, epoch: int = EPOCH) -> Snapshotted:
    return Snapshotted(epoch, next_id, NO_BLOCKS, DIGESTS)


def replayed(*batches: KvEventBatch, next_id: int, epoch: int = EPOCH) -> Replayed:
    return Replayed(epoch, next_id, batches)


def applied(actions: list[Action]) -> list[int]:
    return [each.event_id for action in actions if isinstance(action, Apply) for each in action.events]


class Lab:
    def __init__(self, max_buffer_bytes: int = 1000) -> None:
        self.stats = IngestStats()
        self.feed = Feed(self.stats, max_buffer_bytes)

    def give(self, *inputs: Input) -> list[Action]:
        """The actions of the last."""
        actions: list[Action] = []
        for each in inputs:
            actions = self.feed.handle(each)
        return actions

    @property
    def now(self) -> tuple[FeedState, object]:
        return self.feed.state, self.feed.question


def following(next_id: int = 5, max_buffer_bytes: int = 1000) -> Lab:
    lab = Lab(max_buffer_bytes)
    lab.give(snapshot(next_id), AGREE)
    assert lab.now == (FeedState.EXACT, None)
    return lab


RECOVERING, EXACT, PARTIAL = FeedState.RECOVERING, FeedState.EXACT, FeedState.PARTIAL
SINCE_5 = KvEventsSince(EPOCH, 5)


def test_a_new_router_asks_for_all_and_goes_on_from_there() -> None:
    lab = Lab()
    assert lab.now == (RECOVERING, KvContents())
    assert lab.give(told(3), told(4), told(5), told(6, 7)) == []
    actions = lab.give(snapshot(5))
    assert actions[:2] == [Replace(NO_BLOCKS), Check(DIGESTS)]
    assert applied(actions) == [5, 6, 7], "and nothing that the snapshot has already"
    assert lab.give(AGREE) == []
    assert lab.now == (EXACT, None)
    assert applied(lab.give(told(8))) == [8]


def test_events_in_order_are_applied() -> None:
    lab = following()
    assert lab.give(told(5, 6)) == [Apply((event(5), event(6)))]
    assert lab.give(told(7)) == [Apply((event(7),))]
    assert lab.now == (EXACT, None)
    assert (lab.stats.num_events, lab.stats.num_gaps) == (3, 0)
    assert lab.give(Told(batch(), 1)) == []


def test_what_is_known_is_skipped() -> None:
    lab = following()
    lab.give(told(5, 6))
    assert lab.give(told(5, 6)) == []
    assert lab.give(told(0)) == []
    assert applied(lab.give(told(6, 7))) == [7], "half of it was known"
    assert lab.stats.num_duplicates == 2
    assert lab.now == (EXACT, None)


def test_a_gap_is_asked_for_and_what_came_after_it_follows() -> None:
    lab = following()
    assert lab.give(told(7), told(8)) == []
    assert lab.now == (RECOVERING, SINCE_5)
    assert lab.feed.num_behind == 4
    actions = lab.give(replayed(batch(5, 6), batch(7), next_id=8))
    assert applied(actions) == [5, 6, 7, 8]
    assert lab.now == (EXACT, None)
    assert lab.feed.num_behind == 0
    stats = lab.stats
    assert (stats.num_gaps, stats.num_replays, stats.num_replayed_events, stats.num_events) == (1, 1, 3, 4)


def test_a_replay_may_begin_before_what_was_asked_for() -> None:
    lab = following()
    lab.give(told(8))
    assert applied(lab.give(replayed(batch(3, 4), batch(4, 5, 6), batch(7), next_id=8))) == [5, 6, 7, 8]


def test_what_was_only_late_ends_the_gap() -> None:
    lab = following()
    lab.give(told(7), told(6))
    assert applied(lab.give(told(5))) == [5, 6, 7]
    assert lab.now == (EXACT, None)
    assert lab.give(replayed(batch(5), batch(6), next_id=7)) == [], "nobody waits for it any more"


def test_a_second_gap_is_asked_for_next() -> None:
    lab = following()
    lab.give(told(7), told(9))
    actions = lab.give(replayed(batch(5), batch(6), next_id=7))
    assert applied(actions) == [5, 6, 7]
    assert lab.now == (RECOVERING, KvEventsSince(EPOCH, 8))


@pytest.mark.parametrize(
    "answer",
    [
        Replayed(EPOCH, 9, is_gone=True),
        Replayed(EPOCH + 1, 3, (batch(0, 1, 2, epoch=EPOCH + 1),)),
        replayed(next_id=9),
        replayed(batch(6), next_id=7),
        replayed(batch(5, 9), next_id=7),
        replayed(batch(), next_id=7),
        Refused(),
    ],
    ids=["gone", "another epoch", "nothing", "not from there on", "no batch", "empty", "no such question"],
)
def test_without_a_usable_replay_all_is_asked_for(answer: Input) -> None:
    lab = following()
    lab.give(told(7))
    assert lab.give(answer) == [], "what is indexed stays"
    assert lab.now == (RECOVERING, KvContents())
    assert lab.give(told(8)) == []
    actions = lab.give(snapshot(8))
    assert actions[0] == Replace(NO_BLOCKS)
    assert applied(actions) == [8]


def test_a_replay_that_leaves_some_out_is_used_as_far_as_it_goes() -> None:
    lab = following()
    lab.give(told(9))
    assert applied(lab.give(replayed(batch(5), batch(7), next_id=8))) == [5]
    assert lab.now == (RECOVERING, KvContents())


def test_another_epoch_is_asked_for_whole() -> None:
    lab = following()
    assert lab.give(told(0, epoch=8), told(1, epoch=8)) == []
    assert lab.now == (RECOVERING, KvContents())
    assert lab.stats.num_epochs == 1
    assert applied(lab.give(snapshot(1, epoch=8))) == [1]
    lab.give(AGREE)
    assert lab.now == (EXACT, None)
    assert applied(lab.give(told(2, epoch=8))) == [2]


def test_what_was_kept_of_another_epoch_is_dropped() -> None:
    lab = following()
    lab.give(told(7), Replayed(EPOCH + 1, 3))
    assert applied(lab.give(snapshot(3, epoch=EPOCH + 1))) == []
    lab.give(AGREE)
    assert lab.now == (EXACT, None)
    lab = Lab()
    lab.give(told(7), told(1, epoch=8))
    assert applied(lab.give(snapshot(1, epoch=8))) == [1], "the newer epoch is kept"


def test_too_much_after_a_gap_is_given_up() -> None:
    lab = following(max_buffer_bytes=100)
    lab.give(*(told(each) for each in range(6, 16)))
    assert lab.now == (RECOVERING, SINCE_5)
    lab.give(told(16))
    assert lab.now == (RECOVERING, KvContents())
    assert lab.stats.num_overflows == 1
    lab.give(*(told(each) for each in range(17, 40)))
    actions = lab.give(snapshot(20))
    assert applied(actions) == [], "the oldest had to go"
    assert lab.now == (RECOVERING, KvEventsSince(EPOCH, 20))
    missing = [batch(each) for each in range(20, 40)]
    assert applied(lab.give(replayed(*missing, next_id=40))) == list(range(20, 40))


def test_the_same_batch_twice_is_kept_once() -> None:
    lab = following(max_buffer_bytes=20)
    lab.give(*[told(7)] * 5)
    assert lab.now == (RECOVERING, SINCE_5)


def test_a_quiet_worker_is_asked_and_stays_exact() -> None:
    lab = following()
    assert lab.give(Quiet()) == []
    assert lab.now == (EXACT, SINCE_5)
    assert lab.give(Replayed(EPOCH, 5, digests=DIGESTS)) == [Check(DIGESTS)]
    lab.give(AGREE)
    assert lab.now == (EXACT, None)
    lab.give(Quiet())
    assert applied(lab.give(replayed(batch(5), next_id=6))) == [5], "the last word was lost"
    assert lab.now == (EXACT, None)
    lab.give(Quiet())
    assert applied(lab.give(told(6))) == [6]
    assert lab.now == (EXACT, None), "an event in order answers it, too"


def test_a_quiet_worker_that_is_asked_already_is_not_asked_twice() -> None:
    lab = Lab()
    lab.give(Quiet())
    assert lab.now == (RECOVERING, KvContents())
    lab = following()
    lab.give(told(7), Quiet())
    assert lab.now == (RECOVERING, SINCE_5)


def test_a_doubt_asks_for_all_and_what_is_known_stays_until_it_is_there() -> None:
    lab = following()
    assert lab.give(Doubted()) == []
    assert lab.now == (RECOVERING, KvContents())
    lab.give(Doubted())
    assert applied(lab.give(told(5), snapshot(5))) == [5]
    lab.give(AGREE)
    assert lab.now == (EXACT, None)


def test_a_wrong_digest_asks_for_all() -> None:
    lab = following()
    assert lab.give(Told(batch(5, digests=DIGESTS), 1)) == [Apply((event(5),)), Check(DIGESTS)]
    lab.give(DIFFER)
    assert lab.now == (RECOVERING, KvContents())
    assert lab.stats.num_mismatches == 1
    assert lab.give(told(6)) == [], "kept, or the snapshot would put it back to before"
    assert applied(lab.give(snapshot(6))) == [6]
    lab.give(AGREE)
    assert lab.now == (EXACT, None)


def test_a_digest_that_a_snapshot_does_not_cure_is_not_asked_about_again() -> None:
    lab = following()
    lab.give(DIFFER, snapshot(5), DIFFER)
    assert lab.now == (PARTIAL, None)
    lab.give(told(5), DIFFER)
    assert lab.now == (PARTIAL, None)
    assert (lab.stats.num_mismatches, lab.stats.num_snapshots) == (3, 2)
    lab.give(AGREE, DIFFER)
    assert lab.now == (RECOVERING, KvContents())


def test_an_index_without_room_is_no_reason_to_ask() -> None:
    lab = following()
    lab.give(Compared(Comparison.CROWDED))
    assert lab.now == (PARTIAL, None)
    assert lab.stats.num_mismatches == 0
    lab.give(AGREE)
    assert lab.now == (EXACT, None)


def test_a_worker_that_cannot_tell_all_is_followed_from_now_on() -> None:
    lab = Lab()
    assert lab.give(Refused()) == [Clear()]
    assert lab.now == (PARTIAL, None)
    assert lab.give(Quiet()) == []
    assert lab.feed.question is None, "there is nothing to ask from"
    assert lab.give(Told(batch(40, digests=DIGESTS), 1)) == [Apply((event(40),))], "no digest can agree"
    assert applied(lab.give(told(41))) == [41]
    assert lab.now == (PARTIAL, None)
    lab.give(told(43))
    assert lab.now == (RECOVERING, KvEventsSince(EPOCH, 42))
    lab.give(Replayed(EPOCH, 43, is_gone=True))
    actions = lab.give(Refused())
    assert actions[0] == Clear(), "what was removed meanwhile is not known"
    assert applied(actions) == [43]
    assert lab.now == (PARTIAL, None)
    assert lab.stats.num_refused == 2


def test_answers_that_nobody_waits_for_change_nothing() -> None:
    lab = following()
    for answer in (snapshot(2), Refused(), replayed(batch(5), next_id=6)):
        assert lab.give(answer) == []
        assert lab.now == (EXACT, None)
    lab.give(told(5))
    assert lab.stats.num_events == 1


def test_a_batch_that_is_none_shows_as_a_gap() -> None:
    lab = following()
    two_epochs = KvEventBatch((event(5), event(6, epoch=8)))
    assert lab.give(told(5, 7)) == lab.give(Told(two_epochs, 1)) == []
    assert lab.stats.num_malformed == 2
    lab.give(told(8))
    assert lab.now == (RECOVERING, SINCE_5)
