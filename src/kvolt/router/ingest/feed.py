"""Feed: one worker's KV events in their order, whatever was lost on the way. Pure: inputs in, actions out.

    events in order ------------------------------> Apply
    a gap       -> keep what comes, ask for the events since        -> Apply, then what was kept
    they are gone, another epoch, too much kept, a wrong digest, a doubt
                -> keep what comes, ask for all that is held        -> Replace, then what was kept
    it cannot say what it holds -> Clear, and on from what comes next

Meanwhile what is indexed stays in use. `question` is what the worker is to be asked now; whoever drives this asks it
until there is none. An answer may come late: what it says beyond what is known counts, the rest is known already.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto

from kvolt.core.kv_events import KvDigest, KvEvent, KvEventBatch, Tier
from kvolt.core.kv_recovery import KvContents, KvEventsSince, KvQuestion

BUFFER_BYTES = 1024 * 1024


class FeedState(StrEnum):
    """What the index says of a worker."""

    EXACT = "exact"
    """What it holds, but for events on their way."""
    RECOVERING = "recovering"
    """What it held: something was lost, and is asked for."""
    PARTIAL = "partial"
    """A part of what it holds: it cannot tell all of it, or there is no room for it."""
    NO_EVENTS = "no_events"
    """Nothing."""


# --- inputs


@dataclass(frozen=True, slots=True)
class Told:
    """A batch of the event plane, with its size on the way."""

    batch: KvEventBatch
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """The answer to KvEventsSince."""

    epoch: int
    next_id: int
    batches: Sequence[KvEventBatch] = ()
    is_gone: bool = False
    digests: tuple[KvDigest, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshotted:
    """The answer to KvContents."""

    epoch: int
    next_id: int
    blocks: Mapping[tuple[int, Tier], bytes]
    """By rank and tier, packed as they travel."""
    digests: tuple[KvDigest, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """The worker has no answer to such a question, now or ever."""


@dataclass(frozen=True, slots=True)
class Quiet:
    """Nothing was heard of it for a while: the last events may be lost with none after them to show it."""


@dataclass(frozen=True, slots=True)
class Doubted:
    """What the index says of the worker is not what it reports: it is to be asked for all that it holds."""


class Comparison(Enum):
    """What a Check showed."""

    AGREE = auto()
    DIFFER = auto()
    CROWDED = auto()
    """The index has no room for all of it: that they differ says nothing."""


@dataclass(frozen=True, slots=True)
class Compared:
    """How a Check ended."""

    comparison: Comparison


Input = Told | Replayed | Snapshotted | Refused | Quiet | Doubted | Compared


# --- actions


@dataclass(frozen=True, slots=True)
class Apply:
    """Bring the index from one event to a later one."""

    events: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True)
class Replace:
    """The index is to say this of the worker and nothing else, from one moment to the next."""

    blocks: Mapping[tuple[int, Tier], bytes]


@dataclass(frozen=True, slots=True)
class Clear:
    """Nothing is known of the worker any more."""


@dataclass(frozen=True, slots=True)
class Check:
    """Hold the index against the worker's own count, and hand back Compared."""

    digests: tuple[KvDigest, ...]


Action = Apply | Replace | Clear | Check


@dataclass(slots=True)
class IngestStats:
    """What happened to the events of all workers, for metrics."""

    num_events: int = 0
    """Applied, wherever they came from."""
    tells_below: bool = False
    """Whether any worker has told of blocks below its device."""
    num_duplicates: int = 0
    """Batches that said nothing new."""
    num_gaps: int = 0
    num_epochs: int = 0
    """Workers seen to have started anew under the same name."""
    num_overflows: int = 0
    """Gaps given up because too much came after them."""
    num_replays: int = 0
    num_replayed_events: int = 0
    num_snapshots: int = 0
    num_mismatches: int = 0
    """Digests that did not agree."""
    num_refused: int = 0
    """Questions that a worker had no answer to."""
    num_failures: int = 0
    """Questions that got no answer and were asked again."""
    num_malformed: int = 0
    """Messages that could not be read."""
    num_unknown_ranks: int = 0
    """Events of ranks that the worker did not register."""


class _Want(Enum):
    NOTHING = auto()
    EVENTS = auto()
    CONTENTS = auto()


@dataclass(slots=True)
class _Kept:
    """Batches of one epoch that cannot be applied yet, first events first. The oldest go when it is full."""

    max_bytes: int
    num_bytes: int = 0
    epoch: int | None = None
    newest_id: int = 0
    _by_first: dict[int, Told] = field(default_factory=dict)
    _order: list[int] = field(default_factory=list)
    """The first events, as a heap."""

    def __len__(self) -> int:
        return len(self._order)

    @property
    def first_id(self) -> int:
        return self._order[0]

    def add(self, told: Told) -> bool:
        """Whether there was room for all."""
        first, last = told.batch.events[0], told.batch.events[-1]
        if first.epoch != self.epoch:
            self.clear()
            self.epoch = first.epoch
        if first.event_id in self._by_first:
            return True
        self._by_first[first.event_id] = told
        heapq.heappush(self._order, first.event_id)
        self.newest_id = max(self.newest_id, last.event_id)
        self.num_bytes += told.num_bytes
        fits = self.num_bytes <= self.max_bytes
        while self.num_bytes > self.max_bytes:
            self._pop()
        return fits

    def pop_up_to(self, next_id: int) -> KvEventBatch | None:
        """The first batch, unless there is a gap before it."""
        return self._pop() if self._order and self._order[0] <= next_id else None

    def clear(self) -> None:
        self._by_first.clear()
        self._order.clear()
        self.num_bytes = self.newest_id = 0

    def _pop(self) -> KvEventBatch:
        told = self._by_first.pop(heapq.heappop(self._order))
        self.num_bytes -= told.num_bytes
        return told.batch


class Feed:
    """See the module. A new one asks for all that the worker holds."""

    def __init__(self, stats: IngestStats, max_buffer_bytes: int = BUFFER_BYTES) -> None:
        self._stats = stats
        self._want = _Want.CONTENTS
        self._epoch: int | None = None
        self._next_id = 0
        self._kept = _Kept(max_buffer_bytes)
        self._agrees = False
        """The latest digest did. One that never did since the latest snapshot is not cured by another."""
        self._can_tell_all = True

    @property
    def state(self) -> FeedState:
        if self._want is _Want.CONTENTS or self._kept:
            return FeedState.RECOVERING
        return FeedState.EXACT if self._agrees else FeedState.PARTIAL

    @property
    def question(self) -> KvQuestion | None:
        if self._want is _Want.EVENTS and self._epoch is not None:
            return KvEventsSince(self._epoch, self._next_id)
        return KvContents() if self._want is _Want.CONTENTS else None

    @property
    def num_behind(self) -> int:
        """Events between what is applied and the newest that was heard of."""
        is_known = bool(self._kept) and self._kept.epoch == self._epoch
        return self._kept.newest_id + 1 - self._next_id if is_known else 0

    def handle(self, event: Input) -> list[Action]:
        match event:
            case Told():
                return self._on_told(event)
            case Replayed():
                return self._on_replayed(event)
            case Snapshotted():
                return self._on_snapshotted(event)
            case Refused():
                return self._on_refused()
            case Compared(comparison):
                self._on_compared(comparison)
            case Quiet():
                if self._want is _Want.NOTHING and self._epoch is not None:
                    self._want = _Want.EVENTS
            case Doubted():
                self._want = _Want.CONTENTS
        return []

    # --- what is told

    def _on_told(self, told: Told) -> list[Action]:
        events = told.batch.events
        if not events:
            return []
        if not _is_whole(events):
            self._stats.num_malformed += 1  # and so a gap, which shows by the next one
            return []
        if self._want is _Want.CONTENTS:
            self._kept.add(told)
            return []
        epoch, first_id = events[0].epoch, events[0].event_id
        if self._epoch is None:
            self._epoch, self._next_id = epoch, first_id
        if epoch != self._epoch:
            self._stats.num_epochs += 1
            self._want = _Want.CONTENTS
            self._kept.add(told)
            return []
        if first_id > self._next_id:
            self._keep_for_later(told)
            return []
        if events[-1].event_id < self._next_id:
            self._stats.num_duplicates += 1
            return []
        return [*self._take(told.batch), *self._catch_up()]

    def _keep_for_later(self, told: Told) -> None:
        if not self._kept:
            self._stats.num_gaps += 1
        self._want = _Want.EVENTS
        if not self._kept.add(told):
            self._stats.num_overflows += 1
            self._want = _Want.CONTENTS

    def _take(self, batch: KvEventBatch) -> list[Action]:
        """What is new in a batch that begins where we are, or before."""
        new = batch.events[max(self._next_id - batch.events[0].event_id, 0) :]
        if not new:
            return []
        self._next_id = new[-1].event_id + 1
        self._stats.num_events += len(new)
        return [Apply(new), *self._check(batch.digests)]

    def _catch_up(self) -> list[Action]:
        """Apply what was kept, up to the next gap."""
        actions: list[Action] = []
        while (batch := self._kept.pop_up_to(self._next_id)) is not None:
            actions += self._take(batch)
        self._want = _Want.EVENTS if self._kept else _Want.NOTHING
        return actions

    # --- what is answered

    def _on_replayed(self, replay: Replayed) -> list[Action]:
        if self._want is not _Want.EVENTS:
            return []  # the events have come another way meanwhile
        if replay.is_gone or replay.epoch != self._epoch:
            self._stats.num_epochs += replay.epoch != self._epoch
            self._want = _Want.CONTENTS
            return []
        self._stats.num_replays += 1
        actions: list[Action] = []
        before = self._next_id
        for batch in replay.batches:
            if batch.events and _is_whole(batch.events) and batch.events[0].event_id <= self._next_id:
                actions += self._take(batch)
        self._stats.num_replayed_events += self._next_id - before
        if self._next_id < replay.next_id:
            self._want = _Want.CONTENTS  # there are some that it cannot tell
            return actions
        if self._next_id == replay.next_id:
            actions += self._check(replay.digests)
        return [*actions, *self._catch_up()]

    def _on_snapshotted(self, snapshot: Snapshotted) -> list[Action]:
        if self._want is not _Want.CONTENTS:
            return []
        self._stats.num_snapshots += 1
        self._epoch, self._next_id = snapshot.epoch, snapshot.next_id
        self._can_tell_all = True
        self._agrees = False
        if self._kept.epoch != self._epoch:
            self._kept.clear()
        return [Replace(snapshot.blocks), Check(snapshot.digests), *self._catch_up()]

    def _on_refused(self) -> list[Action]:
        if self._want is _Want.EVENTS:
            self._want = _Want.CONTENTS
            return []
        if self._want is _Want.NOTHING:
            return []
        self._stats.num_refused += 1
        self._can_tell_all = self._agrees = False
        # What is stored from here on is held. What was there before is not known, and is not claimed.
        self._epoch = None
        if self._kept:
            self._epoch, self._next_id = self._kept.epoch, self._kept.first_id
        return [Clear(), *self._catch_up()]

    # --- whether it is right

    def _check(self, digests: tuple[KvDigest, ...]) -> list[Action]:
        return [Check(digests)] if digests and self._can_tell_all else []

    def _on_compared(self, comparison: Comparison) -> None:
        agreed, self._agrees = self._agrees, comparison is Comparison.AGREE
        if comparison is Comparison.DIFFER:
            self._stats.num_mismatches += 1
            if agreed:
                self._want = _Want.CONTENTS


def _is_whole(events: Sequence[KvEvent]) -> bool:
    """Whether these can be the events of one batch: one epoch, numbers one after the other."""
    first, last = events[0], events[-1]
    return last.epoch == first.epoch and last.event_id - first.event_id == len(events) - 1
