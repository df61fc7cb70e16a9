"""A router's index and a worker's blocks agree at the end, whatever events are lost, repeated or late."""

from __future__ import annotations

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvolt.core.ids import InstanceId, SequenceHash
from kvolt.core.kv_events import (
    TIER_LEVEL,
    Cleared,
    KvChange,
    KvEventBatch,
    Removed,
    Stored,
    Tier,
)
from kvolt.core.kv_recovery import KvReplay, KvSnapshot, KvSnapshotPart
from kvolt.router.index.prefix_index import BlockIndex
from kvolt.router.ingest.feed import (
    ApplyEvents,
    BatchReceived,
    ClearContents,
    CompareDigests,
    DigestsCompared,
    EventFeed,
    FeedState,
    IngestStats,
    Input,
    QuietPeriod,
    ReplaceContents,
    ReplayReceived,
    SnapshotReceived,
)
from kvolt.router.ingest.slots import InstanceSlots
from kvolt.worker.kv.event_publisher import KvJournal
from kvolt.worker.kv.held_blocks import HeldBlocks

RANKS = (0, 1)
BUFFER_BYTES = 700

decode = msgspec.msgpack.Decoder(KvEventBatch).decode
tiers = st.sampled_from((Tier.DEVICE, Tier.DEVICE, Tier.HOST))
hashes = st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True).map(
    lambda found: tuple(map(SequenceHash, found))
)
changes = st.lists(
    st.one_of(
        st.builds(lambda found, tier: Stored.from_hashes(found, tier=tier), hashes, tiers),
        st.builds(Removed.from_hashes, hashes, tiers),
        st.builds(Cleared, st.sampled_from((None, Tier.DEVICE, Tier.HOST))),
    ),
    min_size=1,
    max_size=3,
).map(tuple)


class Ingesting(RuleBasedStateMachine):
    """One worker and one router; `way` is what is between them, `answer` what was asked and is on its way."""

    @initialize(history_bytes=st.sampled_from((0, 300, 100_000)))
    def start(self, history_bytes: int) -> None:
        self.history_bytes = history_bytes
        self.way: list[bytes] = []
        self.answer: Input | None = None
        self.epoch = 0
        self.stats = IngestStats()
        self.index = BlockIndex()
        self.slots = InstanceSlots(self.index, RANKS, self.stats)
        self.feed = EventFeed(self.stats, BUFFER_BYTES)
        self.restart()

    # --- the worker

    @rule()
    def restart(self) -> None:
        """With nothing in it, under the same name."""
        self.epoch += 1
        self.holdings = HeldBlocks()
        self.journal = KvJournal(
            self.epoch, InstanceId("w"), self.way.append, self.history_bytes, self.holdings
        )

    @rule(made=changes, dp_rank=st.sampled_from(RANKS))
    def step(self, made: tuple[KvChange, ...], dp_rank: int) -> None:
        self.journal.record(made, dp_rank)

    # --- the way

    @precondition(lambda self: self.way)
    @rule()
    def deliver(self) -> None:
        self.hear(self.way.pop(0))

    @precondition(lambda self: self.way)
    @rule(number=st.integers(0, 100))
    def deliver_any(self, number: int) -> None:
        self.hear(self.way.pop(number % len(self.way)))

    @precondition(lambda self: self.way)
    @rule(number=st.integers(0, 100))
    def deliver_a_copy(self, number: int) -> None:
        self.hear(self.way[number % len(self.way)])

    @precondition(lambda self: self.way)
    @rule()
    def lose(self) -> None:
        self.way.pop(0)

    @precondition(lambda self: self.answer is None and self.feed.recovery_request is not None)
    @rule()
    def ask(self) -> None:
        question = self.feed.recovery_request
        assert question is not None
        parts = list(self.journal.recover(question))
        head = parts[0]
        if isinstance(head, KvReplay):
            batches = [decode(each) for part in parts if isinstance(part, KvReplay) for each in part.batches]
            self.answer = ReplayReceived(head.epoch, head.next_id, batches, head.is_unavailable, head.digests)
            return
        assert isinstance(head, KvSnapshot)
        blocks: dict[tuple[int, Tier], bytes] = {}
        for part in parts[1:]:
            assert isinstance(part, KvSnapshotPart)
            blocks[part.dp_rank, part.tier] = part.hashes
        self.answer = SnapshotReceived(head.epoch, head.next_id, blocks, head.digests)

    @precondition(lambda self: self.answer is not None)
    @rule()
    def be_answered(self) -> None:
        answer, self.answer = self.answer, None
        assert answer is not None
        self.hand(answer)

    @precondition(lambda self: self.answer is not None)
    @rule()
    def lose_the_answer(self) -> None:
        self.answer = None

    @rule()
    def be_quiet(self) -> None:
        self.hand(QuietPeriod())

    # --- the router

    def hear(self, payload: bytes) -> None:
        self.hand(BatchReceived(decode(payload), len(payload)))

    def hand(self, event: Input) -> None:
        for action in self.feed.handle(event):
            match action:
                case ApplyEvents(events):
                    self.slots.apply(events)
                case ReplaceContents(blocks):
                    self.slots.replace(blocks)
                case ClearContents():
                    self.slots.clear()
                case CompareDigests(digests):
                    self.feed.handle(DigestsCompared(self.slots.compare(digests)))

    @invariant()
    def what_is_kept_is_bounded(self) -> None:
        assert self.feed._buffer.num_bytes <= BUFFER_BYTES
        assert (self.feed.state is FeedState.RECOVERING) <= (self.feed.recovery_request is not None)

    def teardown(self) -> None:
        if not hasattr(self, "feed"):
            return
        while self.way:
            self.deliver()
        for _ in range(10):
            self.hand(QuietPeriod())
            while self.feed.recovery_request is not None:
                self.answer = None
                self.ask()
                self.be_answered()
        assert self.feed.state is FeedState.EXACT
        assert self.feed.num_unapplied == 0
        held = {(rank, tier): set(blocks) for rank, tier, blocks in self.holdings.contents()}
        for rank in RANKS:
            slot = self.slots.slot_of(rank)
            assert slot is not None
            for tier, level in TIER_LEVEL.items():
                assert set(self.index.contents(slot, level)) == held.get((rank, tier), set())


TestIngesting = Ingesting.TestCase
