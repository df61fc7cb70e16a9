"""The pools that workers share: which of them workers name, and what they have, counted for who reaches them.

A pool tells of its blocks itself, once, and has a place in the index like a worker (ADR 19). Nothing is looked for
until a worker names one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.core.endpoints import CONTROL, KV_POOL
from kvolt.core.ids import InstanceId
from kvolt.runtime.endpoint.address import EndpointAddress, Instance
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import Crew

POOL_RANKS = (0,)


class _Named(msgspec.Struct, frozen=True):
    """An EngineInfo of which only this is read."""

    kv_pool: InstanceId | None = None


_decode_named = msgspec.msgpack.Decoder(_Named).decode


def is_pool(instance: Instance) -> bool:
    return instance.endpoint.component == KV_POOL


class NamedPools:
    """The pools that the workers of an endpoint reach."""

    def __init__(self, runtime: Runtime, namespace: str, on_change: Callable[[], None]) -> None:
        """`on_change`: told when there may be others than before."""
        self._runtime = runtime
        self._endpoint = EndpointAddress(namespace, KV_POOL, CONTROL)
        self._on_change = on_change
        self._client: EndpointClient | None = None
        self._is_looking = False
        self._crew = Crew(f"pools of {namespace}")
        self._of_workers: dict[InstanceId, tuple[Instance, InstanceId | None]] = {}

    def of(self, worker: InstanceId) -> InstanceId | None:
        """The one that it named last."""
        known = self._of_workers.get(worker)
        return None if known is None else known[1]

    def named_by(self, workers: Sequence[Instance]) -> list[Instance]:
        """Those that these workers name and that can be reached: what cannot be asked is not counted for anybody."""
        before, self._of_workers = self._of_workers, {}
        for worker in workers:
            known = before.get(worker.id)
            if known is None or known[0] is not worker:  # a registration is read once
                known = (worker, _pool_of(worker))
            self._of_workers[worker.id] = known
        names = {pool for _, pool in self._of_workers.values() if pool is not None}
        if names and not self._is_looking and not self._crew.closed:
            self._is_looking = True
            self._crew.start(self._look(), "look")
        there = [] if self._client is None else self._client.candidates()
        return [each for each in there if each.id in names]

    async def _look(self) -> None:
        self._client = await self._runtime.client(self._endpoint)
        self._client.on_change(self._on_change)
        self._on_change()

    async def close(self) -> None:
        await self._crew.close()
        if self._client is not None:
            await self._client.close()


class PoolShares:
    """Whose blocks count for whom, by places in an index. Pure."""

    def __init__(self, pairs: Sequence[tuple[int, int]] = ()) -> None:
        """Places of a worker and of its pool."""
        num_places = max((max(pair) for pair in pairs), default=-1) + 1
        self._also = np.arange(num_places, dtype=np.intp)
        """For each place another one whose blocks count there, or itself: this is read at a fraction of the cost of
        writing to some places only."""
        for worker, pool in pairs:
            self._also[worker] = pool

    def count(self, below: npt.NDArray[np.int32]) -> None:
        """Into what was found, by tiers, the device first: a worker has what its pool has there, if that is more. What
        it has itself, too, is not there twice."""
        if len(self._also):
            own = below[1:, : len(self._also)]
            np.maximum(own, own.take(self._also, axis=1), out=own)


def _pool_of(worker: Instance) -> InstanceId | None:
    try:
        return _decode_named(worker.info).kv_pool
    except MALFORMED:
        return None
