"""Gossip between router replicas: the load that other routers have reserved on shared workers. Pure.

Routers that share workers without a router process publish their own reservations: numbered vectors with the complete
load of one router per worker rank. Since a vector is a state and no change, the next one repairs any loss. A router
with reservations publishes every period. A new router announces itself repeatedly, so that it knows all others one
period later; a router without peers sends heartbeats only. A silent router expires with the TTL of its last vector.

    own load       LoadPublisher: when to publish which vector   -> LoadVector ->
    other routers  ReplicaLoads: latest vector of each, summed   <- LoadVector <-
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvolt.router.worker_rank import ReservedLoad, WorkerDpRank

MAX_REPLICAS = 256
MAX_LOADS = 16_384
"""Worker ranks per vector; about one megabyte."""
_MAX_TTL_S = 60.0
"""Upper bound of a replica's TTL."""

_Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]


class LoadVector(msgspec.Struct, frozen=True, omit_defaults=True):
    """All reservations of one router at the workers of one endpoint. Worker ranks not named have none."""

    endpoint: str
    replica: str
    epoch: int
    """Increases with each start of the replica."""
    version: int
    """Increases with each vector of an epoch."""
    ttl_s: Annotated[float, msgspec.Meta(ge=0.0)]
    """Lifetime of this vector without a newer one; 0 when the replica leaves."""
    loads: Annotated[tuple[ReservedLoad, ...], msgspec.Meta(max_length=MAX_LOADS)] = ()


class GossipOptions(msgspec.Struct, frozen=True, kw_only=True):
    period_s: float = 0.1
    """Minimum interval between vectors, and the interval while anything is reserved."""
    heartbeat_s: float = 1.0
    """Interval of vectors from a router without reservations or without peers."""
    announcements: int = 20
    """Vectors that a new router publishes in a row: the first may have no listener yet."""
    ttl_periods: int = 10
    """TTL of a vector in periods."""
    repeats: int = 2
    """Repetitions of an empty vector after the last reservation ended, since any may be lost."""


class LoadPublisher:
    """Decides when to publish which vector. Call `due` once per period."""

    def __init__(self, endpoint: str, replica: str, epoch: int, options: GossipOptions) -> None:
        self._endpoint = endpoint
        self._replica = replica
        self._epoch = epoch
        self._options = options
        self._version = 0
        self._repeats_left = options.announcements
        self._published_at = 0.0

    @property
    def is_announcing(self) -> bool:
        """Whether the next vector is due without reservations, too."""
        return self._repeats_left > 0

    def due(self, loads: Sequence[ReservedLoad], now: float, is_alone: bool = False) -> LoadVector | None:
        """Vector to publish now, if any. Beyond MAX_LOADS worker ranks only the busiest are included."""
        options = self._options
        ttl_s = 3 * options.heartbeat_s
        if loads and not is_alone:
            self._repeats_left = max(
                self._repeats_left, 2 + options.repeats
            )  # this one and the first empty one
            ttl_s = options.ttl_periods * options.period_s
        elif not self._repeats_left and now < self._published_at + options.heartbeat_s:
            return None
        self._repeats_left = max(self._repeats_left - 1, 0)
        self._published_at = now
        if len(loads) > MAX_LOADS:
            loads = sorted(loads, key=lambda load: -load.requests)[:MAX_LOADS]
        return self._vector(tuple(loads), ttl_s)

    def leave(self) -> LoadVector:
        """Final vector, which ends the replica."""
        return self._vector((), 0.0)

    def _vector(self, loads: tuple[ReservedLoad, ...], ttl_s: float) -> LoadVector:
        self._version += 1
        return LoadVector(self._endpoint, self._replica, self._epoch, self._version, ttl_s, loads)


@dataclass(slots=True)
class _Replica:
    """Latest vector of another router."""

    epoch: int
    version: int
    received_at: float
    until: float
    loads: dict[WorkerDpRank, ReservedLoad]


class ReplicaLoads:
    """Latest load of each replica. Bounded by MAX_REPLICAS vectors of MAX_LOADS worker ranks."""

    def __init__(self, own_id: str, max_replicas: int = MAX_REPLICAS) -> None:
        self._own = own_id
        self._max_replicas = max_replicas
        self._replicas: dict[str, _Replica] = {}
        self._changed: dict[WorkerDpRank, None] = {}
        self.num_refused = 0
        """Vectors of replicas beyond the limit."""

    @property
    def num_replicas(self) -> int:
        """Live replicas, without this one."""
        return len(self._replicas)

    def receive(self, vector: LoadVector, now: float) -> None:
        if vector.replica == self._own:
            return
        replica = self._replicas.get(vector.replica)
        if replica is not None and (vector.epoch, vector.version) <= (replica.epoch, replica.version):
            return  # it arrived after a newer one
        if replica is None and len(self._replicas) >= self._max_replicas:
            self.num_refused += 1
            return
        ttl_s = min(vector.ttl_s, _MAX_TTL_S)
        if ttl_s == 0.0:
            self._drop_replica(vector.replica)
            return
        loads = {load.worker_rank: load for load in vector.loads}
        before = replica.loads if replica is not None else {}
        self._mark_changed(worker_rank for worker_rank in before if worker_rank not in loads)
        self._mark_changed(
            worker_rank for worker_rank, load in loads.items() if before.get(worker_rank) != load
        )
        self._replicas[vector.replica] = _Replica(vector.epoch, vector.version, now, now + ttl_s, loads)

    def expire(self, now: float) -> list[str]:
        """Remove replicas whose TTL has passed; return their names."""
        silent = [name for name, replica in self._replicas.items() if now >= replica.until]
        for name in silent:
            self._drop_replica(name)
        return silent

    def total(self, worker_rank: WorkerDpRank, now: float) -> ReservedLoad:
        """Sum over all replicas for one worker rank."""
        requests = decoding = prefill_tokens = blocks = context_tokens = queue_s = 0.0
        for replica in self._replicas.values():
            load = replica.loads.get(worker_rank)
            if load is not None:
                requests += load.requests
                decoding += load.decoding
                prefill_tokens += load.prefill_tokens
                blocks += load.blocks
                context_tokens += load.context_tokens
                queue_s += max(load.queue_s - (now - replica.received_at), 0.0)
        return ReservedLoad(*worker_rank, requests, decoding, prefill_tokens, blocks, context_tokens, queue_s)

    def pop_changed(self) -> list[WorkerDpRank]:
        """Worker ranks whose load may have changed since the last call."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def mark_all_changed(self) -> None:
        """Mark all worker ranks as changed, because the known workers have changed."""
        for replica in self._replicas.values():
            self._mark_changed(replica.loads)

    def _drop_replica(self, name: str) -> None:
        replica = self._replicas.pop(name, None)
        if replica is not None:
            self._mark_changed(replica.loads)

    def _mark_changed(self, worker_ranks: Iterable[WorkerDpRank]) -> None:
        self._changed.update(dict.fromkeys(worker_ranks))
