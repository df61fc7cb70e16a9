"""HybridIndex: prefix index over workers with and without usable KV events.

Fed by events for workers that publish them and whose reports agree with them; approximate, from this router's own
decisions, for workers without events, with incomparable events (other block size or hash scheme), with events that
proved wrong, or for all workers if events are off. Decides which worker is which, and logs each change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kvolt.core.card import EngineInfo
from kvolt.core.ids import InstanceId
from kvolt.router.index.approximate import MAX_WORKER_RANKS, ApproximateIndex, ApproximateOptions
from kvolt.router.index.health import HealthChange, IndexHealth, IndexHealthOptions, PredictedBlocks
from kvolt.router.index.prefix_index import PrefixIndex
from kvolt.router.worker_rank import WorkerDpRank, ranks_of

if TYPE_CHECKING:
    from kvolt.router.choice import WorkerChoice

log = logging.getLogger(__name__)

_NOTHING: npt.NDArray[np.int32] = np.zeros(0, dtype=np.int32)


class EventFedIndex(PrefixIndex, Protocol):
    """A prefix index that is fed by KV events."""

    def resync(self, instance_id: InstanceId) -> None:
        """Request a snapshot from the worker."""
        ...


class HybridIndex:
    """See the module. PrefixIndex and RequestObserver of a Selector."""

    def __init__(
        self,
        event_fed: EventFedIndex | None,
        now: Callable[[], float],
        options: ApproximateOptions | None = None,
        health_options: IndexHealthOptions | None = None,
    ) -> None:
        """Without an `event_fed` index all workers are approximate."""
        self._event_fed = event_fed
        self._now = now
        self.approximate = ApproximateIndex(options)
        self.health = IndexHealth(health_options)
        self._infos: Mapping[InstanceId, EngineInfo | None] = {}
        self._event_fed_version = -1
        self._version = 0
        self._is_at_limit = False
        self._predictions: dict[int, PredictedBlocks] = {}
        """By reservation id: predictions of the event-fed index for flagged workers, which are routed approximately."""

    # --- PrefixIndex

    @property
    def slots_version(self) -> int:
        if self._event_fed is not None and self._event_fed.slots_version != self._event_fed_version:
            self._partition_workers()
        return self._version

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        event_fed = _NOTHING if self._event_fed is None else self._event_fed.find(hashes)
        if not self.approximate.num_slots:
            return event_fed
        return np.concatenate([self.approximate.find(hashes, self._now()), event_fed])

    def find_local_tiers(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32] | None:
        """Workers without events count with their device blocks in every tier."""
        event_fed = None if self._event_fed is None else self._event_fed.find_local_tiers(hashes)
        if event_fed is None or not self.approximate.num_slots:
            return event_fed
        approximate = self.approximate.find(hashes, self._now())
        return np.concatenate(
            [np.broadcast_to(approximate, (len(event_fed), len(approximate))), event_fed], axis=1
        )

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        """Approximate slots come first."""
        approximate = self.approximate.slot_of(instance_id, dp_rank)
        if approximate is not None:
            return approximate
        event_fed = self._event_fed_slot(instance_id, dp_rank)
        return None if event_fed is None else event_fed + self.approximate.num_slots

    # --- RequestObserver

    def set_workers(self, infos: Mapping[InstanceId, EngineInfo | None]) -> None:
        for instance_id in self._infos.keys() - infos.keys():
            self.health.drop_worker(instance_id)
        self._infos = dict(infos)
        self._partition_workers()

    def on_reserved(self, reservation_id: int, choice: WorkerChoice) -> None:
        """Keep the prediction of the event-fed index for flagged workers, to compare it with their reports."""
        worker_rank = choice.worker_rank
        slot = self._event_fed_slot(*worker_rank)
        if (
            self._event_fed is not None
            and slot is not None
            and not self.health.is_healthy(worker_rank.instance_id)
        ):
            held_blocks = int(self._event_fed.find(choice.usable_hashes)[slot])
            self._predictions[reservation_id] = _predicted_blocks(held_blocks, choice)

    def on_first_token(
        self, reservation_id: int, choice: WorkerChoice, cached_tokens: int | None, now: float
    ) -> None:
        request, worker_rank = choice.request, choice.worker_rank
        if cached_tokens is not None and self._event_fed_slot(*worker_rank) is not None:
            predicted = self._predictions.get(reservation_id) or _predicted_blocks(choice.held_blocks, choice)
            cached_blocks = cached_tokens // (request.block_size or 1)
            self._judge(worker_rank, predicted, cached_blocks, now)
        self.approximate.record_prefill(*worker_rank, request.sequence_hashes, now)

    def on_released(self, reservation_id: int) -> None:
        self._predictions.pop(reservation_id, None)

    # ---

    def is_approximate(self, instance_id: InstanceId) -> bool:
        """Whether a known worker is indexed approximately."""
        info = self._infos.get(instance_id)
        return any(self.approximate.slot_of(instance_id, rank) is not None for rank in ranks_of(info))

    def _event_fed_slot(self, instance_id: InstanceId, dp_rank: int) -> int | None:
        return None if self._event_fed is None else self._event_fed.slot_of(instance_id, dp_rank)

    def _judge(
        self, worker_rank: WorkerDpRank, predicted: PredictedBlocks, cached_blocks: int, now: float
    ) -> None:
        change = self.health.record_report(worker_rank.instance_id, predicted, cached_blocks, now)
        if change is HealthChange.FLAGGED:
            log.warning(
                "worker index flagged: worker=%s: cached tokens differ from its KV events; requesting a snapshot,"
                " routing by own decisions until they agree (is the engine's prefix cache on?)",
                worker_rank.instance_id,
            )
            assert self._event_fed is not None
            self._event_fed.resync(worker_rank.instance_id)
        elif change is HealthChange.CLEARED:
            log.info("worker index healthy again: worker=%s", worker_rank.instance_id)
        if change is not None:
            self._partition_workers()

    def _partition_workers(self) -> None:
        """Divide the worker ranks into event-fed and approximate ones."""
        self._event_fed_version = -1 if self._event_fed is None else self._event_fed.slots_version
        self._version += 1
        approximate_ranks = {
            WorkerDpRank(instance_id, rank): 0 if info is None else info.capacity.kv_total_blocks
            for instance_id, info in self._infos.items()
            for rank in ranks_of(info)
            if self._event_fed_slot(instance_id, rank) is None or not self.health.is_healthy(instance_id)
        }
        for key in self.approximate.worker_ranks:
            if key not in approximate_ranks:
                self.approximate.drop_worker(*key)
        has_slot = [
            self.approximate.add_worker(*worker_rank, total_blocks=total_blocks)
            for worker_rank, total_blocks in sorted(approximate_ranks.items())
        ]
        if not all(has_slot) and not self._is_at_limit:
            log.warning(
                "approximate index is full: limit=%d worker ranks; other workers without KV events are routed"
                " by load alone",
                MAX_WORKER_RANKS,
            )
        self._is_at_limit = not all(has_slot)


def _predicted_blocks(held_blocks: int, choice: WorkerChoice) -> PredictedBlocks:
    """More than `held` may be cached by then: pending blocks, or blocks onboarded from lower tiers."""
    max_blocks = len(choice.request.sequence_hashes) if choice.has_tiers else choice.overlap_blocks
    return PredictedBlocks(held_blocks, max(held_blocks, max_blocks))
