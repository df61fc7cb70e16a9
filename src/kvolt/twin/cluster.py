"""Processes of a twin: workers with the sim engine and one frontend, each a host of a virtual network.

The processes run the code of real processes; only the ports are virtual: time, network, randomness, blocking calls.
Discovery and events are in memory.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from kvolt.core.card import EngineInfo
from kvolt.core.endpoints import GENERATE, EndpointAddress, component_name
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.engines.sim.links import SimLink
from kvolt.engines.sim.transfers import SimTransfers
from kvolt.journey.journey import JourneyContext
from kvolt.journey.prefill import RoleTarget
from kvolt.journey.prefill_mode import PrefillModeRules, PrefillModeSelector
from kvolt.router.policy.custom import is_custom
from kvolt.router.port import Router, RouterContext
from kvolt.router.registry import ROUTERS, find_router, reads_kv_events
from kvolt.runtime.clock import new_id
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.events.mem import MemEvents
from kvolt.runtime.plane.connection import ConnectionOptions
from kvolt.runtime.plane.tcp_plane import tcp_plane
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.virtual.link import LinkProfile
from kvolt.testing.virtual.network import VirtualNetwork
from kvolt.testing.virtual.ports import VirtualProcess
from kvolt.twin.engine_watch import ClusterWatch, EngineWatch
from kvolt.twin.faults import FailingEngine, Faults, every, new_bus
from kvolt.twin.trace_block_mover import TraceBlockBoard, TraceBlockMover, link_in, link_out
from kvolt.twin.trace_block_tiers import TwinTiers, trace_block_tiering
from kvolt.worker.worker import Worker

MODEL = "sim-tiny"
NAMESPACE = "twin"
_START_S = 30.0
_DRAIN_S = 3600.0
"""Drain time of a leaving worker."""
_CONNECTIONS = ConnectionOptions(heartbeat_s=3600.0, dead_after_s=3 * 3600.0)
"""Processes of a twin do not fail silently, so frequent heartbeats would only cost time."""

PrefillChoice = Literal["predicted", "threshold"]


class TwinSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a twin."""

    num_workers: Annotated[int, Meta(ge=1)] = 1
    num_prefill: Annotated[int, Meta(ge=0)] = 0
    """Number of prefill workers, in addition to `num_workers` decode workers; 0: all workers are aggregated."""
    kv_link_bytes_per_s: Annotated[float, Meta(gt=0)] = 25e9
    """Total KV bandwidth out of and into each worker."""
    kv_link_s: Annotated[float, Meta(ge=0)] = 0.00005
    """Latency of a KV transfer."""
    num_racks: Annotated[int, Meta(ge=1)] = 1
    """Workers are distributed over this number of racks."""
    rack_link_bytes_per_s: Annotated[float, Meta(gt=0)] = 25e9
    """Total KV bandwidth out of and into each rack."""
    prefill_choice: PrefillChoice = "predicted"
    """When to use prefill workers: by predicted cost, or for all prompts above `prefill_min_tokens`."""
    prefill_min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Shorter prompts are computed by decode workers."""
    target_ttft_s: Annotated[float, Meta(gt=0)] | None = None
    target_itl_s: Annotated[float, Meta(gt=0)] | None = None
    """Latency targets for the choice of the prefill worker."""
    gpus_per_worker: Annotated[int, Meta(ge=1)] = 1
    """For GPU-seconds only; the preset determines the speed."""
    router: str = next(iter(ROUTERS))
    routing: RouterSettings = RouterSettings()
    engine: SimArguments = SimArguments()
    tiers: TwinTiers = TwinTiers()
    """KV tiers of each worker."""
    link_s: Annotated[float, Meta(ge=0)] = 0.0001
    """One-way latency between two processes."""
    seed: int = 0
    merge_steps: bool = True
    """Simulate runs of equal decode steps as one event: faster, with the same results."""
    faults: Faults = Faults()

    def __post_init__(self) -> None:
        if self.router not in ROUTERS and not is_custom(self.router):
            raise ValueError(
                f"unknown router {self.router!r}; known: {', '.join(ROUTERS)}, FILE.py:FUNCTION, MODULE:FUNCTION"
            )


@dataclass(frozen=True, slots=True)
class _Member:
    """A worker process."""

    runtime: Runtime
    worker: Worker
    watch: EngineWatch

    @property
    def role(self) -> Role:
        assert self.worker.info is not None  # it has started
        return self.worker.info.role


def _links(settings: TwinSettings) -> list[SimLink]:
    """Links of the initial workers; transfers of workers that join later take no time."""
    racks = {rack for _, rack in _racks(settings)}
    ends = [(name, settings.kv_link_bytes_per_s, settings.kv_link_s / 2) for name, _ in _racks(settings)]
    ends += [(rack, settings.rack_link_bytes_per_s, 0.0) for rack in sorted(racks)]
    return [
        SimLink(link(name), speed, latency_s)
        for name, speed, latency_s in ends
        for link in (link_out, link_in)
    ]


def _racks(settings: TwinSettings) -> list[tuple[str, str]]:
    """Initial workers with their racks."""
    names = [f"w{number}" for number in range(settings.num_workers + settings.num_prefill)]
    return [(name, f"rack{number % settings.num_racks}") for number, name in enumerate(names)]


class TwinCluster:
    """A running twin, on a virtual loop: `start` it and `close` it at the end."""

    def __init__(self, settings: TwinSettings, watch: ClusterWatch) -> None:
        self._settings = settings
        self._watch = watch
        self._network = VirtualNetwork(
            random.Random(f"{settings.seed}/network"), profile=LinkProfile(latency_s=settings.link_s)
        )
        self._store, self._bus = MemStore(), new_bus(settings.faults, settings.seed)
        self._runtimes: list[Runtime] = []
        self._members: list[_Member] = []
        """Active workers, oldest first."""
        self._leaving: list[_Member] = []
        self._num_workers = 0
        """Number of workers ever started."""
        self._rng = random.Random(f"{settings.seed}/trouble")
        self._task_group = TaskGroup("twin")
        transfers = SimTransfers(_links(settings), asyncio.get_running_loop().time)
        self._board = TraceBlockBoard(transfers, dict(_racks(settings)))
        self._frontend: Runtime | None = None
        self._prefill: EndpointClient | None = None
        self._routers: list[Router] = []
        """Routers of the current journey context."""
        self._journey_context: JourneyContext | None = None

    @classmethod
    async def start(cls, settings: TwinSettings, watch: ClusterWatch) -> Self:
        """Start all processes; return when all workers are registered and connected."""
        cluster = cls(settings, watch)
        try:
            await cluster._start()
        except BaseException:
            await cluster.close()
            raise
        return cluster

    @property
    def journey_context(self) -> JourneyContext:
        """Current journey context; replaced when the router restarts."""
        assert self._journey_context is not None
        return self._journey_context

    async def _start(self) -> None:
        settings = self._settings
        for _ in range(settings.num_workers):
            await self._add_worker(Role.DECODE if settings.num_prefill else Role.AGGREGATED)
        for _ in range(settings.num_prefill):
            await self._add_worker(Role.PREFILL)
        frontend = self._frontend = await self._add_process("f0")
        info = self._members[0].worker.info
        assert info is not None  # it has started
        client = await self._client(frontend, info, info.role)
        if settings.num_prefill:
            self._prefill = await self._client(frontend, info, Role.PREFILL)
        self._journey_context = self._new_journey_context(client)
        faults = self._settings.faults
        if faults.router_restart_s is not None:
            self._task_group.start(every(faults.router_restart_s, self._restart_router), "router restarts")
        if faults.churn_s is not None:
            self._task_group.start(every(faults.churn_s, self._churn), "churn")

    async def _client(self, frontend: Runtime, info: EngineInfo, role: Role) -> EndpointClient:
        component = component_name(MODEL, role, info.card)
        client = await frontend.client(EndpointAddress(NAMESPACE, component, GENERATE))
        await client.wait_synced(_START_S)
        for instance in client.candidates():  # so that the first requests do not wait for connections
            await frontend.plane.ensure_connected(instance.address, _START_S)
        return client

    def _new_journey_context(self, client: EndpointClient) -> JourneyContext:
        main = Role.DECODE if self._prefill is not None else Role.AGGREGATED
        router = self._new_router(client, main)
        if self._prefill is None:
            return JourneyContext(router, client, self._task_group)
        prefill_target = RoleTarget(self._new_router(self._prefill, Role.PREFILL), self._prefill)
        settings = self._settings
        rule = PrefillModeRules(
            is_predicted=settings.prefill_choice == "predicted",
            min_tokens=settings.prefill_min_tokens,
            ttft_s=settings.target_ttft_s,
            itl_s=settings.target_itl_s,
        )
        now = asyncio.get_running_loop().time
        prefill_modes = PrefillModeSelector(
            router, lambda: prefill_target, settings.engine.block_size, rule, now=now
        )
        return JourneyContext(router, client, self._task_group, prefill_modes=prefill_modes)

    def _new_router(self, client: EndpointClient, role: Role) -> Router:
        settings = self._settings
        assert self._frontend is not None
        # Policy files are not reloaded, so that the result is a function of the settings.
        routing = replace(settings.routing, reload_s=0.0)
        context = RouterContext(client, self._frontend, settings.engine.block_size, routing, role)
        router = find_router(settings.router)(context)
        self._routers.append(router)
        return router

    async def close(self) -> None:
        for router in self._routers:
            await router.close()
        self._board.close()
        for runtime in reversed(self._runtimes):
            await runtime.close()
        for member in (*self._members, *self._leaving):
            await self._close(member)
        await self._task_group.close()
        self._network.close()

    async def _close(self, member: _Member) -> None:
        await member.worker.close()
        if member.worker.tiering is not None:
            block_size = self._settings.engine.block_size
            for tier, count in member.worker.tiering.onboarded.items():
                self._watch.onboarded_tokens[tier] += count * block_size

    # --- faults

    async def _restart_router(self) -> None:
        """Replace the router. Running requests end on the old journey context."""
        previous, self._routers = self._routers, []
        self._journey_context = self._new_journey_context(self.journey_context.client)
        for router in previous:
            await router.close()

    async def _churn(self) -> None:
        """Add a worker, then drain a random one of the others."""
        leaving = self._members[self._rng.randrange(len(self._members))]
        await self._add_worker(leaving.role)
        self._members.remove(leaving)
        self._leaving.append(leaving)
        self._task_group.start(self._leave(leaving), "leaving worker")

    async def _leave(self, member: _Member) -> None:
        await member.runtime.close(_DRAIN_S)
        await self._close(member)
        member.watch.leave()
        self._runtimes.remove(member.runtime)
        self._leaving.remove(member)

    # --- processes

    async def _add_worker(self, role: Role) -> None:
        name = f"w{self._num_workers}"
        settings, faults = self._settings, self._settings.faults
        slow_by = faults.slow_by if self._num_workers < faults.slow_workers else 1.0
        new_engine = FailingEngine if self._num_workers < faults.failing_workers else SimEngine
        self._num_workers += 1
        runtime = await self._add_process(name)
        arguments = replace(
            settings.engine,
            merge_steps=settings.merge_steps,
            trace_blocks=True,
            kv_events=settings.engine.kv_events
            and (reads_kv_events(settings.router) or settings.tiers.host_blocks > 0),
            slow_by=settings.engine.slow_by * slow_by,
        )
        watch = self._watch.add_worker(name)
        engine = new_engine(EngineSpec(model=MODEL, role=role), arguments, watch)
        block_bytes = arguments.block_size * arguments.kv_bytes_per_token
        worker = Worker(
            runtime,
            engine,
            NAMESPACE,
            new_mover=lambda engine: TraceBlockMover(self._board, name, block_bytes),
            create_tiering=trace_block_tiering(settings.tiers, block_bytes),
        )
        self._members.append(_Member(runtime, worker, watch))
        await worker.start()
        self._task_group.start(worker.run(), name)

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
            lambda discovery, plane, server: MemEvents(self._bus, new_id(rng)),
        )
        runtime = Runtime(ports, ProcessOptions(name=name, listen=f"{name}:0"))
        self._runtimes.append(runtime)
        await runtime.start()
        return runtime
