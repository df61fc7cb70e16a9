"""Publishes KV events: numbered, and kept for a while so that a router can ask for those it missed.

Owns the numbers of one worker's events, the recent batches, and what a router is answered that asks for more. Knows
no engine and no router.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator

import msgspec

from kvolt.core.errors import Unsupported
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import Cleared, KvChange, KvDigest, KvEvent, KvEventBatch, Removed, Stored
from kvolt.core.kv_recovery import (
    KvAnswer,
    KvContents,
    KvEventsSince,
    KvQuestion,
    KvReplay,
    KvSnapshot,
    KvSnapshotPart,
    pack_hashes,
    split_batches,
)
from kvolt.worker.held_blocks import Holdings

log = logging.getLogger(__name__)

_encode = msgspec.msgpack.Encoder().encode

HISTORY_BYTES = 4 * 1024 * 1024
_DIGEST_EVERY = 16
"""Batches of which one carries digests."""


class KvJournal:
    """Numbers changes from 0 within an epoch and publishes them, one batch for each step that made any.

    The latest batches stay up to a bound in bytes; the oldest go first.
    """

    def __init__(
        self,
        epoch: int,
        instance: InstanceId,
        publish: Callable[[bytes], None],
        max_bytes: int = HISTORY_BYTES,
        holdings: Holdings | None = None,
    ) -> None:
        self.epoch = epoch
        self.next_id = 0
        self.num_bytes = 0
        self.counts: Counter[str] = Counter()
        """Blocks and clearings told so far, by kind of change."""
        self._instance = instance
        self._publish = publish
        self._max_bytes = max_bytes
        self._holdings = holdings or Holdings()
        self._num_batches = 0
        self._recent: deque[tuple[int, bytes]] = deque()
        """Id of the first event of each batch, and the batch."""

    def record(self, changes: tuple[KvChange, ...], dp_rank: int = 0) -> None:
        first = self.next_id
        events = tuple(
            KvEvent(first + index, self.epoch, change, dp_rank) for index, change in enumerate(changes)
        )
        self.next_id += len(events)
        self._count(changes)
        payload = _encode(KvEventBatch(events, self._instance, self._follow(changes, dp_rank)))
        self._publish(payload)
        self._recent.append((first, payload))
        self.num_bytes += len(payload)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._recent.popleft()[1])

    def since(self, event_id: int) -> list[bytes] | None:
        """The batches with this event and all after it; None when the first of them is gone already."""
        if event_id >= self.next_id:
            return []
        if not self._recent or event_id < self._recent[0][0]:
            return None
        batches = list(self._recent)
        last = max(index for index, (first, _) in enumerate(batches) if first <= event_id)
        return [payload for _, payload in batches[last:]]

    def answer(self, question: KvQuestion) -> Iterator[KvAnswer]:
        """The parts of an answer, all of them as of now. Unsupported when what is held is not known any more."""
        match question:
            case KvEventsSince(epoch, event_id):
                return self._replay(self.since(event_id) if epoch == self.epoch else None)
            case KvContents():
                return iter(self._snapshot())

    def _replay(self, batches: list[bytes] | None) -> Iterator[KvReplay]:
        """Its sizes are bounded by the history's."""
        now = KvReplay(
            self._instance, self.epoch, self.next_id, (), batches is None, self._holdings.digests()
        )
        return (msgspec.structs.replace(now, batches=group) for group in list(split_batches(batches or ())))

    def _snapshot(self) -> list[KvAnswer]:
        """Eight bytes a block: the holdings' bound is its own."""
        holdings = self._holdings
        if holdings.is_lost:
            raise Unsupported(
                "what this worker holds is not known: its engine told of more blocks than can be followed",
                feature="kv_contents",
            )
        parts: list[KvAnswer] = [
            KvSnapshot(self._instance, self.epoch, self.next_id, holdings.digests()),
        ]
        for dp_rank, tier, blocks in holdings.contents():
            parts += (KvSnapshotPart(packed, dp_rank, tier) for packed in pack_hashes(blocks))
        return parts

    def _follow(self, changes: tuple[KvChange, ...], dp_rank: int) -> tuple[KvDigest, ...]:
        """What is held now; the digests where it is their turn."""
        was_lost = self._holdings.is_lost
        self._holdings.apply(changes, dp_rank)
        if self._holdings.is_lost and not was_lost:
            log.error(
                "the engine told of more blocks than can be followed: routers that start from now on learn only "
                "what is stored from then on (does it tell what it removes?)"
            )
        self._num_batches += 1
        return self._holdings.digests(dp_rank) if self._num_batches % _DIGEST_EVERY == 0 else ()

    def _count(self, changes: tuple[KvChange, ...]) -> None:
        for change in changes:
            match change:
                case Stored():
                    self.counts["stored"] += change.num_blocks
                case Removed():
                    self.counts["removed"] += change.num_blocks
                case Cleared():
                    self.counts["cleared"] += 1
