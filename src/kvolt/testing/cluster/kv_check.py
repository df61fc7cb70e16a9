"""KV invariants of a virtual cluster: block contents, router indexes, and blocks held by idle workers.

Expected values come from the requests and the published events, not from the code under test: block contents follow
from the tokens of all requests, an index from a replica of each worker's event stream. Reads internals of engines,
tiers and routers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

import msgspec

from kvolt.core.block_key import BlockKeyChain
from kvolt.core.ids import BlockKey, InstanceId
from kvolt.core.kv_events import TIER_LEVEL, Cleared, KvChange, KvEventBatch, Removed, Stored, Tier, mix_hash
from kvolt.core.request import Request
from kvolt.engines.sim.engine import SimEngine
from kvolt.engines.sim.kv import BLOCK_BYTES, ExpectedKv, key_context
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.tiers.host_tier import int64_array
from kvolt.kv.tiers.slot_table import SlotTable
from kvolt.router.event_fed_router import EventFedRouter
from kvolt.router.ingest.feed import FeedState
from kvolt.worker.kv.handoffs import Handoffs
from kvolt.worker.kv.tiering import Tiering
from kvolt.worker.worker import Worker

_COPIES = BLOCK_BYTES // 16

_decode_batch = msgspec.msgpack.Decoder(KvEventBatch).decode

Digest = tuple[int, int]
"""Number of blocks and the xor of their mixed hashes, as in `KvDigest`."""


class BlockContents:
    """Expected contents of every block that a request of the cluster can fill, by key."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._contents: dict[BlockKey, bytes] = {}

    def add_request(self, request: Request, answer: Sequence[int]) -> None:
        tokens = [*request.token_ids, *answer]
        keys = BlockKeyChain(key_context(request.model, self._block_size, request)).extend(tokens)
        expected = ExpectedKv(request.model, self._block_size, request)
        expected.reach(tokens, len(keys))
        filled = (fingerprint * _COPIES for fingerprint in expected.fingerprints)
        self._contents.update(zip(keys, filled, strict=True))

    def is_right(self, key: BlockKey, data: bytes | memoryview) -> bool:
        return self._contents.get(key) == data


@dataclass(slots=True)
class _Replica:
    """Blocks that one worker has published, by tier."""

    epoch: int
    blocks: dict[Tier, set[int]] = field(default_factory=dict)
    digests: dict[Tier, int] = field(default_factory=dict)
    history: dict[int, dict[Tier, Digest]] = field(default_factory=dict)
    """State before each event that starts a batch, by event id."""

    def apply(self, batch: KvEventBatch) -> None:
        for event in batch.events:
            self._apply(event.change)
        state = {tier: (len(self.blocks[tier]), self.digests[tier]) for tier in self.blocks}
        self.history[batch.events[-1].event_id + 1] = state

    def _apply(self, change: KvChange) -> None:
        match change:
            case Stored():
                self._flip(change.tier, set(change.sequence_hashes) - self._of(change.tier))
            case Removed():
                self._flip(change.tier, set(change.sequence_hashes) & self._of(change.tier))
            case Cleared():
                for tier in list(self.blocks) if change.tier is None else [change.tier]:
                    self._flip(tier, set(self._of(tier)))

    def _of(self, tier: Tier) -> set[int]:
        return self.blocks.setdefault(tier, set())

    def _flip(self, tier: Tier, hashes: Set[int]) -> None:
        self.blocks[tier] ^= hashes
        digest = self.digests.get(tier, 0)
        for each in hashes:
            digest ^= mix_hash(each)
        self.digests[tier] = digest


class EventReplicas:
    """Replicas of all workers, from every published batch, including lost ones."""

    def __init__(self) -> None:
        self._replicas: dict[InstanceId, _Replica] = {}

    def add_batch(self, payload: bytes) -> None:
        batch = _decode_batch(payload)
        if batch.instance is None or not batch.events:
            return
        epoch = batch.events[0].epoch
        replica = self._replicas.get(batch.instance)
        if replica is None or replica.epoch != epoch:
            replica = self._replicas[batch.instance] = _Replica(epoch)
        replica.apply(batch)

    def digests(self, instance: InstanceId, epoch: int | None, next_id: int) -> dict[Tier, Digest] | None:
        """State before event `next_id`; None if no batch ends there, which is a defect."""
        if next_id == 0:
            return {}
        replica = self._replicas.get(instance)
        return None if replica is None or replica.epoch != epoch else replica.history.get(next_id)


class KvCheck:
    """Calls `fail` for each broken invariant."""

    def __init__(self, fail: Callable[[str], None], block_size: int) -> None:
        self._fail = fail
        self.contents = BlockContents(block_size)
        self.events = EventReplicas()
        self.damaged: set[tuple[InstanceId, BlockKey]] = set()
        """Blocks with an injected bit flip in the host tier of a worker."""

    # --- at any time

    def check_blocks(self, name: str, worker: Worker) -> None:
        """Check that every cached block has the contents of its key."""
        engine, tiering = _engine(worker), worker.tiering
        pool, memory = engine._scheduler.pool, engine._memory
        for key, block in pool._by_key.items():
            if not self.contents.is_right(key, memory.read(block)):
                self._fail(f"{name} has wrong KV in block {block}, cached as {key.hex()}")
        if tiering is None:
            return
        host = tiering.cache.host
        keys = list(host.slot_table)
        for part, slots, which in host.memory.by_part(int64_array(map(host.slot_table.slot, keys))):
            for slot, place in zip(slots.tolist(), which.tolist(), strict=True):
                key, start = keys[place], slot * host.shape.slot_bytes
                data = part.memory[start : start + host.shape.block_bytes]
                if not self.contents.is_right(key, data) and (worker._instance, key) not in self.damaged:
                    self._fail(f"{name} has wrong KV in its host tier for {key.hex()}")

    def check_feeds(self, name: str, router: EventFedRouter) -> None:
        """Check that an exact index equals the worker's published state at the last applied event."""
        for instance, source in router.ingest._sources.items():
            feed = source.feed
            slot = source.slots.slot_of(0)
            if feed.state is not FeedState.EXACT or slot is None:
                continue
            expected = self.events.digests(instance, feed._epoch, feed._next_id)
            if expected is None:
                self._fail(f"{name}: index of {instance} is marked exact but not at the end of a batch")
                continue
            for tier, level in TIER_LEVEL.items():
                if router.block_index.digest(slot, level) != expected.get(tier, (0, 0)):
                    self._fail(f"{name}: {tier} index of {instance} is marked exact but differs")

    # --- in an idle cluster

    def check_index(self, name: str, router: EventFedRouter, workers: Iterable[Worker]) -> None:
        """Check that a router follows every registered worker and that its index equals their blocks."""
        ingest = router.ingest
        registered = {each.id for each in ingest._client.instances()}
        if registered != ingest._sources.keys():
            self._fail(f"{name} follows {sorted(ingest._sources)} but {sorted(registered)} are registered")
        for worker in workers:
            instance = worker._instance
            slot = ingest.slot_of(instance)
            if slot is None:
                continue  # another role
            if ingest.state_of(instance) is not FeedState.EXACT:
                self._fail(f"{name}: index of {instance} is {ingest.state_of(instance)} in an idle cluster")
            for tier, held in _blocks_of(worker).items():
                if set(router.block_index.contents(slot, TIER_LEVEL[tier])) != held:
                    self._fail(f"{name}: {tier} index of {instance} differs from its blocks")

    def check_released(self, name: str, worker: Worker) -> None:
        """Check that every block of a worker is either free or cached, and that nothing is held."""
        for what in _held(worker):
            self._fail(f"{name} still has {what}")
        try:
            _engine(worker)._scheduler.check_integrity()
            if worker.tiering is not None:
                self._check_tiers(name, worker.tiering)
        except AssertionError as error:
            self._fail(f"{name}: {error or 'inconsistent block accounting'}")

    def _check_tiers(self, name: str, tiering: Tiering) -> None:
        host = tiering.cache.host
        host.check_integrity()
        num_corrupt = sum(stats.failures["corrupt"] for stats in host.stats.values())
        if num_corrupt and not self.damaged:
            self._fail(f"{name} found {num_corrupt} corrupt blocks in its tiers without an injected fault")

    # --- faults

    def damage_tier(self, rng: random.Random, workers: Iterable[Worker]) -> None:
        """Flip a bit of one block in a host tier."""
        tiers = [(each._instance, each.tiering.cache.host) for each in workers if each.tiering is not None]
        blocks = [(instance, host, key) for instance, host in tiers for key in host.slot_table]
        if blocks:
            instance, host, key = rng.choice(blocks)
            host.memory.block(host.slot_table.slot(key))[0] ^= 1
            self.damaged.add((instance, key))


def _engine(worker: Worker) -> SimEngine:
    engine = worker._engine
    assert isinstance(engine, SimEngine)
    return engine


def _blocks_of(worker: Worker) -> dict[Tier, set[int]]:
    held: dict[Tier, set[int]] = {tier: set() for tier in TIER_LEVEL}
    held[Tier.DEVICE] = {
        each for stored in _engine(worker)._scheduler.pool.contents() for each in stored.sequence_hashes
    }
    for table in _slot_tables(worker.tiering):
        held[table.tier] = {table.block(key).sequence_hash for key in table}
    return held


def _slot_tables(tiering: Tiering | None) -> list[SlotTable]:
    if tiering is None:
        return []
    host = tiering.cache.host
    return [host.slot_table, *(each.slot_table for each in host.lower if isinstance(each, DiskTier))]


def _held(worker: Worker) -> Iterator[str]:
    """Counts of what is still held for requests or transfers, in words."""
    engine, tiering, handoffs = _engine(worker), worker.tiering, worker.handoffs
    counts = {
        "holds for handoffs or copies": sum(1 for _ in engine._scheduler.holds),
        "blocks kept for submitted requests": engine._scheduler.prefetched.num_blocks,
        "prefills in progress": engine._prefills.num_in_progress,
        "hold deadlines": len(engine._prefills._expiry),
        "offers of KV": len(handoffs._offers) if isinstance(handoffs, Handoffs) else 0,
    }
    if tiering is not None:
        counts["requests with onboarding in progress"] = tiering._num_onboarding + len(tiering._concurrent)
        counts["blocks being read from a tier"] = len(tiering.cache.host._loading)
    for table in _slot_tables(tiering):
        entries = table._entries.values()
        counts[f"blocks held in the {table.tier} tier"] = sum(entry.num_holders > 0 for entry in entries)
        counts[f"invalid blocks in the {table.tier} tier"] = len(table._invalid)
    return (f"{number} {what}" for what, number in counts.items() if number)
