"""A cluster in one process under virtual time: the real runtime, workers, routers, tiers, journey and join server.

    disc         join server on a fixed port
    w0 w1 ...    workers with the sim engine; with disaggregated prefill the last ones are prefill workers
    r0           router process, in some clusters
    f0 f1 ...    frontends: routers, and clients that check every response token by token

Each is a host of a VirtualNetwork and can crash, stall and restart. All events are written to one log; a run is a
function of its seed, so two runs of a seed have equal logs.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import cast

from kvolt.core.endpoints import GENERATE
from kvolt.core.ids import RequestId
from kvolt.core.request import Role
from kvolt.engines.contract import KvAddressable
from kvolt.engines.sim.engine import SimEngine
from kvolt.engines.sim.kv import BLOCK_BYTES
from kvolt.journey.journey import JourneyContext
from kvolt.journey.prefill_mode import PrefillModePolicy, PrefillModeSelector
from kvolt.router.event_fed_router import EventFedRouter
from kvolt.router.port import Router
from kvolt.router.queue.queue_router import deciding_router
from kvolt.router.registry import NewRouter, find_router
from kvolt.router.service.client import remote_router
from kvolt.router.service.link import RouterLink
from kvolt.router.service.service import RouterService
from kvolt.runtime.clock import new_id
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.discovery.port import Discovery
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.server import EndpointServer
from kvolt.runtime.events.mem import MemBus
from kvolt.runtime.events.port import EventPlane
from kvolt.runtime.join.client import JoinDiscovery
from kvolt.runtime.join.server import JoinServer
from kvolt.runtime.plane.connection import ConnectionOptions
from kvolt.runtime.plane.port import RequestPlane
from kvolt.runtime.plane.session import SessionLimits
from kvolt.runtime.plane.tcp_plane import tcp_plane
from kvolt.runtime.runtime import Ports, Runtime
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.cluster.checked_router import CheckedRouter
from kvolt.testing.cluster.client_requests import BLOCK_SIZE, SLACK_S, ClientRequest
from kvolt.testing.cluster.kv_check import KvCheck
from kvolt.testing.cluster.kv_mover import KvBoard, VirtualMover
from kvolt.testing.cluster.leftovers import lasting_leftovers
from kvolt.testing.cluster.members import (
    NAMESPACE,
    Member,
    ObservedEvents,
    identity_of,
    plane_events,
    role_target,
    sim_engine,
    tiering_factory,
)
from kvolt.testing.cluster.process import TTL_S, ClusterProcess
from kvolt.testing.cluster.shape import ClusterShape, Flow
from kvolt.testing.cluster.tally import Tally
from kvolt.testing.virtual.link import LinkProfile
from kvolt.testing.virtual.network import VirtualNetwork
from kvolt.testing.virtual.ports import VirtualProcess
from kvolt.testing.virtual.tier_executor import without_threads
from kvolt.worker.worker import Worker

_IN_MEMORY = Path("/dev/shm")
JOIN_PORT = 7400
DISCOVERY_HOST = "disc"

_LIMITS = Deadlines(connect_s=2.0, first_s=6.0, between_s=5.0, total_s=12.0)
_PATIENT = Deadlines(connect_s=5.0, first_s=60.0, between_s=60.0, total_s=90.0)
"""Deadlines for clusters whose processes only stall: long enough for every request."""
_CONNECTION = ConnectionOptions(limits=SessionLimits(window_items=4))
"""A small window, so that slow readers run out of credit and deltas merge."""
_CANCEL_S = 0.5
"""A healthy worker stops computing within this time after a client disconnects."""

_GIVEN_UP_S = 40.0
"""Time after the last fault by which nothing is kept for silent peers: above the stall grace."""
_KV_CHECK_S = 1.0
"""Virtual time between two checks of block contents and indexes."""


class Violation(AssertionError):
    """A broken invariant, with place and time."""


class Cluster:
    """All processes, their network, the log and the tally."""

    def __init__(self, seed: int, shape: ClusterShape) -> None:
        self.seed = seed
        self.shape = shape
        self.limits = _PATIENT if shape.only_stalls else _LIMITS
        self.log: list[str] = []
        self.tally = Tally()
        self.network = VirtualNetwork(
            random.Random(f"{seed}/network"),
            profile=LinkProfile(latency_s=0.0005, jitter_s=0.0005, rechunk=True),
            log=self.note,
        )
        self.board = KvBoard(self._is_linked, random.Random(f"{seed}/kv"), self.fail)
        self.kv = KvCheck(self.fail, BLOCK_SIZE)
        self._routers_of: dict[str, Callable[[], Sequence[Router]]] = {}
        """Routers of each running process."""
        self.seen: Counter[str] = Counter()
        """Counts of events that the faults should cause, such as migrations."""
        self.members: dict[str, Member] = {}
        """Running workers by process."""
        self.event_loss = 0.0
        """Fraction of events that are lost between reachable processes."""
        self._event_rng = random.Random(f"{seed}/events")
        self._publishers: dict[str, str] = {}
        """Process names by publisher id."""
        self._bus = MemBus(self._event_delay_s)
        self._loop = asyncio.get_running_loop()
        self._failure: str | None = None
        self.has_failed = asyncio.Event()
        self._accepting = True
        self._is_over = False
        self._quiet = asyncio.Event()
        """Set when all requests have ended and no more are sent."""
        self._checks = TaskGroup("checks", on_error=lambda error: self.fail(repr(error)))
        self._folder: Path | None = None
        self.faults_end_at = 0.0
        """Time by which every fault is undone."""
        self.must_succeed = False
        """Every request must succeed: the cluster has recovered, or its processes only stall."""
        self.is_healthy = False
        """All faults are undone and the cluster had time to recover."""
        num_workers = shape.num_workers + shape.num_prefill
        self.workers = [
            ClusterProcess(self, f"w{index}", 0, partial(self._work, role=shape.role_of(index)))
            for index in range(num_workers)
        ]
        self.frontends = [
            ClusterProcess(self, f"f{index}", 0, self._frontend) for index in range(shape.num_frontends)
        ]
        self.routers = [ClusterProcess(self, "r0", 0, self._route)] if shape.has_router_process else []
        self.discovery = ClusterProcess(self, DISCOVERY_HOST, JOIN_PORT, self._serve_join)

    @property
    def processes(self) -> list[ClusterProcess]:
        return [self.discovery, *self.workers, *self.routers, *self.frontends]

    def note(self, event: str) -> None:
        self.log.append(f"{self._loop.time():.6f} {event}")

    def fail(self, what: str) -> None:
        """Record the first violation; `check` raises it."""
        if self._failure is None:
            self._failure = f"seed {self.seed} at {self._loop.time():.3f} s: {what}"
            self.note(f"VIOLATION {what}")
            self.has_failed.set()

    def check(self) -> None:
        if self._failure is not None:
            raise Violation(self._failure)

    def start(self) -> None:
        self.note(f"shape {self.shape}")
        if self.shape.disk_blocks:
            in_memory = _IN_MEMORY if _IN_MEMORY.is_dir() else None  # fsync is free there
            self._folder = Path(tempfile.mkdtemp(prefix="kvolt-cluster-", dir=in_memory))
        for process in self.processes:
            process.start()
        self._checks.start(self._check_kv_periodically(), "kv")

    async def stop(self) -> None:
        """Wait for running requests, check that nothing is left of them, then stop all processes in order."""
        self._accepting = False
        ends_at = max(self._loop.time() + self.limits.total_s + SLACK_S, self.faults_end_at + _GIVEN_UP_S)
        await asyncio.sleep(ends_at - self._loop.time())
        self.check()
        self._is_over = True
        await self._checks.drain()
        for name, router in self._event_fed_routers():
            self.kv.check_index(name, router, [member.worker for member in self.members.values()])
        self._quiet.set()
        await asyncio.sleep(_CANCEL_S)
        if self.tally.ended != self.tally.started:
            self.fail(f"{self.tally.started - self.tally.ended} of {self.tally.started} requests never ended")
        alive = {process.name: process.runtime for process in self.processes if process.runtime is not None}
        for leftover in await lasting_leftovers(alive, _CANCEL_S):
            self.fail(leftover)
        self._check_engines()
        for process in [*self.frontends, *self.routers, *self.workers, self.discovery]:
            await process.stop()
        self.network.close()
        self.seen["moved blocks"] += self.board.num_moved
        self.check()

    async def close(self) -> None:
        """Release the resources of a run, failed or not."""
        await self._checks.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- invariants

    def check_registered(self) -> None:
        """Check that exactly the running workers are registered; leases of dead workers must have expired."""
        runtime = self.discovery.runtime
        if runtime is None:
            return
        store: MemStore = runtime.discovery._store  # type: ignore[attr-defined]
        registered = sorted(key.rsplit("/", 1)[-1] for key in store._owners if f"/{GENERATE}/" in key)
        alive = sorted(member.worker._instance for member in self.members.values())
        if registered != alive:
            self.fail(f"registered workers {registered} differ from running workers {alive}")

    def left(self, request_id: RequestId, name: str) -> None:
        if self.is_healthy:
            self._checks.start(self._check_left(request_id, name), "left")

    async def _check_left(self, request_id: RequestId, name: str) -> None:
        await asyncio.sleep(_CANCEL_S)
        for worker, member in self.members.items():
            if any(each.request_id == request_id for each in member.engine._scheduler.requests()):
                self.fail(f"{worker} still computes for {name}, which disconnected {_CANCEL_S} s ago")

    def _check_engines(self) -> None:
        """Check that nothing is held in idle engines and tiers."""
        if self.board.num_open:
            self.fail(f"{self.board.num_open} offers of KV or readers of messages are left")
        for name, member in self.members.items():
            self.kv.check_released(name, member.worker)

    def damage_tier(self, rng: random.Random) -> None:
        self.kv.damage_tier(rng, [member.worker for member in self.members.values()])

    def _event_fed_routers(self) -> Iterator[tuple[str, EventFedRouter]]:
        """Routers that follow KV events, with the names of their processes."""
        for name, routers in self._routers_of.items():
            for router in map(deciding_router, routers()):
                if isinstance(router, EventFedRouter):
                    yield name, router

    async def _check_kv_periodically(self) -> None:
        while not self._is_over:
            await asyncio.sleep(_KV_CHECK_S)
            for name, member in self.members.items():
                self.kv.check_blocks(name, member.worker)
            for name, router in self._event_fed_routers():
                self.kv.check_feeds(name, router)

    # --- links besides the network

    def stalled_s(self, process: str) -> float:
        return next(each.stalled_s for each in self.processes if each.name == process)

    def on_gone(self, name: str) -> None:
        self.members.pop(name, None)
        self._routers_of.pop(name, None)
        self.board.crash(name)

    def _is_linked(self, first: str, second: str) -> bool:
        one, other = self.network.host(first), self.network.host(second)
        is_cut = self.network.route(one, other).partitioned_at is not None
        return one.alive and other.alive and not (one.paused or other.paused or is_cut)

    def _event_delay_s(self, publisher: str, subscriber: str) -> float | None:
        first, second = self._publishers[publisher], self._publishers[subscriber]
        if first == second:
            return 0.0
        is_lost = self.event_loss and self._event_rng.random() < self.event_loss
        return None if is_lost or not self._is_linked(first, second) else 0.0005

    # --- processes

    def ports(self, name: str, life: int) -> Ports:
        process = VirtualProcess.on(self.network, name, self.seed)
        rng = random.Random(f"{self.seed}/{name}/{life}")

        def discovery(plane: RequestPlane) -> Discovery:
            if name == DISCOVERY_HOST:
                return MemDiscovery(MemStore(), process.clock, rng)
            return JoinDiscovery(plane, f"{DISCOVERY_HOST}:{JOIN_PORT}", rng)

        def events(discovery: Discovery, plane: RequestPlane, server: EndpointServer) -> EventPlane:
            publisher = new_id(rng)
            if own is not None:
                return plane_events(publisher, own, discovery, plane, server, self.kv)
            self._publishers[publisher] = name
            return ObservedEvents(self._bus, publisher, self.kv)

        network, clock = process.network, process.clock
        own = network.identity = identity_of(name) if self.shape.has_identities else None
        plane = tcp_plane(network, _CONNECTION)
        return Ports(clock, rng, network, process.blocking, plane, discovery, events, identity=own)

    async def _serve_join(self, runtime: Runtime) -> None:
        join = JoinServer(runtime.discovery, runtime.ports.clock, settle_s=2 * TTL_S)
        join.register_endpoints(runtime.server)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await join.close()

    async def _work(self, runtime: Runtime, role: Role) -> None:
        without_threads()
        name = runtime.options.name
        engine = sim_engine(role, self.shape.kv_blocks)
        worker = Worker(
            runtime,
            engine,
            NAMESPACE,
            new_mover=partial(self._new_mover, name),
            create_tiering=tiering_factory(self.shape, self._folder and self._folder / name),
        )
        await worker.start()
        self.members[name] = Member(engine, worker)
        try:
            await worker.run()
        finally:
            await worker.close()
            self.seen["preempted"] += engine._scheduler.planner.num_preemptions
            if worker.tiering is not None:
                for tier, num_blocks in worker.tiering.onboarded.items():
                    self.seen[f"from {tier}"] += num_blocks

    def _new_mover(self, name: str, engine: KvAddressable) -> VirtualMover:
        assert isinstance(engine, SimEngine)
        return VirtualMover(self.board, name, engine._memory, BLOCK_BYTES, self.network.host(name).identity)

    async def _route(self, runtime: Runtime) -> None:
        """Router process for all frontends."""
        service = RouterService(
            runtime, NAMESPACE, find_router(self.shape.routers[0]), RouterSettings(reload_s=0.0)
        )
        await service.start()
        self._routers_of[runtime.options.name] = service.routers
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await service.close()

    async def _frontend(self, runtime: Runtime) -> None:
        """Frontend: sends requests at random times during the run."""
        name, rng, shape = runtime.options.name, runtime.ports.rng, self.shape
        requests = TaskGroup(f"{name} requests", on_error=lambda error: self.fail(repr(error)))
        new_router: NewRouter = find_router(shape.routers[int(name[1:]) % len(shape.routers)])
        link: RouterLink | None = None
        if shape.has_router_process:
            link = await RouterLink.to(runtime, NAMESPACE)
            new_router = remote_router(link, new_router)
        answering = await role_target(runtime, new_router, shape.main_role, self.fail)
        targets = [answering]
        prefill_modes = PrefillModePolicy()
        if shape.flow is not Flow.AGGREGATED:
            prefill = await role_target(runtime, new_router, Role.PREFILL, self.fail)
            prefill.client.has_fallback = True
            targets.append(prefill)
            now = runtime.ports.clock.monotonic
            prefill_modes = PrefillModeSelector(answering.router, lambda: prefill, BLOCK_SIZE, now=now)
        self._routers_of[name] = lambda: [cast("CheckedRouter", target.router).inner for target in targets]
        journey_context = JourneyContext(
            answering.router,
            answering.client,
            requests,
            max_attempts=3,
            eos_token_ids=sim_engine(Role.AGGREGATED, shape.kv_blocks).card.eos_token_ids,
            prefill_modes=prefill_modes,
            is_decode_first=shape.flow is Flow.DECODE_FIRST,
        )
        try:
            while True:
                await asyncio.sleep(rng.expovariate(1.5))
                if not self._accepting:
                    break
                client_request = ClientRequest(self, journey_context, name, rng)
                requests.start(client_request.run(), "request")
            await requests.drain()
            for target in targets:
                router = cast("CheckedRouter", target.router)
                if router.num_reserved:
                    self.fail(f"{name} has {router.num_reserved} reservations left")
            await self._quiet.wait()
        finally:
            await requests.close()
            self.seen["migrated"] += journey_context.stats.migrations.total()
            self.seen["retried"] += journey_context.stats.retries.total()
            self.seen["rerouted"] += journey_context.stats.num_moves
            for target in targets:
                await target.router.close()
            if link is not None:
                await link.close()
