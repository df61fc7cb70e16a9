"""KV events on their way out: numbered, published, and kept for a while for whoever missed some.

Owns the numbers of one worker's events and the recent batches. Knows no engine and no router.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import msgspec

from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import Cleared, KvChange, KvEvent, KvEventBatch, Removed, Stored

_encode = msgspec.msgpack.Encoder().encode

HISTORY_BYTES = 4 * 1024 * 1024


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
    ) -> None:
        self.epoch = epoch
        self.next_id = 0
        self.num_bytes = 0
        self.counts: Counter[str] = Counter()
        """Blocks and clearings told so far, by kind of change."""
        self._instance = instance
        self._publish = publish
        self._max_bytes = max_bytes
        self._recent: deque[tuple[int, bytes]] = deque()
        """Id of the first event of each batch, and the batch."""

    def record(self, changes: tuple[KvChange, ...], dp_rank: int = 0) -> None:
        first = self.next_id
        events = tuple(
            KvEvent(first + index, self.epoch, change, dp_rank) for index, change in enumerate(changes)
        )
        self.next_id += len(events)
        self._count(changes)
        payload = _encode(KvEventBatch(events, self._instance))
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

    def _count(self, changes: tuple[KvChange, ...]) -> None:
        for change in changes:
            match change:
                case Stored():
                    self.counts["stored"] += len(change.sequence_hashes)
                case Removed():
                    self.counts["removed"] += len(change.sequence_hashes)
                case Cleared():
                    self.counts["cleared"] += 1
