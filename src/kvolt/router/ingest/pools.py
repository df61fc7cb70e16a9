"""KV pools shared by workers: discovery, and index lookups that include them.

A pool publishes its blocks itself, once, and has an index slot like a worker (ADR 19). Discovery starts when a worker
names a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.core.endpoints import CONTROL, KV_POOL, EndpointAddress, Instance
from kvolt.core.errors import MALFORMED
from kvolt.core.ids import InstanceId
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import TaskGroup

POOL_RANKS = (0,)


class _PoolField(msgspec.Struct, frozen=True):
    """The only field of an EngineInfo that is decoded here."""

    kv_pool: InstanceId | None = None


_decode_pool_field = msgspec.msgpack.Decoder(_PoolField).decode


def is_pool(instance: Instance) -> bool:
    return instance.endpoint.component == KV_POOL


class WorkerPools:
    """Pools that the workers of an endpoint use."""

    def __init__(self, runtime: Runtime, namespace: str, on_change: Callable[[], None]) -> None:
        """`on_change` is called when the reachable pools may have changed."""
        self._runtime = runtime
        self._endpoint = EndpointAddress(namespace, KV_POOL, CONTROL)
        self._on_change = on_change
        self._client: EndpointClient | None = None
        self._is_discovering = False
        self._task_group = TaskGroup(f"pools of {namespace}")
        self._by_worker: dict[InstanceId, tuple[Instance, InstanceId | None]] = {}

    def pool_of(self, worker: InstanceId) -> InstanceId | None:
        """Pool that a worker registered last."""
        entry = self._by_worker.get(worker)
        return None if entry is None else entry[1]

    def select(self, workers: Sequence[Instance]) -> list[Instance]:
        """Return the reachable pools that these workers name. Unreachable ones count for no worker."""
        before, self._by_worker = self._by_worker, {}
        for worker in workers:
            entry = before.get(worker.id)
            if entry is None or entry[0] is not worker:  # decode a registration once
                entry = (worker, _pool_of(worker))
            self._by_worker[worker.id] = entry
        names = {pool for _, pool in self._by_worker.values() if pool is not None}
        if names and not self._is_discovering and not self._task_group.closed:
            self._is_discovering = True
            self._task_group.start(self._discover(), "look")
        reachable = [] if self._client is None else self._client.candidates()
        return [each for each in reachable if each.id in names]

    async def _discover(self) -> None:
        self._client = await self._runtime.client(self._endpoint)
        self._client.on_change(self._on_change)
        self._on_change()

    async def close(self) -> None:
        await self._task_group.close()
        if self._client is not None:
            await self._client.close()


class PoolSharing:
    """Index slots of workers with the slots of their pools. Pure."""

    def __init__(self, pairs: Sequence[tuple[int, int]] = ()) -> None:
        """`pairs`: slots of a worker and of its pool."""
        num_slots = max((max(pair) for pair in pairs), default=-1) + 1
        self._pool_of_slot = np.arange(num_slots, dtype=np.intp)
        """Pool slot for each worker slot, itself without a pool: one gather over all slots is much cheaper
        than writes to some of them."""
        for worker, pool in pairs:
            self._pool_of_slot[worker] = pool

    def add_pool_blocks(self, below: npt.NDArray[np.int32]) -> None:
        """Raise the blocks of each worker in tiers below the device to those of its pool. Blocks in both count once."""
        if len(self._pool_of_slot):
            lower = below[1:, : len(self._pool_of_slot)]
            np.maximum(lower, lower.take(self._pool_of_slot, axis=1), out=lower)


def _pool_of(worker: Instance) -> InstanceId | None:
    try:
        return _decode_pool_field(worker.info).kv_pool
    except MALFORMED:
        return None
