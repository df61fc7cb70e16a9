"""Publishes KV events of a shared pool to routers, once for all workers that can reach it.

Runs in the pool's process, with the same journal and recovery as a worker. For routers a pool is one more holder of
blocks that gets no requests; workers register which pool they reach (`watch_pool`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from kvolt.core.endpoints import CONTROL, KV_POOL, KV_TOPIC, EndpointAddress
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import KvChange
from kvolt.core.kv_recovery import KvRecoveryRequest, KvRecoveryResponse
from kvolt.kv.shared_pool.server import PoolServer
from kvolt.kv.shared_pool.tier import PoolTier
from kvolt.kv.tiers.host_tier import HostTier
from kvolt.router.ingest.recovery import MAX_BLOCKS
from kvolt.runtime.runtime import Runtime
from kvolt.worker.kv.event_publisher import KvJournal, answer_recovery, split_change
from kvolt.worker.kv.held_blocks import HeldBlocks


class PoolEventPublisher:
    """See the module. Call `start`, then `attach` a server before the server starts."""

    def __init__(self, runtime: Runtime, namespace: str) -> None:
        self._runtime = runtime
        self._endpoint = EndpointAddress(namespace, KV_POOL, CONTROL)
        self.journal: KvJournal | None = None

    async def start(self) -> InstanceId:
        """Register the pool under a new id and return it. Routers drop the blocks of a previous id."""
        runtime = self._runtime
        registered = await runtime.serve(self._endpoint, self._recover, KvRecoveryRequest)
        self.journal = KvJournal(
            runtime.ports.rng.getrandbits(63),
            registered.id,
            lambda payload: runtime.events.publish(KV_TOPIC, payload),
            held_blocks=HeldBlocks(MAX_BLOCKS),  # a router's bound: a pool is larger than a worker
        )
        return registered.id

    def attach(self, server: PoolServer, name: InstanceId) -> None:
        """Publish changes of this server under the id returned by `start`."""
        server.name = name
        server.on_change = lambda: self.publish([] if server.host is None else server.host.take_changes())
        self._runtime.add_status_details("pool", lambda: _sizes(server.host))

    def publish(self, changes: Iterable[KvChange]) -> None:
        assert self.journal is not None, "start() first"
        for change in changes:
            for part in split_change(change):
                self.journal.record((part,))

    async def _recover(self, request: KvRecoveryRequest) -> AsyncIterator[KvRecoveryResponse]:
        for part in answer_recovery(self.journal, None, request):
            yield part


def _sizes(host: HostTier | None) -> dict[str, int]:
    """Blocks per tier, for the status page."""
    return {} if host is None else {tier.value: host.size(tier)[0] for tier in host.stats}


async def watch_pool(host: HostTier, update_registration: Callable[..., Awaitable[None]]) -> None:
    """Runs in a worker: register which pool it reaches, now and after each change, until cancelled."""
    pool = next((each for each in host.lower if isinstance(each, PoolTier)), None)
    if pool is None:
        return
    has_changed = asyncio.Event()
    pool.set_on_pool(has_changed.set)
    while True:
        has_changed.clear()
        await update_registration(kv_pool=pool.pool)
        await has_changed.wait()
