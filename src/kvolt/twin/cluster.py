"""The processes of a twin: workers with the sim engine and one frontend, each a host of a virtual network.

Owns how they are put together and taken apart. Everything that runs in them is what runs in real processes; only
the ports are virtual: time, network, chance, blocking calls. Discovery and events are in memory.
"""

from __future__ import annotations

import random
from typing import Annotated, Self

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from kvolt.core.card import card_hash
from kvolt.core.endpoints import GENERATE, component_name
from kvolt.core.request import Role
from kvolt.engines.registry import EngineSpec
from kvolt.engines.sim import SimArguments, SimEngine
from kvolt.engines.worker import Worker
from kvolt.journey.journey import Road
from kvolt.router.policies import ROUTERS
from kvolt.router.port import Router, RouterContext
from kvolt.runtime.address import EndpointAddress
from kvolt.runtime.client import EndpointClient
from kvolt.runtime.clock import new_id
from kvolt.runtime.connection import ConnectionOptions
from kvolt.runtime.connections import tcp_plane
from kvolt.runtime.discovery_mem import MemDiscovery, MemStore
from kvolt.runtime.events_mem import MemBus, MemEvents
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.runtime.tasks import Crew
from kvolt.testing.link import LinkProfile
from kvolt.testing.network import VirtualNetwork
from kvolt.testing.ports import VirtualProcess
from kvolt.twin.watching import ClusterWatch

MODEL = "sim-tiny"
NAMESPACE = "twin"
_START_S = 30.0
_CONNECTIONS = ConnectionOptions(heartbeat_s=3600.0, dead_after_s=3 * 3600.0)
"""No process of a twin falls silent, so that nobody has to ask every second."""


class TwinSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is modelled."""

    num_workers: Annotated[int, Meta(ge=1)] = 1
    gpus_per_worker: Annotated[int, Meta(ge=1)] = 1
    """For GPU-seconds; how fast so many are is in the engine's preset."""
    router: str = next(iter(ROUTERS))
    engine: SimArguments = SimArguments()
    link_s: Annotated[float, Meta(ge=0)] = 0.0001
    """One way between two processes."""
    seed: int = 0
    merge_steps: bool = True
    """So that the cost of a run follows what happens in it, and not how many tokens come of it; the figures stay."""

    def __post_init__(self) -> None:
        if self.router not in ROUTERS:
            raise ValueError(f"unknown router {self.router!r}; known: {', '.join(ROUTERS)}")


class TwinCluster:
    """Use `start`, and `close` at the end; on a virtual loop."""

    def __init__(self, settings: TwinSettings, watch: ClusterWatch) -> None:
        self._settings = settings
        self._watch = watch
        self._network = VirtualNetwork(
            random.Random(f"{settings.seed}/network"), profile=LinkProfile(latency_s=settings.link_s)
        )
        self._store, self._bus = MemStore(), MemBus()
        self._runtimes: list[Runtime] = []
        self._workers: list[Worker] = []
        self._crew = Crew("twin")
        self._router: Router | None = None
        self.engines: list[SimEngine] = []

    @classmethod
    async def start(cls, settings: TwinSettings, watch: ClusterWatch) -> tuple[Self, Road]:
        """All workers registered and reached, and the way to them."""
        cluster = cls(settings, watch)
        try:
            return cluster, await cluster._start()
        except BaseException:
            await cluster.close()
            raise

    async def _start(self) -> Road:
        for number in range(self._settings.num_workers):
            await self._add_worker(f"w{number}")
        frontend = await self._add_process("f0")
        card = self.engines[0].card
        component = component_name(MODEL, Role.AGGREGATED, card_hash(card))
        client = await frontend.client(EndpointAddress(NAMESPACE, component, GENERATE))
        await client.wait_synced(_START_S)
        for instance in client.candidates():  # or the first requests would wait for connections
            await frontend.plane.reach(instance.address, _START_S)
        return self._road(client)

    def _road(self, client: EndpointClient) -> Road:
        context = RouterContext(client, self._runtimes[-1], self._settings.engine.block_size)
        self._router = ROUTERS[self._settings.router](context)
        return Road(self._router, client, self._crew)

    async def close(self) -> None:
        if self._router is not None:
            await self._router.close()
        for runtime in reversed(self._runtimes):
            await runtime.close()
        for worker in self._workers:
            await worker.close()
        await self._crew.close()
        self._network.close()

    async def _add_worker(self, name: str) -> None:
        runtime = await self._add_process(name)
        settings = self._settings
        arguments = replace(settings.engine, merge_steps=settings.merge_steps, paper=True)
        engine = SimEngine(
            EngineSpec(model=MODEL, role=Role.AGGREGATED), arguments, self._watch.add_worker(name)
        )
        worker = Worker(runtime, engine, NAMESPACE)
        self.engines.append(engine)
        self._workers.append(worker)
        await worker.start()
        self._crew.start(worker.run(), name)

    async def _add_process(self, name: str) -> Runtime:
        process = VirtualProcess.on(self._network, name, self._settings.seed)
        rng = process.rng
        ports = Ports(
            process.clock,
            rng,
            process.network,
            process.blocking,
            tcp_plane(process.network, _CONNECTIONS),
            lambda plane: MemDiscovery(self._store, process.clock, rng),
            lambda discovery: MemEvents(self._bus, new_id(rng)),
        )
        runtime = Runtime(ports, ProcessOptions(name=name, listen=f"{name}:0"))
        self._runtimes.append(runtime)
        await runtime.start()
        return runtime
