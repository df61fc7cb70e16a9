"""A cluster in one process under virtual time: the real runtime, worker shell, journey and join server.

    disc         the join server, on a fixed port
    w0 w1 ...    workers with the sim engine
    f0 f1 ...    frontends: a router and clients that check every answer token by token

Each is a host of a VirtualNetwork and can crash and come back. Everything that happens is written to
one log; a run is a function of its seed, so two runs of a seed have equal logs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from kvolt.core.card import card_hash
from kvolt.core.delta import Delta
from kvolt.core.endpoints import GENERATE, component_name
from kvolt.core.errors import KvoltError
from kvolt.core.ids import RequestId
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.registry import EngineSpec
from kvolt.engines.sim import SimArguments, SimEngine
from kvolt.engines.sim_answer import answer_tokens
from kvolt.engines.sim_model import word_token_ids
from kvolt.engines.worker import Worker
from kvolt.journey.journey import Road
from kvolt.router.least_loaded import LeastLoadedRouter
from kvolt.router.port import RoundRobinRouter
from kvolt.runtime.address import EndpointAddress
from kvolt.runtime.call import Deadlines
from kvolt.runtime.clock import new_id
from kvolt.runtime.connection import ConnectionOptions
from kvolt.runtime.connections import tcp_plane
from kvolt.runtime.discovery import Discovery
from kvolt.runtime.discovery_join import JoinDiscovery
from kvolt.runtime.discovery_mem import MemDiscovery, MemStore
from kvolt.runtime.events import EventPlane
from kvolt.runtime.events_mem import MemBus, MemEvents
from kvolt.runtime.join_server import JoinServer
from kvolt.runtime.plane import RequestPlane
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.runtime.session import SessionLimits
from kvolt.runtime.tasks import Crew
from kvolt.testing.deltas import Deltas
from kvolt.testing.leftovers import leftovers
from kvolt.testing.link import LinkProfile
from kvolt.testing.loop import in_process
from kvolt.testing.network import VirtualNetwork
from kvolt.testing.ports import VirtualProcess, resume_process, stall_process

MODEL = "sim-tiny"
NAMESPACE = "twin"
JOIN_PORT = 7400
DISCOVERY_HOST = "disc"

_TTL_S = 5.0
_LIMITS = Deadlines(connect_s=2.0, first_s=6.0, between_s=5.0, total_s=12.0)
_ENGINE = SimArguments(max_num_seqs=32, latency=LatencyModel(base_s=0.03, prefill_token_s=0.0002))
_CONNECTION = ConnectionOptions(limits=SessionLimits(window_items=4))
"""A small window, so that slow readers run out of credit and deltas merge."""
_HOLD_ABOVE = 2
"""For the same reason: deltas that a slow reader may leave lying."""
_SLACK_S = 0.5
"""Beyond its deadline a request may take this much: the way of the last timer."""


Body = Callable[[Runtime], Awaitable[None]]


class Violation(AssertionError):
    """An invariant did not hold; the message says which, where and when."""


@dataclass(slots=True)
class Tally:
    """How requests ended."""

    started: int = 0
    ok: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    """By error code."""
    cut_short: int = 0
    """Their own process crashed."""

    @property
    def ended(self) -> int:
        return self.ok + sum(self.failed.values()) + self.cut_short


class ClusterProcess:
    """One process: runs `body` on a fresh Runtime, can crash and come back."""

    def __init__(
        self, cluster: Cluster, name: str, listen_port: int, body: Callable[[Runtime], Awaitable[None]]
    ) -> None:
        self.name = name
        self._cluster = cluster
        self._listen_port = listen_port
        self._body = body
        self._lives = 0
        self._crew: Crew | None = None
        self._runtime: Runtime | None = None

    @property
    def alive(self) -> bool:
        return self._crew is not None

    @property
    def runtime(self) -> Runtime | None:
        """Of its present life."""
        return self._runtime

    def start(self) -> None:
        in_process(self.name, self._start)

    def _start(self) -> None:
        cluster = self._cluster
        self._lives += 1
        ports = cluster.ports(self.name, self._lives)
        options = ProcessOptions(
            name=self.name,
            listen=f"{self.name}:{self._listen_port}",
            lease_ttl_s=_TTL_S,
            start_timeout_s=600.0,
            deadlines=_LIMITS,
        )
        self._runtime = Runtime(ports, options)
        self._crew = Crew(self.name, on_error=self._on_error)
        self._crew.start(self._run(self._runtime), "main")
        cluster.note(f"{self.name} starts")

    async def _run(self, runtime: Runtime) -> None:
        await runtime.start()
        await self._body(runtime)

    def _on_error(self, error: BaseException) -> None:
        self._cluster.fail(f"{self.name} died: {error!r}")

    async def crash(self, silent: bool) -> None:
        """Gone at once: nothing is told to anybody."""
        if self._crew is None or self._runtime is None:
            return
        self._cluster.note(f"{self.name} crashes{' silently' if silent else ''}")
        self._cluster.network.crash(self.name, silent)
        self.resume()  # the ends of its tasks have no effect any more
        await self._end(self._runtime, self._crew, drain_s=None)

    def stall(self) -> None:
        """Run nothing of it until `resume`, as after SIGSTOP; its connections stay up."""
        stall_process(self._cluster.network, self.name)

    def resume(self) -> None:
        """As after SIGCONT. A process that is not stalled runs on."""
        resume_process(self._cluster.network, self.name)

    def restart(self) -> None:
        if self._crew is None:
            self._cluster.network.restart(self.name)
            self.start()

    async def stop(self) -> None:
        """In order, as on SIGTERM."""
        self.resume()
        if self._crew is not None and self._runtime is not None:
            await self._end(self._runtime, self._crew, drain_s=1.0)

    async def _end(self, runtime: Runtime, crew: Crew, drain_s: float | None) -> None:
        self._crew = self._runtime = None
        if drain_s is not None:
            await runtime.close(drain_s)
        await crew.close()
        abandoning = runtime.discovery.abandon()  # type: ignore[attr-defined]
        if abandoning is not None:
            await abandoning
        await runtime.abort()


class Cluster:
    """All processes, the network between them, the log and the tally."""

    def __init__(self, seed: int, num_workers: int, num_frontends: int) -> None:
        self.seed = seed
        self.rng = random.Random(f"{seed}/cluster")
        self.log: list[str] = []
        self.tally = Tally()
        self.network = VirtualNetwork(
            random.Random(f"{seed}/network"),
            profile=LinkProfile(latency_s=0.0005, jitter_s=0.0005, rechunk=True),
            log=self.note,
        )
        self._bus = MemBus()
        self._loop = asyncio.get_running_loop()
        self._failure: str | None = None
        self._accepting = True
        self.trouble_ends_at = 0.0
        """Every fault has undone itself by then."""
        self.must_succeed = False
        """No fault is left and the cluster had time to recover: from now on every request is answered."""
        self.workers = [ClusterProcess(self, f"w{index}", 0, self._work) for index in range(num_workers)]
        self.frontends = [ClusterProcess(self, f"f{index}", 0, self._ask) for index in range(num_frontends)]
        self.discovery = ClusterProcess(self, DISCOVERY_HOST, JOIN_PORT, self._serve_join)

    @property
    def processes(self) -> list[ClusterProcess]:
        return [self.discovery, *self.workers, *self.frontends]

    def note(self, event: str) -> None:
        self.log.append(f"{self._loop.time():.6f} {event}")

    def fail(self, what: str) -> None:
        """Remember the first violation; `check` raises it where a test can see it."""
        if self._failure is None:
            self._failure = f"seed {self.seed} at {self._loop.time():.3f} s: {what}"
            self.note(f"VIOLATION {what}")

    def check(self) -> None:
        if self._failure is not None:
            raise Violation(self._failure)

    def start(self) -> None:
        for process in self.processes:
            process.start()

    async def stop(self) -> None:
        """Let what runs end, then stop everything in order. By then every request must have ended, and nothing
        of it be left."""
        self._accepting = False
        await asyncio.sleep(_LIMITS.total_s + _SLACK_S)
        self.check()
        if self.tally.ended != self.tally.started:
            self.fail(f"{self.tally.started - self.tally.ended} of {self.tally.started} requests never ended")
        alive = {process.name: process.runtime for process in self.processes if process.runtime is not None}
        for leftover in await leftovers(alive):
            self.fail(leftover)
        for process in [*self.frontends, *self.workers, self.discovery]:
            await process.stop()
        self.network.close()
        self.check()

    # --- what a process is made of

    def ports(self, name: str, life: int) -> Ports:
        process = VirtualProcess.on(self.network, name, self.seed)
        rng = random.Random(f"{self.seed}/{name}/{life}")

        def discovery(plane: RequestPlane) -> Discovery:
            if name == DISCOVERY_HOST:
                return MemDiscovery(MemStore(), process.clock, rng)
            return JoinDiscovery(plane, f"{DISCOVERY_HOST}:{JOIN_PORT}", rng)

        def events(found: Discovery) -> EventPlane:
            return MemEvents(self._bus, new_id(rng))

        plane = tcp_plane(process.network, _CONNECTION)
        return Ports(process.clock, rng, process.network, process.blocking, plane, discovery, events)

    async def _serve_join(self, runtime: Runtime) -> None:
        join = JoinServer(runtime.discovery, runtime.ports.clock, settle_s=2 * _TTL_S)
        join.add_to(runtime.server)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await join.close()

    async def _work(self, runtime: Runtime) -> None:
        engine = _engine()
        worker = Worker(runtime, engine, NAMESPACE)
        await worker.start()
        try:
            await worker.run()
        finally:
            await worker.close()

    async def _ask(self, runtime: Runtime) -> None:
        """A frontend: asks at random moments for as long as the run lasts."""
        endpoint = EndpointAddress(
            NAMESPACE, component_name(MODEL, Role.AGGREGATED, card_hash(_engine().card)), GENERATE
        )
        client = await runtime.client(endpoint)
        rng = runtime.ports.rng
        requests = Crew(f"{runtime.options.name} requests", on_error=lambda error: self.fail(repr(error)))
        # Every second frontend counts what is under way, and then that has to be right, whatever breaks.
        by_load = LeastLoadedRouter(client)
        is_counting = runtime.options.name[-1] in "13579"
        router = by_load if is_counting else RoundRobinRouter(client)
        road = Road(router, client, requests, max_attempts=3)
        try:
            while True:
                await asyncio.sleep(rng.expovariate(1.5))
                if not self._accepting:
                    break
                asking = Asking(self, road, runtime.options.name, rng)
                requests.start(asking.run(), "request")
            await requests.drain()
            if by_load.num_under_way:
                self.fail(f"{runtime.options.name} counts as under way: {by_load.num_under_way}")
        finally:
            await requests.close()


def _engine() -> SimEngine:
    return SimEngine(EngineSpec(model=MODEL, role=Role.AGGREGATED), _ENGINE)


class Asking:
    """One request and the check of its answer."""

    def __init__(self, cluster: Cluster, road: Road, frontend: str, rng: random.Random) -> None:
        self._cluster = cluster
        self._road = road
        self._name = f"{frontend} {new_id(rng)[:8]}"
        self._seed = rng.getrandbits(32)
        self._num_tokens = rng.randint(1, 24)
        self._pause_s = rng.choice((0.0, 0.0, 0.0, 0.2))
        """A slow reader takes its time between items."""
        self._leave_after = rng.randint(1, 24) if rng.random() < 0.1 else None
        """Some clients hang up in the middle."""
        self._request = Request(
            request_id=RequestId(new_id(rng)),
            model=MODEL,
            token_ids=tuple(rng.randrange(3, 500) for _ in range(rng.randint(1, 200))),
            stop=StopConditions(max_tokens=self._num_tokens),
            sampling=Sampling(seed=self._seed),
        )
        self._answer = answer_tokens(self._request.token_ids, self._seed, self._num_tokens, word_token_ids())
        """The right one, known without any engine."""

    async def run(self) -> None:
        cluster, tally = self._cluster, self._cluster.tally
        loop = asyncio.get_running_loop()
        started = loop.time()
        must_succeed = cluster.must_succeed
        tally.started += 1
        try:
            got = await self._read()
        except KvoltError as error:
            tally.failed[error.code] = tally.failed.get(error.code, 0) + 1
            cluster.note(f"{self._name} {error.code}")
            if must_succeed:
                cluster.fail(f"{self._name} ended with {error!r} in a healthy cluster")
        except asyncio.CancelledError:
            tally.cut_short += 1
            raise
        else:
            tally.ok += 1
            cluster.note(f"{self._name} ok {got}")
        took_s = loop.time() - started
        if took_s > _LIMITS.total_s + _SLACK_S + self._pause_s * self._num_tokens:
            cluster.fail(f"{self._name} took {took_s:.3f} s, over its deadline")

    async def _read(self) -> int:
        """How many tokens came, each checked. Errors of the system pass through."""
        got = 0
        finished = False
        async with await Deltas.of(self._road, self._request, _LIMITS, _HOLD_ABOVE) as deltas:
            async for delta in deltas:
                if finished:
                    self._cluster.fail(f"{self._name} got something after its end")
                got = self._check(delta, got)
                finished = delta.finish is not None
                if self._leave_after is not None and got >= self._leave_after:
                    return got
                if self._pause_s:
                    await asyncio.sleep(self._pause_s)
        if got != self._num_tokens or not finished:
            self._cluster.fail(f"{self._name} ended well after {got} of {self._num_tokens} tokens")
        return got

    def _check(self, delta: Delta, got: int) -> int:
        for token in delta.token_ids:
            if got >= len(self._answer) or token != self._answer[got]:
                self._cluster.fail(f"{self._name}: token {got} is not the one that belongs there")
            got += 1
        return got


class RunReport(msgspec.Struct, frozen=True):
    seed: int
    log: tuple[str, ...]
    started: int
    ok: int
    failed: dict[str, int]
    cut_short: int
