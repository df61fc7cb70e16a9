"""EventFeed: events in order despite loss; each transition by its inputs and actions."""

from __future__ import annotations

import pytest

from kvolt.core.kv_events import KvDigest, KvEvent, KvEventBatch, Stored, Tier
from kvolt.core.kv_recovery import KvContents, KvEventsSince
from kvolt.router.ingest.feed import (
    Action,
    ApplyEvents,
    BatchReceived,
    ClearContents,
    CompareDigests,
    Comparison,
    DigestsCompared,
    EventFeed,
    FeedState,
    IngestStats,
    Input,
    QuietPeriod,
    RecoveryRefused,
    ReplaceContents,
    ReplayReceived,
    ResyncRequested,
    SnapshotReceived,
)

EPOCH = 7
DIGESTS = (KvDigest(1, 2),)
AGREE, DIFFER = DigestsCompared(Comparison.AGREE), DigestsCompared(Comparison.DIFFER)
NO_BLOCKS: dict[tuple[int, Tier], bytes] = {}


def event(event_id: int, epoch: int = EPOCH) -> KvEvent:
    return KvEvent(event_id, epoch, Stored.from_hashes([event_id]))


def batch(*ids: int, epoch: int = EPOCH, digests: tuple[KvDigest, ...] = ()) -> KvEventBatch:
    return KvEventBatch(tuple(event(each, epoch) for each in ids), digests=digests)


def received_batch(*ids: int, epoch: int = EPOCH, num_bytes: int = 10) -> BatchReceived:
    return BatchReceived(batch(*ids, epoch=epoch), num_bytes)


def snapshot(next_id: int = 0, epoch: int = EPOCH) -> SnapshotReceived:
    return SnapshotReceived(epoch, next_id, NO_BLOCKS, DIGESTS)


def replayed(*batches: KvEventBatch, next_id: int, epoch: int = EPOCH) -> ReplayReceived:
    return ReplayReceived(epoch, next_id, batches)


def applied(actions: list[Action]) -> list[int]:
    return [each.event_id for action in actions if isinstance(action, ApplyEvents) for each in action.events]


class Lab:
    def __init__(self, max_buffer_bytes: int = 1000) -> None:
        self.stats = IngestStats()
        self.feed = EventFeed(self.stats, max_buffer_bytes)

    def give(self, *inputs: Input) -> list[Action]:
        """The actions of the last."""
        actions: list[Action] = []
        for each in inputs:
            actions = self.feed.handle(each)
        return actions

    @property
    def now(self) -> tuple[FeedState, object]:
        return self.feed.state, self.feed.recovery_request


def following(next_id: int = 5, max_buffer_bytes: int = 1000) -> Lab:
    lab = Lab(max_buffer_bytes)
    lab.give(snapshot(next_id), AGREE)
    assert lab.now == (FeedState.EXACT, None)
    return lab


RECOVERING, EXACT, PARTIAL = FeedState.RECOVERING, FeedState.EXACT, FeedState.PARTIAL
SINCE_5 = KvEventsSince(EPOCH, 5)


def test_a_new_feed_requests_a_snapshot_and_continues_from_it() -> None:
    lab = Lab()
    assert lab.now == (RECOVERING, KvContents())
    assert lab.give(received_batch(3), received_batch(4), received_batch(5), received_batch(6, 7)) == []
    actions = lab.give(snapshot(5))
    assert actions[:2] == [ReplaceContents(NO_BLOCKS), CompareDigests(DIGESTS)]
    assert applied(actions) == [5, 6, 7], "and nothing that the snapshot has already"
    assert lab.give(AGREE) == []
    assert lab.now == (EXACT, None)
    assert applied(lab.give(received_batch(8))) == [8]


def test_events_in_order_are_applied() -> None:
    lab = following()
    assert lab.give(received_batch(5, 6)) == [ApplyEvents((event(5), event(6)))]
    assert lab.give(received_batch(7)) == [ApplyEvents((event(7),))]
    assert lab.now == (EXACT, None)
    assert (lab.stats.num_events, lab.stats.num_gaps) == (3, 0)
    assert lab.give(BatchReceived(batch(), 1)) == []


def test_known_events_are_skipped() -> None:
    lab = following()
    lab.give(received_batch(5, 6))
    assert lab.give(received_batch(5, 6)) == []
    assert lab.give(received_batch(0)) == []
    assert applied(lab.give(received_batch(6, 7))) == [7], "half of it was known"
    assert lab.stats.num_duplicates == 2
    assert lab.now == (EXACT, None)


def test_a_gap_is_recovered_and_buffered_events_follow() -> None:
    lab = following()
    assert lab.give(received_batch(7), received_batch(8)) == []
    assert lab.now == (RECOVERING, SINCE_5)
    assert lab.feed.num_unapplied == 4
    actions = lab.give(replayed(batch(5, 6), batch(7), next_id=8))
    assert applied(actions) == [5, 6, 7, 8]
    assert lab.now == (EXACT, None)
    assert lab.feed.num_unapplied == 0
    stats = lab.stats
    assert (stats.num_gaps, stats.num_replays, stats.num_replayed_events, stats.num_events) == (1, 1, 3, 4)


def test_a_replay_may_start_before_the_requested_event() -> None:
    lab = following()
    lab.give(received_batch(8))
    assert applied(lab.give(replayed(batch(3, 4), batch(4, 5, 6), batch(7), next_id=8))) == [5, 6, 7, 8]


def test_what_was_only_late_ends_the_gap() -> None:
    lab = following()
    lab.give(received_batch(7), received_batch(6))
    assert applied(lab.give(received_batch(5))) == [5, 6, 7]
    assert lab.now == (EXACT, None)
    assert lab.give(replayed(batch(5), batch(6), next_id=7)) == [], "it is not awaited any more"


def test_a_second_gap_is_recovered_next() -> None:
    lab = following()
    lab.give(received_batch(7), received_batch(9))
    actions = lab.give(replayed(batch(5), batch(6), next_id=7))
    assert applied(actions) == [5, 6, 7]
    assert lab.now == (RECOVERING, KvEventsSince(EPOCH, 8))


@pytest.mark.parametrize(
    "answer",
    [
        ReplayReceived(EPOCH, 9, is_unavailable=True),
        ReplayReceived(EPOCH + 1, 3, (batch(0, 1, 2, epoch=EPOCH + 1),)),
        replayed(next_id=9),
        replayed(batch(6), next_id=7),
        replayed(batch(5, 9), next_id=7),
        replayed(batch(), next_id=7),
        RecoveryRefused(),
    ],
    ids=["gone", "another epoch", "nothing", "not from there on", "no batch", "empty", "no such question"],
)
def test_without_a_usable_replay_a_snapshot_is_requested(answer: Input) -> None:
    lab = following()
    lab.give(received_batch(7))
    assert lab.give(answer) == [], "what is indexed stays"
    assert lab.now == (RECOVERING, KvContents())
    assert lab.give(received_batch(8)) == []
    actions = lab.give(snapshot(8))
    assert actions[0] == ReplaceContents(NO_BLOCKS)
    assert applied(actions) == [8]


def test_an_incomplete_replay_is_applied_partly() -> None:
    lab = following()
    lab.give(received_batch(9))
    assert applied(lab.give(replayed(batch(5), batch(7), next_id=8))) == [5]
    assert lab.now == (RECOVERING, KvContents())


def test_another_epoch_requests_a_snapshot() -> None:
    lab = following()
    assert lab.give(received_batch(0, epoch=8), received_batch(1, epoch=8)) == []
    assert lab.now == (RECOVERING, KvContents())
    assert lab.stats.num_epochs == 1
    assert applied(lab.give(snapshot(1, epoch=8))) == [1]
    lab.give(AGREE)
    assert lab.now == (EXACT, None)
    assert applied(lab.give(received_batch(2, epoch=8))) == [2]


def test_what_was_kept_of_another_epoch_is_dropped() -> None:
    lab = following()
    lab.give(received_batch(7), ReplayReceived(EPOCH + 1, 3))
    assert applied(lab.give(snapshot(3, epoch=EPOCH + 1))) == []
    lab.give(AGREE)
    assert lab.now == (EXACT, None)
    lab = Lab()
    lab.give(received_batch(7), received_batch(1, epoch=8))
    assert applied(lab.give(snapshot(1, epoch=8))) == [1], "the newer epoch is kept"


def test_a_full_buffer_requests_a_snapshot() -> None:
    lab = following(max_buffer_bytes=100)
    lab.give(*(received_batch(each) for each in range(6, 16)))
    assert lab.now == (RECOVERING, SINCE_5)
    lab.give(received_batch(16))
    assert lab.now == (RECOVERING, KvContents())
    assert lab.stats.num_overflows == 1
    lab.give(*(received_batch(each) for each in range(17, 40)))
    actions = lab.give(snapshot(20))
    assert applied(actions) == [], "the oldest had to go"
    assert lab.now == (RECOVERING, KvEventsSince(EPOCH, 20))
    missing = [batch(each) for each in range(20, 40)]
    assert applied(lab.give(replayed(*missing, next_id=40))) == list(range(20, 40))


def test_the_same_batch_twice_is_kept_once() -> None:
    lab = following(max_buffer_bytes=20)
    lab.give(*[received_batch(7)] * 5)
    assert lab.now == (RECOVERING, SINCE_5)


def test_a_quiet_worker_is_polled_and_stays_exact() -> None:
    lab = following()
    assert lab.give(QuietPeriod()) == []
    assert lab.now == (EXACT, SINCE_5)
    assert lab.give(ReplayReceived(EPOCH, 5, digests=DIGESTS)) == [CompareDigests(DIGESTS)]
    lab.give(AGREE)
    assert lab.now == (EXACT, None)
    lab.give(QuietPeriod())
    assert applied(lab.give(replayed(batch(5), next_id=6))) == [5], "the last word was lost"
    assert lab.now == (EXACT, None)
    lab.give(QuietPeriod())
    assert applied(lab.give(received_batch(6))) == [6]
    assert lab.now == (EXACT, None), "an event in order answers it, too"


def test_a_recovering_worker_is_not_polled() -> None:
    lab = Lab()
    lab.give(QuietPeriod())
    assert lab.now == (RECOVERING, KvContents())
    lab = following()
    lab.give(received_batch(7), QuietPeriod())
    assert lab.now == (RECOVERING, SINCE_5)


def test_a_resync_keeps_the_index_until_the_snapshot() -> None:
    lab = following()
    assert lab.give(ResyncRequested()) == []
    assert lab.now == (RECOVERING, KvContents())
    lab.give(ResyncRequested())
    assert applied(lab.give(received_batch(5), snapshot(5))) == [5]
    lab.give(AGREE)
    assert lab.now == (EXACT, None)


def test_a_wrong_digest_requests_a_snapshot() -> None:
    lab = following()
    assert lab.give(BatchReceived(batch(5, digests=DIGESTS), 1)) == [
        ApplyEvents((event(5),)),
        CompareDigests(DIGESTS),
    ]
    lab.give(DIFFER)
    assert lab.now == (RECOVERING, KvContents())
    assert lab.stats.num_mismatches == 1
    assert lab.give(received_batch(6)) == [], "kept, or the snapshot would put it back to before"
    assert applied(lab.give(snapshot(6))) == [6]
    lab.give(AGREE)
    assert lab.now == (EXACT, None)


def test_a_persistently_wrong_digest_requests_one_snapshot() -> None:
    lab = following()
    lab.give(DIFFER, snapshot(5), DIFFER)
    assert lab.now == (PARTIAL, None)
    lab.give(received_batch(5), DIFFER)
    assert lab.now == (PARTIAL, None)
    assert (lab.stats.num_mismatches, lab.stats.num_snapshots) == (3, 2)
    lab.give(AGREE, DIFFER)
    assert lab.now == (RECOVERING, KvContents())


def test_a_crowded_index_requests_no_snapshot() -> None:
    lab = following()
    lab.give(DigestsCompared(Comparison.CROWDED))
    assert lab.now == (PARTIAL, None)
    assert lab.stats.num_mismatches == 0
    lab.give(AGREE)
    assert lab.now == (EXACT, None)


def test_without_snapshots_only_new_blocks_are_indexed() -> None:
    lab = Lab()
    assert lab.give(RecoveryRefused()) == [ClearContents()]
    assert lab.now == (PARTIAL, None)
    assert lab.give(QuietPeriod()) == []
    assert lab.feed.recovery_request is None, "there is nothing to ask from"
    assert lab.give(BatchReceived(batch(40, digests=DIGESTS), 1)) == [ApplyEvents((event(40),))], (
        "no digest can agree"
    )
    assert applied(lab.give(received_batch(41))) == [41]
    assert lab.now == (PARTIAL, None)
    lab.give(received_batch(43))
    assert lab.now == (RECOVERING, KvEventsSince(EPOCH, 42))
    lab.give(ReplayReceived(EPOCH, 43, is_unavailable=True))
    actions = lab.give(RecoveryRefused())
    assert actions[0] == ClearContents(), "removals in between are unknown"
    assert applied(actions) == [43]
    assert lab.now == (PARTIAL, None)
    assert lab.stats.num_refused == 2


def test_unexpected_responses_are_ignored() -> None:
    lab = following()
    for answer in (snapshot(2), RecoveryRefused(), replayed(batch(5), next_id=6)):
        assert lab.give(answer) == []
        assert lab.now == (EXACT, None)
    lab.give(received_batch(5))
    assert lab.stats.num_events == 1


def test_a_batch_that_is_none_shows_as_a_gap() -> None:
    lab = following()
    two_epochs = KvEventBatch((event(5), event(6, epoch=8)))
    assert lab.give(received_batch(5, 7)) == lab.give(BatchReceived(two_epochs, 1)) == []
    assert lab.stats.num_malformed == 2
    lab.give(received_batch(8))
    assert lab.now == (RECOVERING, SINCE_5)
