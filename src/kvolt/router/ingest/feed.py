"""EventFeed: state machine that orders one worker's KV events and recovers lost ones. Pure: inputs in,
actions out.

    events in order                     -> ApplyEvents
    gap                                 -> buffer events, request the missing ones; then ApplyEvents
    events no longer kept, new epoch, buffer overflow, wrong digest, resync
                                        -> buffer events, request a snapshot; then ReplaceContents, ApplyEvents
    worker cannot send a snapshot       -> ClearContents, then apply new events only

The index stays in use during recovery. `recovery_request` is the request to send now; the driver sends it until it is
None. A late response is applied as far as it is new.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from kvolt.core.kv_events import KvDigest, KvEvent, KvEventBatch, Tier
from kvolt.core.kv_recovery import KvContents, KvEventsSince, KvRecoveryRequest

BUFFER_BYTES = 1024 * 1024


class FeedState(StrEnum):
    """How well the index matches what a worker holds."""

    EXACT = "exact"
    """Matches, except for events in transit."""
    RECOVERING = "recovering"
    """Out of date: events were lost and are being recovered."""
    PARTIAL = "partial"
    """Incomplete: the worker cannot list all blocks, or the index has no room for them."""
    NO_EVENTS = "no_events"
    """Nothing."""


# --- inputs


@dataclass(frozen=True, slots=True)
class BatchReceived:
    """A batch from the event plane, with its encoded size."""

    batch: KvEventBatch
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReplayReceived:
    """Response to KvEventsSince."""

    epoch: int
    next_id: int
    batches: Sequence[KvEventBatch] = ()
    is_unavailable: bool = False
    digests: tuple[KvDigest, ...] = ()


@dataclass(frozen=True, slots=True)
class SnapshotReceived:
    """Response to KvContents."""

    epoch: int
    next_id: int
    blocks: Mapping[tuple[int, Tier], bytes]
    """Packed hashes by rank and tier."""
    digests: tuple[KvDigest, ...] = ()


@dataclass(frozen=True, slots=True)
class RecoveryRefused:
    """The worker does not support the request."""


@dataclass(frozen=True, slots=True)
class QuietPeriod:
    """No event arrived for a while: the last ones may be lost without a later one that reveals it."""


@dataclass(frozen=True, slots=True)
class ResyncRequested:
    """The index disagrees with the worker's reports: request a snapshot."""


class Comparison(Enum):
    """Result of CompareDigests."""

    AGREE = auto()
    DIFFER = auto()
    CROWDED = auto()
    """The index evicted blocks of the worker, so that a difference proves nothing."""


@dataclass(frozen=True, slots=True)
class DigestsCompared:
    """CompareDigests is done."""

    comparison: Comparison


Response = ReplayReceived | SnapshotReceived | RecoveryRefused
Input = BatchReceived | Response | QuietPeriod | ResyncRequested | DigestsCompared


# --- actions


@dataclass(frozen=True, slots=True)
class ApplyEvents:
    """Apply these events to the index."""

    events: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True)
class ReplaceContents:
    """Replace all blocks of the worker in the index, atomically."""

    blocks: Mapping[tuple[int, Tier], bytes]


@dataclass(frozen=True, slots=True)
class ClearContents:
    """Remove all blocks of the worker from the index."""


@dataclass(frozen=True, slots=True)
class CompareDigests:
    """Compare the index with the worker's digests; answer with DigestsCompared."""

    digests: tuple[KvDigest, ...]


Action = ApplyEvents | ReplaceContents | ClearContents | CompareDigests


@dataclass(slots=True)
class IngestStats:
    """Event counters over all workers, for metrics."""

    num_events: int = 0
    """Applied events, from batches and replays."""
    has_lower_tiers: bool = False
    """Whether any worker has published blocks below its device tier."""
    num_duplicates: int = 0
    """Batches without new events."""
    num_gaps: int = 0
    num_epochs: int = 0
    """Workers that restarted their event numbering."""
    num_overflows: int = 0
    """Gaps abandoned because the buffer was full."""
    num_replays: int = 0
    num_replayed_events: int = 0
    num_snapshots: int = 0
    num_mismatches: int = 0
    """Digests that differ from the index."""
    num_refused: int = 0
    """Snapshots that a worker does not support."""
    num_failures: int = 0
    """Recovery requests that failed and were retried."""
    num_malformed: int = 0
    """Messages that cannot be decoded."""
    num_unknown_ranks: int = 0
    """Events of ranks that the worker has not registered."""


class _Missing(Enum):
    NOTHING = auto()
    EVENTS = auto()
    CONTENTS = auto()


@dataclass(slots=True)
class _ReorderBuffer:
    """Batches of one epoch that cannot be applied yet, in order. When full, drops the oldest."""

    max_bytes: int
    num_bytes: int = 0
    epoch: int | None = None
    newest_id: int = 0
    _by_first_id: dict[int, BatchReceived] = field(default_factory=dict)
    _order: list[int] = field(default_factory=list)
    """Heap of first event ids."""

    def __len__(self) -> int:
        return len(self._order)

    @property
    def first_id(self) -> int:
        return self._order[0]

    def add(self, received: BatchReceived) -> bool:
        """Add a batch; return whether the buffer had room without dropping any."""
        first, last = received.batch.events[0], received.batch.events[-1]
        if first.epoch != self.epoch:
            self.clear()
            self.epoch = first.epoch
        if first.event_id in self._by_first_id:
            return True
        self._by_first_id[first.event_id] = received
        heapq.heappush(self._order, first.event_id)
        self.newest_id = max(self.newest_id, last.event_id)
        self.num_bytes += received.num_bytes
        fits = self.num_bytes <= self.max_bytes
        while self.num_bytes > self.max_bytes:
            self._pop()
        return fits

    def pop_contiguous(self, next_id: int) -> KvEventBatch | None:
        """Remove and return the first batch; None if there is a gap before it."""
        return self._pop() if self._order and self._order[0] <= next_id else None

    def clear(self) -> None:
        self._by_first_id.clear()
        self._order.clear()
        self.num_bytes = self.newest_id = 0

    def _pop(self) -> KvEventBatch:
        received = self._by_first_id.pop(heapq.heappop(self._order))
        self.num_bytes -= received.num_bytes
        return received.batch


class EventFeed:
    """See the module. Starts with a request for a snapshot."""

    def __init__(self, stats: IngestStats, max_buffer_bytes: int = BUFFER_BYTES) -> None:
        self._stats = stats
        self._missing = _Missing.CONTENTS
        self._epoch: int | None = None
        self._next_id = 0
        self._buffer = _ReorderBuffer(max_buffer_bytes)
        self._agrees = False
        """The latest digest matched. If none has matched since the latest snapshot, another snapshot would not help."""
        self._can_snapshot = True

    @property
    def state(self) -> FeedState:
        if self._missing is _Missing.CONTENTS or self._buffer:
            return FeedState.RECOVERING
        return FeedState.EXACT if self._agrees else FeedState.PARTIAL

    @property
    def recovery_request(self) -> KvRecoveryRequest | None:
        if self._missing is _Missing.EVENTS and self._epoch is not None:
            return KvEventsSince(self._epoch, self._next_id)
        return KvContents() if self._missing is _Missing.CONTENTS else None

    @property
    def num_unapplied(self) -> int:
        """Events between the last applied one and the newest received."""
        is_known = bool(self._buffer) and self._buffer.epoch == self._epoch
        return self._buffer.newest_id + 1 - self._next_id if is_known else 0

    def handle(self, event: Input) -> list[Action]:
        match event:
            case BatchReceived():
                return self._on_batch(event)
            case ReplayReceived():
                return self._on_replay(event)
            case SnapshotReceived():
                return self._on_snapshot(event)
            case RecoveryRefused():
                return self._on_refused()
            case DigestsCompared(comparison):
                self._on_compared(comparison)
            case QuietPeriod():
                if self._missing is _Missing.NOTHING and self._epoch is not None:
                    self._missing = _Missing.EVENTS
            case ResyncRequested():
                self._missing = _Missing.CONTENTS
        return []

    # --- batches

    def _on_batch(self, received: BatchReceived) -> list[Action]:
        events = received.batch.events
        if not events:
            return []
        if not _is_whole(events):
            self._stats.num_malformed += 1  # leaves a gap, which the next batch reveals
            return []
        if self._missing is _Missing.CONTENTS:
            self._buffer.add(received)
            return []
        epoch, first_id = events[0].epoch, events[0].event_id
        if self._epoch is None:
            self._epoch, self._next_id = epoch, first_id
        if epoch != self._epoch:
            self._stats.num_epochs += 1
            self._missing = _Missing.CONTENTS
            self._buffer.add(received)
            return []
        if first_id > self._next_id:
            self._buffer_batch(received)
            return []
        if events[-1].event_id < self._next_id:
            self._stats.num_duplicates += 1
            return []
        return [*self._apply_new(received.batch), *self._apply_buffered()]

    def _buffer_batch(self, received: BatchReceived) -> None:
        if not self._buffer:
            self._stats.num_gaps += 1
        self._missing = _Missing.EVENTS
        if not self._buffer.add(received):
            self._stats.num_overflows += 1
            self._missing = _Missing.CONTENTS

    def _apply_new(self, batch: KvEventBatch) -> list[Action]:
        """Apply the new events of a batch that starts at or before the next id."""
        new = batch.events[max(self._next_id - batch.events[0].event_id, 0) :]
        if not new:
            return []
        self._next_id = new[-1].event_id + 1
        self._stats.num_events += len(new)
        return [ApplyEvents(new), *self._compare(batch.digests)]

    def _apply_buffered(self) -> list[Action]:
        """Apply buffered batches up to the next gap."""
        actions: list[Action] = []
        while (batch := self._buffer.pop_contiguous(self._next_id)) is not None:
            actions += self._apply_new(batch)
        self._missing = _Missing.EVENTS if self._buffer else _Missing.NOTHING
        return actions

    # --- responses

    def _on_replay(self, replay: ReplayReceived) -> list[Action]:
        if self._missing is not _Missing.EVENTS:
            return []  # the events have arrived otherwise
        if replay.is_unavailable or replay.epoch != self._epoch:
            self._stats.num_epochs += replay.epoch != self._epoch
            self._missing = _Missing.CONTENTS
            return []
        self._stats.num_replays += 1
        actions: list[Action] = []
        before = self._next_id
        for batch in replay.batches:
            if batch.events and _is_whole(batch.events) and batch.events[0].event_id <= self._next_id:
                actions += self._apply_new(batch)
        self._stats.num_replayed_events += self._next_id - before
        if self._next_id < replay.next_id:
            self._missing = _Missing.CONTENTS  # the worker cannot replay all of them
            return actions
        if self._next_id == replay.next_id:
            actions += self._compare(replay.digests)
        return [*actions, *self._apply_buffered()]

    def _on_snapshot(self, snapshot: SnapshotReceived) -> list[Action]:
        if self._missing is not _Missing.CONTENTS:
            return []
        self._stats.num_snapshots += 1
        self._epoch, self._next_id = snapshot.epoch, snapshot.next_id
        self._can_snapshot = True
        self._agrees = False
        if self._buffer.epoch != self._epoch:
            self._buffer.clear()
        return [ReplaceContents(snapshot.blocks), CompareDigests(snapshot.digests), *self._apply_buffered()]

    def _on_refused(self) -> list[Action]:
        if self._missing is _Missing.EVENTS:
            self._missing = _Missing.CONTENTS
            return []
        if self._missing is _Missing.NOTHING:
            return []
        self._stats.num_refused += 1
        self._can_snapshot = self._agrees = False
        # Index blocks that are stored from here on; blocks stored before are unknown.
        self._epoch = None
        if self._buffer:
            self._epoch, self._next_id = self._buffer.epoch, self._buffer.first_id
        return [ClearContents(), *self._apply_buffered()]

    # --- digests

    def _compare(self, digests: tuple[KvDigest, ...]) -> list[Action]:
        return [CompareDigests(digests)] if digests and self._can_snapshot else []

    def _on_compared(self, comparison: Comparison) -> None:
        agreed, self._agrees = self._agrees, comparison is Comparison.AGREE
        if comparison is Comparison.DIFFER:
            self._stats.num_mismatches += 1
            if agreed:
                self._missing = _Missing.CONTENTS


def _is_whole(events: Sequence[KvEvent]) -> bool:
    """Whether the events can be one batch: one epoch, consecutive ids."""
    first, last = events[0], events[-1]
    return last.epoch == first.epoch and last.event_id - first.event_id == len(events) - 1
