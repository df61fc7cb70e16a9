"""A cluster in one process under virtual time: the real runtime, worker shell, routers, tiers, journey and join server.

    disc         the join server, on a fixed port
    w0 w1 ...    workers with the sim engine; of a split flow the last ones compute prompts for the others
    r0           a router process, in some clusters
    f0 f1 ...    frontends: routers and clients that check every answer token by token

Each is a host of a VirtualNetwork and can crash, stall and come back. Everything that happens is written to
one log; a run is a function of its seed, so two runs of a seed have equal logs.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import msgspec

from kvolt.core.card import EngineInfo, card_hash
from kvolt.core.endpoints import GENERATE, KV_TOPIC, component_name
from kvolt.core.ids import RequestId
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Role
from kvolt.engines.contract import Engine, EngineSpec, KvPlaced
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.engines.sim.kv import BLOCK_BYTES
from kvolt.journey.journey import Road
from kvolt.journey.prefill import Leg
from kvolt.journey.prefill_mode import Chooser, OneWay
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.disk.tier import DiskTier
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.router.event_fed_router import ExactRouter
from kvolt.router.port import Router, RouterContext
from kvolt.router.queue.queue_router import who_decides
from kvolt.router.registry import NewRouter, find_router
from kvolt.router.service.client import RouterLink
from kvolt.router.service.service import RouterService
from kvolt.runtime.clock import new_id
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.discovery.join import JoinDiscovery
from kvolt.runtime.discovery.join_server import JoinServer
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.discovery.port import Discovery
from kvolt.runtime.endpoint.address import EndpointAddress
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.runtime.events.port import EventPlane
from kvolt.runtime.plane.connection import ConnectionOptions
from kvolt.runtime.plane.connections import tcp_plane
from kvolt.runtime.plane.port import RequestPlane
from kvolt.runtime.plane.session import SessionLimits
from kvolt.runtime.runtime import Ports, Runtime
from kvolt.runtime.tasks import Crew
from kvolt.testing.cluster.checked_router import CheckedRouter
from kvolt.testing.cluster.client_requests import BLOCK_SIZE, MODEL, SLACK_S, Asking
from kvolt.testing.cluster.kv_check import KvCheck
from kvolt.testing.cluster.kv_mover import KvBoard, VirtualMover
from kvolt.testing.cluster.leftovers import lasting_leftovers
from kvolt.testing.cluster.process import TTL_S, ClusterProcess
from kvolt.testing.cluster.shape import ClusterShape, Flow
from kvolt.testing.cluster.tally import Tally
from kvolt.testing.virtual.link import LinkProfile
from kvolt.testing.virtual.network import VirtualNetwork
from kvolt.testing.virtual.ports import VirtualProcess
from kvolt.testing.virtual.tier_executor import without_threads
from kvolt.worker.tiering import NewTiering, TieredEngine, Tiering
from kvolt.worker.worker import Worker

_IN_MEMORY = Path("/dev/shm")
NAMESPACE = "twin"
JOIN_PORT = 7400
DISCOVERY_HOST = "disc"

_LIMITS = Deadlines(connect_s=2.0, first_s=6.0, between_s=5.0, total_s=12.0)
_PATIENT = Deadlines(connect_s=5.0, first_s=60.0, between_s=60.0, total_s=90.0)
"""Of clusters whose processes only stall: time enough for every answer."""
_CONNECTION = ConnectionOptions(limits=SessionLimits(window_items=4))
"""A small window, so that slow readers run out of credit and deltas merge."""
_CANCEL_S = 0.5
"""A healthy worker computes nothing more for a client that has left so long ago."""


_GIVEN_UP_S = 40.0
"""After the last fault nothing is kept any more for a peer that fell silent: the grace of a stall is over."""


class Violation(AssertionError):
    """An invariant did not hold; the message says which, where and when."""


_KV_CHECK_S = 1.0
"""Virtual time between two checks of block contents and indexes."""


class _ObservedEvents(MemEvents):
    """An event plane whose KV events are also replicated, before any is lost."""

    def __init__(self, bus: MemBus, publisher: str, kv: KvCheck) -> None:
        super().__init__(bus, publisher)
        self._kv = kv

    def publish(self, topic: str, payload: bytes) -> None:
        if topic == KV_TOPIC:
            self._kv.events.add_batch(payload)
        super().publish(topic, payload)


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that runs now."""

    engine: SimEngine
    worker: Worker


class Cluster:
    """All processes, the network between them, the log and the tally."""

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
        self.board = KvBoard(self._is_linked, random.Random(f"{seed}/kv"))
        self.kv = KvCheck(self.fail, BLOCK_SIZE)
        self._routers_of: dict[str, Callable[[], Sequence[Router]]] = {}
        """Routers of each process that runs."""
        self.seen: Counter[str] = Counter()
        """How often something happened that a cluster by seed should show."""
        self.members: dict[str, Member] = {}
        """Workers that run, by process."""
        self.event_loss = 0.0
        """Of events between processes that can reach each other."""
        self._event_rng = random.Random(f"{seed}/events")
        self._publishers: dict[str, str] = {}
        """Processes, by the id under which they publish."""
        self._bus = MemBus(self._event_delay_s)
        self._loop = asyncio.get_running_loop()
        self._failure: str | None = None
        self.has_failed = asyncio.Event()
        self._accepting = True
        self._is_over = False
        self._quiet = asyncio.Event()
        """Nothing is asked any more, and all that was has ended."""
        self._checks = Crew("checks", on_error=lambda error: self.fail(repr(error)))
        self._folder: Path | None = None
        self.trouble_ends_at = 0.0
        """Every fault has undone itself by then."""
        self.must_succeed = False
        """From now on every request is answered: no fault is left and the cluster had time to recover, or its
        processes only stall."""
        self.is_healthy = False
        """No fault is left, and the cluster had time to recover."""
        num_workers = shape.num_workers + shape.num_prefill
        self.workers = [
            ClusterProcess(self, f"w{index}", 0, partial(self._work, role=shape.role_of(index)))
            for index in range(num_workers)
        ]
        self.frontends = [
            ClusterProcess(self, f"f{index}", 0, self._ask) for index in range(shape.num_frontends)
        ]
        self.routers = [ClusterProcess(self, "r0", 0, self._route)] if shape.has_router_process else []
        self.discovery = ClusterProcess(self, DISCOVERY_HOST, JOIN_PORT, self._serve_join)

    @property
    def processes(self) -> list[ClusterProcess]:
        return [self.discovery, *self.workers, *self.routers, *self.frontends]

    def note(self, event: str) -> None:
        self.log.append(f"{self._loop.time():.6f} {event}")

    def fail(self, what: str) -> None:
        """Remember the first violation; `check` raises it where a test can see it."""
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
            in_memory = _IN_MEMORY if _IN_MEMORY.is_dir() else None  # where a sync costs nothing
            self._folder = Path(tempfile.mkdtemp(prefix="kvolt-cluster-", dir=in_memory))
        for process in self.processes:
            process.start()
        self._checks.start(self._check_kv_on(), "kv")

    async def stop(self) -> None:
        """Let what runs end, then stop everything in order. By then every request must have ended, and nothing
        of it be left."""
        self._accepting = False
        ends_at = max(self._loop.time() + self.limits.total_s + SLACK_S, self.trouble_ends_at + _GIVEN_UP_S)
        await asyncio.sleep(ends_at - self._loop.time())
        self.check()
        self._is_over = True
        await self._checks.drain()
        for name, router in self._exact_routers():
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
        """After a run, whatever became of it."""
        await self._checks.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- what must hold

    def check_registered(self) -> None:
        """Of a healthy cluster: exactly its living workers are registered. Leases of dead ones have expired."""
        runtime = self.discovery.runtime
        if runtime is None:
            return
        store: MemStore = runtime.discovery._store  # type: ignore[attr-defined]
        registered = sorted(key.rsplit("/", 1)[-1] for key in store._owners if f"/{GENERATE}/" in key)
        alive = sorted(member.worker._instance for member in self.members.values())
        if registered != alive:
            self.fail(f"registered are {registered}, alive {alive}")

    def left(self, request_id: RequestId, name: str) -> None:
        if self.is_healthy:
            self._checks.start(self._check_left(request_id, name), "left")

    async def _check_left(self, request_id: RequestId, name: str) -> None:
        await asyncio.sleep(_CANCEL_S)
        for worker, member in self.members.items():
            if any(each.request_id == request_id for each in member.engine._scheduler.requests()):
                self.fail(f"{worker} computes for {name}, which left {_CANCEL_S} s ago")

    def _check_engines(self) -> None:
        """Pools and tiers at rest: every block is free or found, and is released once."""
        if self.board.num_open:
            self.fail(f"{self.board.num_open} offers of KV or readers of messages are left")
        for name, member in self.members.items():
            self.kv.check_released(name, member.worker)
            try:
                member.engine._scheduler.check_integrity()
                if member.worker.tiering is not None:
                    self._check_tiers(name, member.worker.tiering)
            except AssertionError as error:
                self.fail(f"{name}: {error or 'blocks are not what their books say'}")

    def _check_tiers(self, name: str, tiering: Tiering) -> None:
        host = tiering.cache.host
        host.check_integrity()
        num_corrupt = sum(stats.failures["corrupt"] for stats in host.stats.values())
        if num_corrupt and not self.kv.damaged:
            self.fail(f"{name} found {num_corrupt} blocks in its tiers damaged, which nothing has damaged")

    def damage_tier(self, rng: random.Random) -> None:
        """Flip a bit of one block that lies in a host tier."""
        tiers = [
            (member.worker._instance, member.worker.tiering.cache.host)
            for member in self.members.values()
            if member.worker.tiering is not None
        ]
        blocks = [(instance, host, key) for instance, host in tiers for key in host.books]
        if blocks:
            instance, host, key = rng.choice(blocks)
            host.memory.block(host.books.slot(key))[0] ^= 1
            self.kv.damaged.add((instance, key))

    def _exact_routers(self) -> Iterator[tuple[str, ExactRouter]]:
        """All that follow KV events, with their processes."""
        for name, routers in self._routers_of.items():
            for router in map(who_decides, routers()):
                if isinstance(router, ExactRouter):
                    yield name, router

    async def _check_kv_on(self) -> None:
        while not self._is_over:
            await asyncio.sleep(_KV_CHECK_S)
            for name, member in self.members.items():
                self.kv.check_blocks(name, member.worker)
            for name, router in self._exact_routers():
                self.kv.check_feeds(name, router)

    # --- links that are not the network's

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

    # --- what a process is made of

    def ports(self, name: str, life: int) -> Ports:
        process = VirtualProcess.on(self.network, name, self.seed)
        rng = random.Random(f"{self.seed}/{name}/{life}")

        def discovery(plane: RequestPlane) -> Discovery:
            if name == DISCOVERY_HOST:
                return MemDiscovery(MemStore(), process.clock, rng)
            return JoinDiscovery(plane, f"{DISCOVERY_HOST}:{JOIN_PORT}", rng)

        def events(found: Discovery) -> EventPlane:
            publisher = new_id(rng)
            self._publishers[publisher] = name
            return _ObservedEvents(self._bus, publisher, self.kv)

        plane = tcp_plane(process.network, _CONNECTION)
        return Ports(process.clock, rng, process.network, process.blocking, plane, discovery, events)

    async def _serve_join(self, runtime: Runtime) -> None:
        join = JoinServer(runtime.discovery, runtime.ports.clock, settle_s=2 * TTL_S)
        join.add_to(runtime.server)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await join.close()

    async def _work(self, runtime: Runtime, role: Role) -> None:
        without_threads()
        name = runtime.options.name
        engine = self._engine(role)
        worker = Worker(
            runtime,
            engine,
            NAMESPACE,
            new_mover=partial(self._new_mover, name),
            new_tiering=self._tiering(name),
        )
        await worker.start()
        self.members[name] = Member(engine, worker)
        try:
            await worker.run()
        finally:
            await worker.close()
            self.seen["preempted"] += engine._scheduler.num_preemptions
            if worker.tiering is not None:
                for tier, num_blocks in worker.tiering.brought.items():
                    self.seen[f"from {tier}"] += num_blocks

    def _engine(self, role: Role) -> SimEngine:
        arguments = SimArguments(
            max_num_seqs=32,
            block_size=BLOCK_SIZE,
            kv_blocks=self.shape.kv_blocks,
            context_length=1024,
            latency=LatencyModel(base_s=0.03, prefill_token_s=0.0002),
            hold_s=10.0,
        )
        return SimEngine(EngineSpec(model=MODEL, role=role), arguments)

    def _new_mover(self, name: str, engine: KvPlaced) -> VirtualMover:
        assert isinstance(engine, SimEngine)
        return VirtualMover(self.board, name, engine._memory, BLOCK_BYTES)

    def _tiering(self, name: str) -> NewTiering | None:
        shape = self.shape
        if not shape.host_blocks:
            return None

        def new(engine: Engine, info: EngineInfo, now, tell) -> Tiering:  # type: ignore[no-untyped-def]
            tiered = cast("TieredEngine", engine)
            slabs = tiered.kv_slabs()
            lower = []
            if self._folder is not None:
                files = DiskFiles(self._folder / name, BlockShape.of(slabs), shape.disk_blocks)
                lower.append((DiskTier(files), 1))
            cache = TieredCache.over(slabs, shape.host_blocks, lower)
            return Tiering(
                tiered, cache, now, tell, info.step_model, BLOCK_SIZE, info.capacity.max_batch_tokens
            )

        return new

    async def _route(self, runtime: Runtime) -> None:
        """A router process, asked by all frontends."""
        service = RouterService(
            runtime, NAMESPACE, find_router(self.shape.routers[0]), RouterSettings(reload_s=0.0)
        )
        await service.start()
        self._routers_of[runtime.options.name] = service.routers
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await service.close()

    async def _ask(self, runtime: Runtime) -> None:
        """A frontend: asks at random moments for as long as the run lasts."""
        name, rng, shape = runtime.options.name, runtime.ports.rng, self.shape
        requests = Crew(f"{name} requests", on_error=lambda error: self.fail(repr(error)))
        new_router: NewRouter = find_router(shape.routers[int(name[1:]) % len(shape.routers)])
        link: RouterLink | None = None
        if shape.has_router_process:
            link = await RouterLink.to(runtime, NAMESPACE)
            new_router = link.new_router(new_router)
        answering = await self._leg(runtime, new_router, shape.main_role)
        legs = [answering]
        ways: Chooser | OneWay = OneWay()
        if shape.flow is not Flow.AGGREGATED:
            prefill = await self._leg(runtime, new_router, Role.PREFILL)
            prefill.client.has_fallback = True
            legs.append(prefill)
            now = runtime.ports.clock.monotonic
            ways = Chooser(answering.router, lambda: prefill, BLOCK_SIZE, now=now)
        self._routers_of[name] = lambda: [cast("CheckedRouter", leg.router).inner for leg in legs]
        road = Road(
            answering.router,
            answering.client,
            requests,
            max_attempts=3,
            eos_token_ids=self._engine(Role.AGGREGATED).card.eos_token_ids,
            ways=ways,
            is_decode_first=shape.flow is Flow.DECODE_FIRST,
        )
        try:
            while True:
                await asyncio.sleep(rng.expovariate(1.5))
                if not self._accepting:
                    break
                asking = Asking(self, road, name, rng)
                requests.start(asking.run(), "request")
            await requests.drain()
            for leg in legs:
                router = cast("CheckedRouter", leg.router)
                if router.num_reserved:
                    self.fail(f"{name} has {router.num_reserved} reservations left")
            await self._quiet.wait()
        finally:
            await requests.close()
            self.seen["migrated"] += road.stats.migrations.total()
            self.seen["retried"] += road.stats.retries.total()
            self.seen["taken back"] += road.stats.num_moves
            for leg in legs:
                await leg.router.close()
            if link is not None:
                await link.close()

    async def _leg(self, runtime: Runtime, new_router: NewRouter, role: Role) -> Leg:
        component = component_name(MODEL, role, card_hash(self._engine(role).card))
        client = await runtime.client(EndpointAddress(NAMESPACE, component, GENERATE))
        settings = RouterSettings(reload_s=0.0)
        inner = new_router(RouterContext(client, runtime, BLOCK_SIZE, settings, role))
        return Leg(CheckedRouter(inner, client, self.fail), client)


class RunReport(msgspec.Struct, frozen=True):
    seed: int
    log: tuple[str, ...]
    started: int
    ok: int
    failed: dict[str, int]
    cut_short: int
    seen: dict[str, int]
    """How often something happened that faults should lead to."""
