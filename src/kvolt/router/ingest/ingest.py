"""KvIngest: keeps a prefix index in step with the KV events of one endpoint's workers.

Drives an EventFeed per worker: reads the event plane, sends recovery requests and applies the feed's actions to the
index. A new worker is asked for a snapshot; a deregistered one loses its index slots. Events lost without a later one
are found by polling workers that have been quiet. Shared pools that workers name are sources like workers (`pools`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.core.card import HASH_SCHEME, EngineInfo
from kvolt.core.endpoints import KV_TOPIC, Instance
from kvolt.core.errors import MALFORMED, KvoltError
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import KvEventBatch
from kvolt.router.index.prefix_index import BlockIndex
from kvolt.router.ingest import feed
from kvolt.router.ingest.feed import EventFeed, FeedState, IngestStats
from kvolt.router.ingest.forged_events import ForgedEvents
from kvolt.router.ingest.pools import POOL_RANKS, PoolSharing, WorkerPools, is_pool
from kvolt.router.ingest.recovery import request_recovery
from kvolt.router.ingest.slots import InstanceSlots
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.events.port import Event, EventStream
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_MAX_IMMEDIATE_REQUESTS = 2
"""Recovery requests to a worker without a pause in between: events, then a snapshot."""


class _Envelope(msgspec.Struct, frozen=True):
    """The sender of a KvEventBatch. Decoded first: most batches may be of other models."""

    instance: InstanceId | None = None


_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_batch = msgspec.msgpack.Decoder(KvEventBatch).decode
_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode


class IngestOptions(msgspec.Struct, frozen=True, kw_only=True):
    quiet_s: float = 5.0
    """Time without events after which a worker is polled for missed ones."""
    max_recoveries: int = 16
    """Concurrent recoveries."""
    buffer_bytes: int = feed.BUFFER_BYTES
    """Buffer for events of one worker during a recovery."""
    first_pause_s: float = 0.1
    """Delay before a failed recovery request is repeated; doubles with each failure."""
    max_pause_s: float = 5.0
    deadlines: Deadlines = Deadlines(connect_s=2.0, first_s=5.0, between_s=5.0, total_s=30.0)


@dataclass(slots=True)
class _EventSource:
    """A worker or pool whose events are indexed."""

    instance: Instance
    feed: EventFeed
    slots: InstanceSlots
    recovery: asyncio.Task[None] | None = None
    has_news: bool = False


class KvIngest:
    """See the module. `start`, then `close`. The index may be shared with other endpoints."""

    def __init__(
        self,
        client: EndpointClient,
        runtime: Runtime,
        index: BlockIndex,
        block_size: int,
        options: IngestOptions | None = None,
    ) -> None:
        self._client = client
        self._runtime = runtime
        self._index = index
        self._block_size = block_size
        self._options = options or IngestOptions()
        self._rng = runtime.ports.rng
        self._sources: dict[InstanceId, _EventSource] = {}
        self._rejected: dict[InstanceId, str] = {}
        """Workers whose events cannot be indexed, with the reason."""
        self._recovery_slots = asyncio.Semaphore(self._options.max_recoveries)
        self._task_group = TaskGroup(f"kv ingest {client.endpoint}")
        self._stream: EventStream | None = None
        self._worker_pools = WorkerPools(runtime, client.endpoint.namespace, self._on_instances)
        self._pool_sharing = PoolSharing()
        self.slots_version = 0
        """Changes whenever a worker gains or loses its index slots."""
        self.stats = IngestStats()
        self.forged = ForgedEvents()

    def start(self) -> None:
        """Subscribe before any snapshot is requested, so that no event in between is missed."""
        self._stream = self._runtime.events.subscribe(KV_TOPIC)
        self._task_group.start(self._read(self._stream), "events")
        self._task_group.start(self._poll_quiet_sources(), "quiet workers")
        self._client.on_change(self._on_instances)
        self._on_instances()

    async def close(self) -> None:
        """Release the index slots. Idempotent."""
        await self._task_group.close()
        await self._worker_pools.close()
        if self._stream is not None:
            await self._stream.aclose()
        while self._sources:
            self._sources.popitem()[1].slots.close()
            self.slots_version += 1

    # --- lookups

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """Number of leading blocks of a prompt that each slot holds on its device."""
        return self._index.find(hashes)

    def find_local_tiers(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32] | None:
        """Leading blocks by tier and slot, shared pools included; None if no worker publishes lower tiers."""
        if not self.stats.has_lower_tiers:
            return None
        below = self._index.find_local_tiers(hashes)
        self._pool_sharing.add_pool_blocks(below)
        return below

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        """Index slot of a worker rank; None if its events are not indexed."""
        source = self._sources.get(instance_id)
        return None if source is None else source.slots.slot_of(dp_rank)

    def resync(self, instance_id: InstanceId) -> None:
        """Request a snapshot from a worker. Ignored if its events are not indexed."""
        source = self._sources.get(instance_id)
        if source is not None:
            self._handle(source, feed.ResyncRequested())

    def state_of(self, instance_id: InstanceId) -> FeedState:
        source = self._sources.get(instance_id)
        return FeedState.NO_EVENTS if source is None else source.feed.state

    def rejection_reason(self, instance_id: InstanceId) -> str | None:
        """Why the events of a registered worker are not indexed."""
        return self._rejected.get(instance_id)

    @property
    def num_unapplied(self) -> int:
        """Events received and not applied yet, over all workers."""
        return sum(source.feed.num_unapplied for source in self._sources.values())

    @property
    def num_pools(self) -> int:
        """Shared pools whose events are indexed."""
        return sum(is_pool(source.instance) for source in self._sources.values())

    def num_in_state(self, state: FeedState) -> int:
        """Registered workers in a state."""
        if state is FeedState.NO_EVENTS:
            return len(self._rejected)
        workers = [each for each in self._sources.values() if not is_pool(each.instance)]
        return sum(source.feed.state is state for source in workers)

    # --- workers

    def _on_instances(self) -> None:
        if self._task_group.closed:
            return
        workers = self._client.instances()
        present = {instance.id: instance for instance in (*workers, *self._worker_pools.select(workers))}
        for instance_id in [each for each in self._sources if each not in present]:
            self._drop_source(self._sources.pop(instance_id))
        for instance_id in [each for each in self._rejected if each not in present]:
            del self._rejected[instance_id]
        for instance_id, instance in present.items():
            source = self._sources.get(instance_id)
            if source is not None:
                source.instance = instance
            elif instance_id not in self._rejected:
                self._add_source(instance)
        self._update_pool_sharing()

    def _update_pool_sharing(self) -> None:
        pairs: list[tuple[int, int]] = []
        for instance_id, source in self._sources.items():
            name = self._worker_pools.pool_of(instance_id)
            pool = None if name is None else self._sources.get(name)
            if pool is not None:
                pairs += ((slot, pool.slots.slots[0]) for slot in source.slots.slots)
        self._pool_sharing = PoolSharing(pairs)

    def _add_source(self, instance: Instance) -> None:
        try:
            ranks = POOL_RANKS if is_pool(instance) else self._checked_info(instance).dp_ranks
            slots = InstanceSlots(self._index, ranks, self.stats)
        except ValueError as error:
            self._rejected[instance.id] = str(error)
            log.warning(
                "KV events not indexed: worker=%s instance=%s: %s", instance.process, instance.id, error
            )
            return
        self.slots_version += 1
        events = EventFeed(self.stats, self._options.buffer_bytes)
        source = self._sources[instance.id] = _EventSource(instance, events, slots)
        self._recover_if_needed(source)

    def _checked_info(self, instance: Instance) -> EngineInfo:
        """Decode the registration. Raises ValueError with reason and remedy if the blocks are not comparable."""
        try:
            info = _decode_info(instance.info)
        except MALFORMED:
            raise ValueError("its registration cannot be decoded (is it another version?)") from None
        if info.hash_scheme != HASH_SCHEME:
            raise ValueError(
                f"it hashes blocks by {info.hash_scheme!r}, this router by {HASH_SCHEME!r}: "
                "run the same version of kvolt on both"
            )
        if info.block_size != self._block_size:
            raise ValueError(
                f"its blocks have {info.block_size} tokens, this router's {self._block_size}: "
                "start it with the block size of its model's card"
            )
        if not info.publishes_kv_events:
            raise ValueError(f"its engine ({info.engine}) publishes none")
        return info

    def _drop_source(self, source: _EventSource) -> None:
        if source.recovery is not None:
            source.recovery.cancel()
        source.slots.close()
        self.slots_version += 1

    # --- events

    async def _read(self, stream: EventStream) -> None:
        async for event in stream:
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        payload = event.payload
        try:
            sender = _decode_envelope(payload).instance
            source = None if sender is None else self._sources.get(sender)
            if source is None:
                return  # of another endpoint, or not registered yet: a new worker is asked for a snapshot
            if self.forged.is_forged(event, source.instance):
                return
            batch = _decode_batch(payload)
        except MALFORMED as error:
            self.stats.num_malformed += 1
            log.debug("KV event batch dropped: %s", error)
            return
        source.has_news = True
        self._handle(source, feed.BatchReceived(batch, len(payload)))

    async def _poll_quiet_sources(self) -> None:
        while True:
            await asyncio.sleep(self._options.quiet_s * self._rng.uniform(0.75, 1.25))
            for source in list(self._sources.values()):
                if not source.has_news:
                    self._handle(source, feed.QuietPeriod())
                source.has_news = False

    def _handle(self, source: _EventSource, event: feed.Input) -> None:
        """Apply all actions of an input in one loop tick."""
        for action in source.feed.handle(event):
            self._perform(source, action)
        self._recover_if_needed(source)

    def _perform(self, source: _EventSource, action: feed.Action) -> None:
        match action:
            case feed.ApplyEvents(events):
                source.slots.apply(events)
            case feed.ReplaceContents(blocks):
                source.slots.replace(blocks)
            case feed.ClearContents():
                source.slots.clear()
            case feed.CompareDigests(digests):
                source.feed.handle(feed.DigestsCompared(source.slots.compare(digests)))

    # --- recovery

    def _recover_if_needed(self, source: _EventSource) -> None:
        if source.feed.recovery_request is not None and source.recovery is None:
            source.recovery = self._task_group.start(self._recover(source), f"recover {source.instance.id}")

    async def _recover(self, source: _EventSource) -> None:
        """Send recovery requests until none is needed. Each request is chosen when its turn comes."""
        pause_s, num_requests = self._options.first_pause_s, 0
        try:
            while source.feed.recovery_request is not None:
                has_response = await self._recover_once(source)
                num_requests += 1
                if source.feed.recovery_request is None or (
                    has_response and num_requests < _MAX_IMMEDIATE_REQUESTS
                ):
                    continue
                await asyncio.sleep(pause_s * self._rng.uniform(0.75, 1.25))
                pause_s = min(pause_s * 2, self._options.max_pause_s)
        finally:
            source.recovery = None

    async def _recover_once(self, source: _EventSource) -> bool:
        """Send the current recovery request; return whether the worker responded."""
        async with self._recovery_slots:
            recovery_request = source.feed.recovery_request
            if recovery_request is None:
                return True
            instance = source.instance
            try:
                response = await request_recovery(
                    self._runtime.plane, instance, recovery_request, self._options.deadlines
                )
            except KvoltError as error:
                self.stats.num_failures += 1
                log.debug(
                    "KV recovery failed: worker=%s instance=%s: %r", instance.process, instance.id, error
                )
                return False
        source.has_news = True
        self._handle(source, response)
        if isinstance(response, feed.RecoveryRefused) and source.feed.recovery_request is None:
            log.warning(
                "KV snapshot not supported: worker=%s instance=%s: only blocks stored from now on are indexed",
                instance.process,
                instance.id,
            )
        return True
