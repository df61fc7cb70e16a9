"""GossipLink: publishes and receives the gossip of one router over the event plane; see `loads`."""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvolt.core.endpoints import ROUTER_LOAD_TOPIC
from kvolt.core.errors import MALFORMED
from kvolt.router.gossip.loads import GossipOptions, LoadPublisher, LoadVector, ReplicaLoads
from kvolt.router.kv_router import KvRouter
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.events.port import EventStream
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)


class _Envelope(msgspec.Struct, frozen=True):
    """The endpoint of a LoadVector. Decoded first: a process has a router per model."""

    endpoint: str


_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_vector = msgspec.msgpack.Decoder(LoadVector).decode
_encode = msgspec.msgpack.Encoder().encode


class GossipLink:
    """See the module. `start`, then `close`."""

    def __init__(
        self,
        client: EndpointClient,
        runtime: Runtime,
        router: KvRouter,
        options: GossipOptions | None = None,
    ) -> None:
        self._client = client
        self._runtime = runtime
        self._router = router
        self._options = options or GossipOptions()
        self._endpoint = str(client.endpoint)
        self._clock = runtime.ports.clock
        # The publisher id changes with each start of a process, which may create a router for an endpoint repeatedly.
        epoch = int(self._clock.wall() * 1000)
        self._publisher = LoadPublisher(self._endpoint, runtime.events.publisher, epoch, self._options)
        self._task_group = TaskGroup(f"gossip {client.endpoint}")
        self._stream: EventStream | None = None
        self._has_replicas = asyncio.Event()
        """Another replica was received."""
        self.replicas = ReplicaLoads(runtime.events.publisher)
        self.num_published = 0

    def start(self) -> None:
        self._stream = self._runtime.events.subscribe(ROUTER_LOAD_TOPIC)
        self._client.on_change(self.replicas.mark_all_changed)
        self._task_group.start(self._read(self._stream), "read")
        self._task_group.start(self._run(), "publish")

    async def close(self) -> None:
        """Publish the final vector if started. Idempotent."""
        await self._task_group.close()
        if self._stream is not None:
            self._publish(self._publisher.leave())
            await self._stream.aclose()
            self._stream = None

    async def _read(self, stream: EventStream) -> None:
        async for event in stream:
            try:
                if _decode_envelope(event.payload).endpoint != self._endpoint:
                    continue
                vector = _decode_vector(event.payload)
            except MALFORMED as error:
                log.debug("load vector dropped: %s", error)
                continue
            self.replicas.receive(vector, self._clock.monotonic())
            if self.replicas.num_replicas:
                self._has_replicas.set()
            self._apply()

    async def _run(self) -> None:
        options, replicas = self._options, self.replicas
        while True:
            now = self._clock.monotonic()
            for name in replicas.expire(now):
                log.info("router replica lost: replica=%s", name)
            self._apply()
            vector = self._publisher.due(self._router.own_loads(), now, is_alone=not replicas.num_replicas)
            if vector is not None:
                self._publish(vector)
            if replicas.num_replicas or self._publisher.is_announcing:
                await asyncio.sleep(options.period_s)
            else:
                await self._wait_for_replicas(options.heartbeat_s)

    async def _wait_for_replicas(self, timeout_s: float) -> None:
        """Wait for another replica: most deployments have one router and nothing to publish."""
        self._has_replicas.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_replicas.wait()
        except TimeoutError:
            pass

    def _publish(self, vector: LoadVector) -> None:
        self.num_published += 1
        self._runtime.events.publish(ROUTER_LOAD_TOPIC, _encode(vector))

    def _apply(self) -> None:
        now = self._clock.monotonic()
        for worker_rank in self.replicas.pop_changed():
            self._router.set_replica_load(self.replicas.total(worker_rank, now))
