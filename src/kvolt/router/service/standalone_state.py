"""PostedIndex: what workers hold, by the KV events that somebody posts for them. Pure.

For workers that are not kvolt's. Whoever posts is told at once what was missed, so nothing has to be asked for: events
that are numbered must follow one another, and those that come again are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import TIER_LEVEL, KvChange, KvDigest, KvEvent, Tier
from kvolt.router.index.prefix_index import DEFAULT_MAX_BYTES, BlockIndex
from kvolt.router.ingest.feed import IngestStats
from kvolt.router.ingest.slots import InstanceSlots


class EventsMissed(Exception):
    """There are events before these."""

    def __init__(self, epoch: int, due_id: int | None, got_id: int) -> None:
        due = f"where {due_id} is due" if due_id is not None else "where all blocks are to be posted anew"
        super().__init__(f"event {got_id} came {due}")
        self.epoch = epoch
        self.due_id = due_id
        """None when only all blocks anew will do."""


class PostedEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change; numbered, or in the order in which it is posted."""

    change: KvChange
    dp_rank: int = 0
    event_id: int | None = None
    epoch: int = 0


@dataclass(slots=True)
class _Worker:
    slots: InstanceSlots
    dp_ranks: tuple[int, ...]
    epoch: int | None = None
    next_id: int = 0
    is_doubtful: bool = False
    """What is known of it is not what it holds."""


class PostedIndex:
    """See the module. What `MixedHolders` takes for exact."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.index = BlockIndex(max_bytes)
        self.stats = IngestStats()
        self._workers: dict[InstanceId, _Worker] = {}
        self._version = 0

    # --- ExactHolders

    @property
    def slots_version(self) -> int:
        return self._version

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        return self.index.find(hashes)

    def find_below(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32] | None:
        return self.index.find_own(hashes) if self.stats.tells_below else None

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        worker = self._workers.get(instance_id)
        return None if worker is None else worker.slots.of(dp_rank)

    def resync(self, instance_id: InstanceId) -> None:
        """Nobody can be asked: the next numbered event is refused, and then all is posted anew."""
        worker = self._workers.get(instance_id)
        if worker is not None and worker.epoch is not None:
            worker.is_doubtful = True

    # --- workers

    def add(self, instance_id: InstanceId, dp_ranks: Sequence[int]) -> None:
        """Known with the same ranks it keeps what it has. ValueError when there is no place left."""
        known = self._workers.get(instance_id)
        if known is not None and known.dp_ranks == tuple(dp_ranks):
            return
        self.drop(instance_id)
        slots = InstanceSlots(self.index, dp_ranks, self.stats)
        self._workers[instance_id] = _Worker(slots, tuple(dp_ranks))
        self._version += 1

    def drop(self, instance_id: InstanceId) -> None:
        worker = self._workers.pop(instance_id, None)
        if worker is not None:
            worker.slots.close()
            self._version += 1

    # --- events

    def post(self, instance_id: InstanceId, events: Sequence[PostedEvent]) -> int:
        """How many were new. EventsMissed, and then none is taken. KeyError for a worker without a place here."""
        worker = self._workers[instance_id]
        epoch, next_id = worker.epoch, worker.next_id
        fresh: list[PostedEvent] = []
        begins_anew = False
        for event in events:
            if event.event_id is None:
                fresh.append(event)
                continue
            if epoch is None or event.epoch > epoch:
                begins_anew = epoch is not None
                if begins_anew:
                    fresh.clear()
                epoch, next_id = event.epoch, event.event_id
            if event.epoch < epoch or event.event_id < next_id:
                continue
            is_doubtful = worker.is_doubtful and not begins_anew
            if event.event_id > next_id or is_doubtful:
                raise EventsMissed(epoch, None if is_doubtful else next_id, event.event_id)
            fresh.append(event)
            next_id += 1
        if begins_anew:
            worker.slots.clear()
            worker.is_doubtful = False
        worker.epoch, worker.next_id = epoch, next_id
        worker.slots.apply([KvEvent(0, 0, event.change, event.dp_rank) for event in fresh])
        return len(fresh)

    def replace(
        self,
        instance_id: InstanceId,
        blocks: Mapping[tuple[int, Tier], bytes],
        epoch: int | None = None,
        next_id: int = 0,
    ) -> None:
        """All that it holds, packed, by rank and tier; events from `next_id` on follow."""
        worker = self._workers[instance_id]
        worker.slots.replace(blocks)
        worker.epoch, worker.next_id, worker.is_doubtful = epoch, next_id, False

    # --- for people

    def digests(self, instance_id: InstanceId) -> list[KvDigest]:
        """Of each rank and tier where it holds anything."""
        worker = self._workers.get(instance_id)
        found = []
        for dp_rank in () if worker is None else worker.dp_ranks:
            slot = self.slot_of(instance_id, dp_rank)
            assert slot is not None
            for tier, level in TIER_LEVEL.items():
                num_blocks, digest = self.index.digest(slot, level)
                if num_blocks:
                    found.append(KvDigest(num_blocks, digest, dp_rank, tier))
        return found

    def contents(self, instance_id: InstanceId, dp_rank: int, tier: Tier) -> list[int]:
        slot = self.slot_of(instance_id, dp_rank)
        return [] if slot is None else list(self.index.contents(slot, TIER_LEVEL[tier]))
