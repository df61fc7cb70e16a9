"""Publishes a worker's KV events with numbers, and keeps recent batches for routers that missed some."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator

import msgspec

from kvolt.core import kv_recovery
from kvolt.core.card import EngineInfo
from kvolt.core.errors import Unavailable, Unsupported
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import Cleared, KvChange, KvDigest, KvEvent, KvEventBatch, Removed, Stored
from kvolt.worker.kv.held_blocks import HeldBlocks

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode

HISTORY_BYTES = 4 * 1024 * 1024
_DIGEST_EVERY = 16
"""Interval of digests, in batches."""
_MAX_EVENT_BLOCKS = 1 << 15
"""Blocks in one event of a tier, which may change by millions."""


class KvJournal:
    """Numbers changes from 0 within an epoch and publishes them, one batch per step with changes.

    Keeps the latest batches up to a bound in bytes.
    """

    def __init__(
        self,
        epoch: int,
        instance: InstanceId,
        publish: Callable[[bytes], None],
        max_bytes: int = HISTORY_BYTES,
        held_blocks: HeldBlocks | None = None,
    ) -> None:
        self.epoch = epoch
        self.next_id = 0
        self.num_bytes = 0
        self.counts: Counter[str] = Counter()
        """Blocks and clears published, by kind of change."""
        self._instance = instance
        self._publish = publish
        self._max_bytes = max_bytes
        self._held_blocks = held_blocks or HeldBlocks()
        self._num_batches = 0
        self._recent: deque[tuple[int, bytes]] = deque()
        """First event id and payload of each batch."""

    def record(self, changes: tuple[KvChange, ...], dp_rank: int = 0) -> None:
        first = self.next_id
        events = tuple(
            KvEvent(first + index, self.epoch, change, dp_rank) for index, change in enumerate(changes)
        )
        self.next_id += len(events)
        self._count(changes)
        payload = _encode(KvEventBatch(events, self._instance, self._apply(changes, dp_rank)))
        self._publish(payload)
        self._recent.append((first, payload))
        self.num_bytes += len(payload)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._recent.popleft()[1])

    def batches_since(self, event_id: int) -> list[bytes] | None:
        """Batches from this event on; None if the first of them was dropped."""
        if event_id >= self.next_id:
            return []
        if not self._recent or event_id < self._recent[0][0]:
            return None
        batches = list(self._recent)
        last = max(index for index, (first, _) in enumerate(batches) if first <= event_id)
        return [payload for _, payload in batches[last:]]

    def recover(self, request: kv_recovery.KvRecoveryRequest) -> Iterator[kv_recovery.KvRecoveryResponse]:
        """Parts of the response, all as of now. Unsupported if the held blocks are unknown (see `HeldBlocks`)."""
        match request:
            case kv_recovery.KvEventsSince(epoch, event_id):
                return self._replay(self.batches_since(event_id) if epoch == self.epoch else None)
            case kv_recovery.KvContents():
                return iter(self._snapshot())

    def _replay(self, batches: list[bytes] | None) -> Iterator[kv_recovery.KvReplay]:
        state = kv_recovery.KvReplay(
            self._instance, self.epoch, self.next_id, (), batches is None, self._held_blocks.digests()
        )
        return (
            msgspec.structs.replace(state, batches=group)
            for group in list(kv_recovery.split_batches(batches or ()))
        )

    def _snapshot(self) -> list[kv_recovery.KvRecoveryResponse]:
        """Eight bytes per block; bounded by `HeldBlocks`."""
        held_blocks = self._held_blocks
        if held_blocks.is_lost:
            raise Unsupported(
                "the blocks of this worker are unknown: its engine published more blocks than can be tracked",
                feature="kv_contents",
            )
        parts: list[kv_recovery.KvRecoveryResponse] = [
            kv_recovery.KvSnapshot(self._instance, self.epoch, self.next_id, held_blocks.digests()),
        ]
        for dp_rank, tier, blocks in held_blocks.contents():
            parts += (
                kv_recovery.KvSnapshotPart(packed, dp_rank, tier)
                for packed in kv_recovery.pack_hash_parts(blocks)
            )
        return parts

    def _apply(self, changes: tuple[KvChange, ...], dp_rank: int) -> tuple[KvDigest, ...]:
        """Track held blocks; returns digests if this batch carries them."""
        was_lost = self._held_blocks.is_lost
        self._held_blocks.apply(changes, dp_rank)
        if self._held_blocks.is_lost and not was_lost:
            log.error(
                "engine published more blocks than can be tracked: routers that start later index only blocks stored "
                "from then on (does the engine publish removals?)"
            )
        self._num_batches += 1
        return self._held_blocks.digests(dp_rank) if self._num_batches % _DIGEST_EVERY == 0 else ()

    def _count(self, changes: tuple[KvChange, ...]) -> None:
        for change in changes:
            match change:
                case Stored():
                    self.counts["stored"] += change.num_blocks
                case Removed():
                    self.counts["removed"] += change.num_blocks
                case Cleared():
                    self.counts["cleared"] += 1


def split_change(change: KvChange) -> Iterator[KvChange]:
    """Split a change that is too large for one event."""
    if isinstance(change, Cleared) or change.num_blocks <= _MAX_EVENT_BLOCKS:
        yield change
        return
    hashes, position = change.sequence_hashes, 0
    parent = change.parent if isinstance(change, Stored) else None
    for start in range(0, len(hashes), _MAX_EVENT_BLOCKS):
        part = hashes[start : start + _MAX_EVENT_BLOCKS]
        if isinstance(change, Removed):
            yield Removed.from_hashes(part, change.tier)
        else:
            position = (change.start_position or 0) + start
            yield Stored.from_hashes(part, parent, position, change.tier)
            parent = part[-1]


def answer_recovery(
    journal: KvJournal | None, info: EngineInfo | None, request: kv_recovery.KvRecoveryRequest
) -> Iterator[kv_recovery.KvRecoveryResponse]:
    """Answer a router's request for lost KV events or held blocks."""
    if info is not None and not info.publishes_kv_events:
        raise Unsupported("this engine publishes no KV events", feature="kv_events")
    if journal is None:
        raise Unavailable("this worker is starting", reason="starting")
    return journal.recover(request)
