"""StandaloneIndex: event-fed index whose KV events are posted by the caller. Pure.

For workers of other stacks. A gap is reported to the caller at once, so the index sends no recovery requests: numbered
events must be consecutive, and repeated ones are ignored.
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
    """Events before the posted ones are missing."""

    def __init__(self, epoch: int, expected_id: int | None, received_id: int) -> None:
        expected = "a snapshot" if expected_id is None else f"event {expected_id}"
        super().__init__(f"received event {received_id}, expected {expected}")
        self.epoch = epoch
        self.expected_id = expected_id
        """None if only a snapshot of all blocks can continue."""


class StandaloneEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change, numbered or not."""

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
    needs_resync: bool = False
    """The index disagrees with the worker's reports; a snapshot is required."""


class StandaloneIndex:
    """See the module. The EventFedIndex of a HybridIndex."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.index = BlockIndex(max_bytes)
        self.stats = IngestStats()
        self._workers: dict[InstanceId, _Worker] = {}
        self._version = 0

    # --- EventFedIndex

    @property
    def slots_version(self) -> int:
        return self._version

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        return self.index.find(hashes)

    def find_local_tiers(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32] | None:
        return self.index.find_local_tiers(hashes) if self.stats.has_lower_tiers else None

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        worker = self._workers.get(instance_id)
        return None if worker is None else worker.slots.slot_of(dp_rank)

    def resync(self, instance_id: InstanceId) -> None:
        """Require a snapshot: the next numbered event raises EventsMissed."""
        worker = self._workers.get(instance_id)
        if worker is not None and worker.epoch is not None:
            worker.needs_resync = True

    # --- workers

    def add_worker(self, instance_id: InstanceId, dp_ranks: Sequence[int]) -> None:
        """Add a worker. With unchanged ranks it keeps its blocks. Raises ValueError without a free slot."""
        worker = self._workers.get(instance_id)
        if worker is not None and worker.dp_ranks == tuple(dp_ranks):
            return
        self.drop_worker(instance_id)
        slots = InstanceSlots(self.index, dp_ranks, self.stats)
        self._workers[instance_id] = _Worker(slots, tuple(dp_ranks))
        self._version += 1

    def drop_worker(self, instance_id: InstanceId) -> None:
        worker = self._workers.pop(instance_id, None)
        if worker is not None:
            worker.slots.close()
            self._version += 1

    # --- events

    def post(self, instance_id: InstanceId, events: Sequence[StandaloneEvent]) -> int:
        """Apply events; return how many were new. Raises EventsMissed without applying any, KeyError if unknown."""
        worker = self._workers[instance_id]
        epoch, next_id = worker.epoch, worker.next_id
        new_events: list[StandaloneEvent] = []
        is_new_epoch = False
        for event in events:
            if event.event_id is None:
                new_events.append(event)
                continue
            if epoch is None or event.epoch > epoch:
                is_new_epoch = epoch is not None
                if is_new_epoch:
                    new_events.clear()
                epoch, next_id = event.epoch, event.event_id
            if event.epoch < epoch or event.event_id < next_id:
                continue
            needs_resync = worker.needs_resync and not is_new_epoch
            if event.event_id > next_id or needs_resync:
                raise EventsMissed(epoch, None if needs_resync else next_id, event.event_id)
            new_events.append(event)
            next_id += 1
        if is_new_epoch:
            worker.slots.clear()
            worker.needs_resync = False
        worker.epoch, worker.next_id = epoch, next_id
        worker.slots.apply([KvEvent(0, 0, event.change, event.dp_rank) for event in new_events])
        return len(new_events)

    def replace(
        self,
        instance_id: InstanceId,
        blocks: Mapping[tuple[int, Tier], bytes],
        epoch: int | None = None,
        next_id: int = 0,
    ) -> None:
        """Replace all blocks of a worker (packed, by rank and tier). Events continue at `next_id`."""
        worker = self._workers[instance_id]
        worker.slots.replace(blocks)
        worker.epoch, worker.next_id, worker.needs_resync = epoch, next_id, False

    # --- display

    def digests(self, instance_id: InstanceId) -> list[KvDigest]:
        """Digests of each non-empty rank and tier."""
        worker = self._workers.get(instance_id)
        digests = []
        for dp_rank in () if worker is None else worker.dp_ranks:
            slot = self.slot_of(instance_id, dp_rank)
            assert slot is not None
            for tier, level in TIER_LEVEL.items():
                num_blocks, digest = self.index.digest(slot, level)
                if num_blocks:
                    digests.append(KvDigest(num_blocks, digest, dp_rank, tier))
        return digests

    def contents(self, instance_id: InstanceId, dp_rank: int, tier: Tier) -> list[int]:
        slot = self.slot_of(instance_id, dp_rank)
        return [] if slot is None else list(self.index.contents(slot, TIER_LEVEL[tier]))
