"""KvIngest: keeps the index at what the workers of one endpoint hold, by their KV events.

Drives a Feed for each worker: reads the event plane, asks workers for what was lost, and performs on the index what
the feed says. A worker that registers is asked for all that it holds; one that is gone takes its places along.
Events that the plane lost with none after them show when a worker that was not heard of for a while is asked. Pools
that workers name are followed just as these (`ingest_pools`).
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.core.card import HASH_SCHEME, EngineInfo
from kvolt.core.endpoints import KV_TOPIC
from kvolt.core.errors import KvoltError
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import KvEventBatch
from kvolt.router.index.prefix_index import BlockIndex
from kvolt.router.ingest.feed import (
    BUFFER_BYTES,
    Action,
    Apply,
    Check,
    Clear,
    Compared,
    Doubted,
    Feed,
    FeedState,
    IngestStats,
    Input,
    Quiet,
    Refused,
    Replace,
    Told,
)
from kvolt.router.ingest.pools import POOL_RANKS, NamedPools, PoolShares, is_pool
from kvolt.router.ingest.recovery import ask_worker
from kvolt.router.ingest.slots import InstanceSlots
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.events.port import EventStream
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_FREE_ANSWERS = 2
"""A worker may be asked so often in a row without a pause: for its events, then for all."""


class _Envelope(msgspec.Struct, frozen=True):
    """A KvEventBatch of which only the sender is read: most of what is heard may be of other models."""

    instance: InstanceId | None = None


_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_batch = msgspec.msgpack.Decoder(KvEventBatch).decode
_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode


class IngestOptions(msgspec.Struct, frozen=True, kw_only=True):
    quiet_s: float = 5.0
    """A worker of which nothing was heard for this long is asked whether there was anything."""
    max_asked: int = 16
    """Workers asked at a time."""
    buffer_bytes: int = BUFFER_BYTES
    """Events of one worker kept while what came before them is asked for."""
    first_pause_s: float = 0.1
    """Before a worker that did not answer is asked again; doubled each time."""
    max_pause_s: float = 5.0
    deadlines: Deadlines = Deadlines(connect_s=2.0, first_s=5.0, between_s=5.0, total_s=30.0)


@dataclass(slots=True)
class _Followed:
    """One worker, or pool, whose events are taken."""

    instance: Instance
    feed: Feed
    slots: InstanceSlots
    asking: asyncio.Task[None] | None = None
    was_heard: bool = False


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
        self._followed: dict[InstanceId, _Followed] = {}
        self._refused: dict[InstanceId, str] = {}
        """Workers whose events are of no use here, and why."""
        self._at_once = asyncio.Semaphore(self._options.max_asked)
        self._crew = Crew(f"kv ingest {client.endpoint}")
        self._stream: EventStream | None = None
        self._pools = NamedPools(runtime, client.endpoint.namespace, self._on_instances)
        self._shares = PoolShares()
        self.slots_version = 0
        """Another one whenever a worker has got or lost its places in the index."""
        self.stats = IngestStats()

    def start(self) -> None:
        """Listen first: what a worker tells after it was asked for all must not be missed."""
        self._stream = self._runtime.events.subscribe(KV_TOPIC)
        self._crew.start(self._read(self._stream), "events")
        self._crew.start(self._look_after(), "quiet workers")
        self._client.on_change(self._on_instances)
        self._on_instances()

    async def close(self) -> None:
        """Gives the places in the index back. Safe to repeat."""
        await self._crew.close()
        await self._pools.close()
        if self._stream is not None:
            await self._stream.aclose()
        while self._followed:
            self._followed.popitem()[1].slots.close()
            self.slots_version += 1

    # --- what a router asks

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        """How many blocks of a prompt, from the first on, each slot holds on its device."""
        return self._index.find(hashes)

    def find_below(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32] | None:
        """By tier, with what a worker's pool has; None where nobody tells of one below its device."""
        if not self.stats.tells_below:
            return None
        below = self._index.find_own(hashes)
        self._shares.count(below)
        return below

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        """None where nothing is known of it."""
        followed = self._followed.get(instance_id)
        return None if followed is None else followed.slots.of(dp_rank)

    def resync(self, instance_id: InstanceId) -> None:
        """Ask a worker for all that it holds. Not an error for one whose events are not taken."""
        followed = self._followed.get(instance_id)
        if followed is not None:
            self._hand(followed, Doubted())

    def state_of(self, instance_id: InstanceId) -> FeedState:
        followed = self._followed.get(instance_id)
        return FeedState.NO_EVENTS if followed is None else followed.feed.state

    def why_refused(self, instance_id: InstanceId) -> str | None:
        """Why the events of a registered worker are not taken."""
        return self._refused.get(instance_id)

    @property
    def num_behind(self) -> int:
        """Events that were heard of and are not in the index yet."""
        return sum(followed.feed.num_behind for followed in self._followed.values())

    @property
    def num_pools(self) -> int:
        """That are followed for these workers."""
        return sum(is_pool(followed.instance) for followed in self._followed.values())

    def num_in(self, state: FeedState) -> int:
        """Registered workers in a state."""
        if state is FeedState.NO_EVENTS:
            return len(self._refused)
        workers = [each for each in self._followed.values() if not is_pool(each.instance)]
        return sum(followed.feed.state is state for followed in workers)

    # --- workers

    def _on_instances(self) -> None:
        if self._crew.closed:
            return
        workers = self._client.instances()
        there = {instance.id: instance for instance in (*workers, *self._pools.named_by(workers))}
        for instance_id in [each for each in self._followed if each not in there]:
            self._leave(self._followed.pop(instance_id))
        for instance_id in [each for each in self._refused if each not in there]:
            del self._refused[instance_id]
        for instance_id, instance in there.items():
            followed = self._followed.get(instance_id)
            if followed is not None:
                followed.instance = instance
            elif instance_id not in self._refused:
                self._meet(instance)
        self._share_pools()

    def _share_pools(self) -> None:
        pairs: list[tuple[int, int]] = []
        for instance_id, followed in self._followed.items():
            name = self._pools.of(instance_id)
            pool = None if name is None else self._followed.get(name)
            if pool is not None:
                pairs += ((slot, pool.slots.all[0]) for slot in followed.slots.all)
        self._shares = PoolShares(pairs)

    def _meet(self, instance: Instance) -> None:
        try:
            ranks = POOL_RANKS if is_pool(instance) else self._checked_info(instance).dp_ranks
            slots = InstanceSlots(self._index, ranks, self.stats)
        except ValueError as error:
            self._refused[instance.id] = str(error)
            log.warning("the KV events of %s (%s) are not used: %s", instance.process, instance.id, error)
            return
        self.slots_version += 1
        feed = Feed(self.stats, self._options.buffer_bytes)
        followed = self._followed[instance.id] = _Followed(instance, feed, slots)
        self._ask_if_needed(followed)

    def _checked_info(self, instance: Instance) -> EngineInfo:
        """ValueError says why its blocks cannot be compared with a prompt's, and what helps."""
        try:
            info = _decode_info(instance.info)
        except MALFORMED:
            raise ValueError("what it says of itself cannot be read (is it of another version?)") from None
        if info.hash_scheme != HASH_SCHEME:
            raise ValueError(
                f"it names blocks by {info.hash_scheme!r}, this router by {HASH_SCHEME!r}: "
                "run the same version of kvolt on both"
            )
        if info.block_size != self._block_size:
            raise ValueError(
                f"its blocks have {info.block_size} tokens, this router's {self._block_size}: "
                "start it with the block size of its model's card"
            )
        if not info.tells_kv:
            raise ValueError(f"its engine ({info.engine}) tells none")
        return info

    def _leave(self, followed: _Followed) -> None:
        if followed.asking is not None:
            followed.asking.cancel()
        followed.slots.close()
        self.slots_version += 1

    # --- events

    async def _read(self, stream: EventStream) -> None:
        async for event in stream:
            self._on_payload(event.payload)

    def _on_payload(self, payload: bytes) -> None:
        try:
            sender = _decode_envelope(payload).instance
            followed = None if sender is None else self._followed.get(sender)
            if followed is None:
                return  # of another endpoint; or not registered yet, and then it will be asked for all
            batch = _decode_batch(payload)
        except MALFORMED as error:
            self.stats.num_malformed += 1
            log.debug("a batch of KV events cannot be read: %s", error)
            return
        followed.was_heard = True
        self._hand(followed, Told(batch, len(payload)))

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(self._options.quiet_s * self._rng.uniform(0.75, 1.25))
            for followed in list(self._followed.values()):
                if not followed.was_heard:
                    self._hand(followed, Quiet())
                followed.was_heard = False

    def _hand(self, followed: _Followed, event: Input) -> None:
        """All of it within one tick: nobody sees the index in between."""
        for action in followed.feed.handle(event):
            self._perform(followed, action)
        self._ask_if_needed(followed)

    def _perform(self, followed: _Followed, action: Action) -> None:
        match action:
            case Apply(events):
                followed.slots.apply(events)
            case Replace(blocks):
                followed.slots.replace(blocks)
            case Clear():
                followed.slots.clear()
            case Check(digests):
                followed.feed.handle(Compared(followed.slots.compare(digests)))

    # --- questions

    def _ask_if_needed(self, followed: _Followed) -> None:
        if followed.feed.question is not None and followed.asking is None:
            followed.asking = self._crew.start(self._ask(followed), f"ask {followed.instance.id}")

    async def _ask(self, followed: _Followed) -> None:
        """Until there is nothing left to ask. Which question it is shows when its turn comes."""
        pause_s, num_asked = self._options.first_pause_s, 0
        try:
            while followed.feed.question is not None:
                was_answered = await self._ask_once(followed)
                num_asked += 1
                if followed.feed.question is None or (was_answered and num_asked < _FREE_ANSWERS):
                    continue
                await asyncio.sleep(pause_s * self._rng.uniform(0.75, 1.25))
                pause_s = min(pause_s * 2, self._options.max_pause_s)
        finally:
            followed.asking = None

    async def _ask_once(self, followed: _Followed) -> bool:
        """Whether there was an answer."""
        async with self._at_once:
            question = followed.feed.question
            if question is None:
                return True
            instance = followed.instance
            try:
                answer = await ask_worker(self._runtime.plane, instance, question, self._options.deadlines)
            except KvoltError as error:
                self.stats.num_failures += 1
                log.debug(
                    "%s (%s) cannot be asked for its KV events: %r", instance.process, instance.id, error
                )
                return False
        followed.was_heard = True
        self._hand(followed, answer)
        if isinstance(answer, Refused) and followed.feed.question is None:
            log.warning(
                "%s (%s) cannot list the blocks that it holds: only blocks stored from now on are indexed",
                instance.process,
                instance.id,
            )
        return True
