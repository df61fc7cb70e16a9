"""PoolEventPublisher: publishes the blocks of a shared pool to routers, once for all workers that reach it.

In the pool's process. The same journal as a worker's, and the same answers to routers that missed something: to them a
pool is one more who holds blocks, and no request goes to it. Who reaches it the workers say (`tell_pool`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

from kvolt.core.endpoints import CONTROL, KV_POOL, KV_TOPIC
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import KvChange
from kvolt.core.kv_recovery import KvAnswer, KvQuestion
from kvolt.kv.shared_pool.server import PoolServer
from kvolt.kv.shared_pool.tier import PoolTier
from kvolt.kv.tiers.host_tier import HostTier
from kvolt.router.ingest.recovery import MAX_BLOCKS
from kvolt.runtime.endpoint.address import EndpointAddress
from kvolt.runtime.runtime import Runtime
from kvolt.worker.control import recall
from kvolt.worker.held_blocks import Holdings
from kvolt.worker.kv_event_publisher import KvJournal
from kvolt.worker.tier_event_publisher import in_parts


class PoolEventPublisher:
    """See the module. `start`, then `follow` a server before that starts."""

    def __init__(self, runtime: Runtime, namespace: str) -> None:
        self._runtime = runtime
        self._endpoint = EndpointAddress(namespace, KV_POOL, CONTROL)
        self.journal: KvJournal | None = None

    async def start(self) -> InstanceId:
        """Routers find it from now on, by a name that no pool had before: what was known of one that ran here until
        now goes with its name."""
        runtime = self._runtime
        registered = await runtime.serve(self._endpoint, self._answer, KvQuestion)
        self.journal = KvJournal(
            runtime.ports.rng.getrandbits(63),
            registered.id,
            lambda payload: runtime.events.publish(KV_TOPIC, payload),
            holdings=Holdings(MAX_BLOCKS),  # as many as a router takes: a pool is larger than a worker
        )
        return registered.id

    def follow(self, server: PoolServer, name: InstanceId) -> None:
        """Tell what this pool has, under the name that `start` gave; workers that come to it are told the name."""
        server.name = name
        server.on_change = lambda: self.tell([] if server.host is None else server.host.take_changes())
        self._runtime.add_details("pool", lambda: _sizes(server.host))

    def tell(self, changes: Iterable[KvChange]) -> None:
        assert self.journal is not None, "start() first"
        for change in changes:
            for part in in_parts(change):
                self.journal.record((part,))

    async def _answer(self, question: KvQuestion) -> AsyncIterator[KvAnswer]:
        for part in recall(self.journal, None, question):
            yield part


def _sizes(host: HostTier | None) -> dict[str, int]:
    """Blocks in each tier, for who asks how it is."""
    return {} if host is None else {tier.value: host.size(tier)[0] for tier in host.stats}


async def tell_pool(host: HostTier, register_anew: Callable[..., Awaitable[None]]) -> None:
    """In a worker's process: say which pool it reaches, now and whenever that changes, until this is cancelled."""
    pool = next((each for each in host.lower if isinstance(each, PoolTier)), None)
    if pool is None:
        return
    has_changed = asyncio.Event()
    pool.on_pool(has_changed.set)
    while True:
        has_changed.clear()
        await register_anew(kv_pool=pool.pool)
        await has_changed.wait()
