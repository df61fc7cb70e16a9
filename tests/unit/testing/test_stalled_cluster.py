"""Stalls in a virtual cluster: a frontend, workers, a router process, the join server, all of them at once.

The real runtime, worker shell, router service, journey and join server; each process can be stopped as by SIGSTOP.
Every stream must come whole, whatever stalled, up to the grace of 30 s.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest

from kvolt.core.card import card_hash
from kvolt.core.endpoints import GENERATE, EndpointAddress, component_name
from kvolt.core.errors import KvoltError
from kvolt.core.ids import RequestId
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.engines.sim.model import word_token_ids
from kvolt.engines.sim.script import answer_tokens
from kvolt.journey.journey import JourneyContext
from kvolt.router.port import RouterContext
from kvolt.router.registry import ROUTERS
from kvolt.router.service.client import remote_router
from kvolt.router.service.link import RouterLink
from kvolt.router.service.service import RouterService
from kvolt.runtime.clock import new_id
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.discovery.port import Discovery
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.runtime.join.client import JoinDiscovery
from kvolt.runtime.join.server import JoinServer
from kvolt.runtime.plane.port import RequestPlane
from kvolt.runtime.plane.tcp_plane import tcp_plane
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.cluster.deltas import Deltas
from kvolt.testing.virtual.loop import in_process, run_virtual
from kvolt.testing.virtual.network import VirtualNetwork
from kvolt.testing.virtual.ports import VirtualProcess, resume_process, stall_process
from kvolt.worker.worker import Worker

MODEL = "sim-tiny"
SPEC = EngineSpec(model=MODEL, role=Role.AGGREGATED)
STEP_S = 0.03
ENGINE = SimArguments(max_num_seqs=64, latency=LatencyModel(base_s=STEP_S))
ENDPOINT = EndpointAddress(
    "ns", component_name(MODEL, Role.AGGREGATED, card_hash(SimEngine(SPEC, ENGINE).card)), GENERATE
)
LIMITS = Deadlines(stall_s=30.0)
"""The defaults of the settings."""
NUM_STREAMS = 12
NUM_TOKENS = 200
PROMPT = (5, 6, 7)

Body = Callable[[Runtime], Awaitable[None]]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


class Stream:
    """One request, read to its end."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.arrivals: list[float] = []
        self.error: KvoltError | None = None
        self.is_over = False

    async def run(self, journey_context: JourneyContext) -> None:
        request = Request(
            request_id=RequestId(f"r{self.number}"),
            model=MODEL,
            token_ids=PROMPT,
            stop=StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True),
            sampling=Sampling(seed=self.number),
        )
        try:
            async with await Deltas.of(journey_context, request, LIMITS) as deltas:
                async for delta in deltas:
                    self.tokens += delta.token_ids
                    self.arrivals.append(asyncio.get_running_loop().time())
        except KvoltError as error:
            self.error = error
        self.is_over = True

    @property
    def longest_gap_s(self) -> float:
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max(later - earlier for earlier, later in pairs)

    def check(self) -> None:
        assert self.error is None, f"stream {self.number}: {self.error!r}"
        assert self.tokens == answer_tokens(PROMPT, self.number, NUM_TOKENS, word_token_ids())


class Cluster:
    """disc, r0, w0 w1 and f0, each a process that can stall."""

    def __init__(self) -> None:
        self.network = VirtualNetwork(random.Random(1))
        self.runtimes: dict[str, Runtime] = {}
        self.streams: list[Stream] = []
        self.link: RouterLink | None = None
        self._bus = MemBus()
        self._task_group = TaskGroup("cluster")
        self._journey_context: JourneyContext | None = None

    async def start(self, num_workers: int = 2) -> None:
        self._launch("disc", 7400, self._serve_join)
        self._launch("r0", 0, self._route)
        for number in range(num_workers):
            self._launch(f"w{number}", 0, self._work)
        self._launch("f0", 0, self._ask)
        await until(
            lambda: (
                self._journey_context is not None
                and len(self._journey_context.client.candidates()) == num_workers
            ),
            20.0,
        )

    def _launch(self, name: str, port: int, body: Body) -> None:
        in_process(name, lambda: self._task_group.start(self._run(name, port, body), name))

    async def _run(self, name: str, port: int, body: Body) -> None:
        process = VirtualProcess.on(self.network, name, 1)

        def discovery(plane: RequestPlane) -> Discovery:
            if name == "disc":
                return MemDiscovery(MemStore(), process.clock, process.rng)
            return JoinDiscovery(plane, "disc:7400", process.rng)

        ports = Ports(
            process.clock,
            process.rng,
            process.network,
            process.blocking,
            tcp_plane(process.network),
            discovery,
            lambda found, plane, server: MemEvents(self._bus, new_id(process.rng)),
        )
        runtime = self.runtimes[name] = Runtime(
            ports, ProcessOptions(name, listen=f"{name}:{port}", deadlines=LIMITS)
        )
        await runtime.start()
        try:
            await body(runtime)
        finally:
            await runtime.abort()

    async def _serve_join(self, runtime: Runtime) -> None:
        join = JoinServer(runtime.discovery, runtime.ports.clock, settle_s=10.0)
        join.register_endpoints(runtime.server)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await join.close()

    async def _route(self, runtime: Runtime) -> None:
        service = RouterService(runtime, "ns")
        await service.start()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await service.close()

    async def _work(self, runtime: Runtime) -> None:
        worker = Worker(runtime, SimEngine(SPEC, ENGINE), "ns")
        await worker.start()
        try:
            await worker.run()
        finally:
            await worker.close()

    async def _ask(self, runtime: Runtime) -> None:
        client = await runtime.client(ENDPOINT)
        link = self.link = await RouterLink.to(runtime, "ns")
        router = remote_router(link, ROUTERS["round-robin"])(RouterContext(client, runtime, 16))
        requests = TaskGroup("requests")
        self._journey_context = JourneyContext(router, client, requests)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await requests.close()
            await router.close()
            await link.close()

    def ask(self, num_streams: int = NUM_STREAMS) -> list[Stream]:
        """Streams that begin now, in the frontend."""
        assert self._journey_context is not None
        journey_context, streams = (
            self._journey_context,
            [Stream(len(self.streams) + number) for number in range(num_streams)],
        )
        for stream in streams:
            in_process(
                "f0", lambda stream=stream: self._task_group.start(stream.run(journey_context), "stream")
            )
        self.streams += streams
        return streams

    async def stall(self, names: Sequence[str], seconds: float) -> None:
        for name in names:
            stall_process(self.network, name)
        await asyncio.sleep(seconds)
        for name in names:
            resume_process(self.network, name)

    def reachable(self) -> int:
        assert self._journey_context is not None
        return len(self._journey_context.client.candidates())

    async def whole(self, within_s: float = 120.0) -> None:
        """Every stream ends, and is right."""
        await until(lambda: all(stream.is_over for stream in self.streams), within_s)
        for stream in self.streams:
            stream.check()

    async def close(self) -> None:
        await self._task_group.close()
        self.network.close()


async def until(condition: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def clustered(body: Callable[[Cluster], Coroutine[Any, Any, None]], num_workers: int = 2) -> None:
    async def main() -> None:
        cluster = Cluster()
        await cluster.start(num_workers)
        try:
            await body(cluster)
        finally:
            await cluster.close()

    run_virtual(main, until_s=900)


EVERYTHING = ("disc", "r0", "w0", "w1", "f0")


@pytest.mark.parametrize("seconds", [2.0, 4.0, 6.0, 12.0, 29.0])
@pytest.mark.parametrize(
    "stalled",
    [("f0",), ("w0",), ("w0", "w1"), ("r0",), ("disc",), ("f0", "r0"), ("disc", "w1"), EVERYTHING],
    ids=" ".join,
)
def test_a_stall_ends_no_stream(stalled: tuple[str, ...], seconds: float) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.ask()
        await asyncio.sleep(1.0)
        await cluster.stall(stalled, seconds)
        cluster.ask(2)
        await cluster.whole()
        await until(lambda: cluster.reachable() == 2, 15.0)

    clustered(body)


@pytest.mark.parametrize("stalled", [("f0",), ("w0", "w1"), EVERYTHING], ids=" ".join)
def test_streams_go_on_where_they_were(stalled: tuple[str, ...]) -> None:
    """No worker computes anything again: the connections have outlived the stall."""

    async def body(cluster: Cluster) -> None:
        streams = cluster.ask()
        await asyncio.sleep(1.0)
        await cluster.stall(stalled, 20.0)
        await cluster.whole()
        assert cluster._journey_context is not None
        assert not cluster._journey_context.stats.reroute_s
        assert all(19.0 < stream.longest_gap_s < 20.5 for stream in streams)

    clustered(body)


@pytest.mark.parametrize(
    "stalls",
    [
        {"f0": (0.0, 13.0), "w0": (3.0, 25.0)},
        {"f0": (0.0, 13.0), "w0": (3.0, 25.0), "disc": (5.0, 15.0)},
        {"w0": (0.0, 20.0), "f0": (3.0, 13.0), "disc": (4.0, 24.0)},
        {"disc": (0.0, 12.0), "w0": (3.0, 14.0), "f0": (6.0, 20.0)},
    ],
    ids=lambda stalls: " ".join(f"{name} {begin:g}-{end:g}" for name, (begin, end) in stalls.items()),
)
def test_stalls_that_overlap_end_no_stream(stalls: dict[str, tuple[float, float]]) -> None:
    """With one worker: a frontend that was stalled itself hears of its expired lease before it sees its silence."""

    async def body(cluster: Cluster) -> None:
        cluster.ask(4)
        await asyncio.sleep(1.0)

        async def stall(name: str, begin: float, end: float) -> None:
            await asyncio.sleep(begin)
            await cluster.stall([name], end - begin)

        async with asyncio.TaskGroup() as group:
            for name, (begin, end) in stalls.items():
                group.create_task(stall(name, begin, end))
            for _ in range(14):
                await asyncio.sleep(2.0)
                cluster.ask(1)
        await cluster.whole()

    clustered(body, num_workers=1)


def test_a_request_goes_back_to_a_worker_that_was_stalled_before_the_second_one() -> None:
    """It left w0 for w1 when w0 was silent, and w1 for w0 when w1 was: w0 has not failed it."""

    async def body(cluster: Cluster) -> None:
        stall_process(cluster.network, "w0")
        new = cluster.ask(4)
        await asyncio.sleep(3.0)
        stall_process(cluster.network, "w1")
        await asyncio.sleep(7.0)
        waiting = [stream for stream in new if not stream.tokens]
        resume_process(cluster.network, "w0")
        await until(lambda: all(stream.is_over for stream in new), 60.0)
        resume_process(cluster.network, "w1")
        assert waiting, "they began at w0, and had no token of w1 yet"
        await cluster.whole()
        await until(lambda: cluster.reachable() == 2, 15.0)

    clustered(body)


@pytest.mark.parametrize("stalled", [("f0",), EVERYTHING], ids=" ".join)
def test_a_frontend_that_stalls_beyond_the_grace_goes_on_by_migration(stalled: tuple[str, ...]) -> None:
    """Its workers have given its connections up; it goes on with the tokens that it has."""

    async def body(cluster: Cluster) -> None:
        cluster.ask()
        await asyncio.sleep(1.0)
        await cluster.stall(stalled, 60.0)
        await cluster.whole()

    clustered(body)


def test_requests_that_come_while_all_workers_are_stalled_wait_for_them() -> None:
    async def body(cluster: Cluster) -> None:
        cluster.ask(2)
        await asyncio.sleep(1.0)
        for name in ("w0", "w1"):
            stall_process(cluster.network, name)
        for _ in range(
            4
        ):  # while they are thought to be well, then while they are awaited, with and without a lease
            await asyncio.sleep(3.5)
            cluster.ask(2)
        assert cluster.reachable() == 0
        for name in ("w0", "w1"):
            resume_process(cluster.network, name)
        await cluster.whole()

    clustered(body)


@pytest.mark.parametrize("after_s", [0.5, 4.0, 7.0, 14.0])
@pytest.mark.parametrize("stall_s", [20.0, 29.0])
def test_the_first_requests_of_a_frontend_wait_for_workers_that_are_stalled(
    after_s: float, stall_s: float
) -> None:
    """It has never connected to them: no connection tells it that they are silent."""

    async def body(cluster: Cluster) -> None:
        for name in ("w0", "w1"):
            stall_process(cluster.network, name)
        await asyncio.sleep(after_s)
        cluster.ask(2)
        await asyncio.sleep(stall_s - after_s)
        for name in ("w0", "w1"):
            resume_process(cluster.network, name)
        await cluster.whole()

    clustered(body)


def test_a_stalled_worker_gets_nothing_new_and_its_streams_go_on_elsewhere() -> None:
    async def body(cluster: Cluster) -> None:
        streams = cluster.ask()
        await asyncio.sleep(1.0)
        stall_process(cluster.network, "w0")
        await asyncio.sleep(4.0)
        assert cluster.reachable() == 1
        new = cluster.ask(4)
        await asyncio.sleep(2.0)
        assert all(stream.tokens for stream in new)
        await cluster.whole()
        assert max(stream.longest_gap_s for stream in streams) < 6.0, "the stall was not waited for"
        resume_process(cluster.network, "w0")
        await until(lambda: cluster.reachable() == 2, 15.0)

    clustered(body)


def test_a_worker_that_is_cut_off_without_a_word_is_given_up_after_the_grace() -> None:
    """The partition of the last worker: no stream lasts for ever."""

    async def body(cluster: Cluster) -> None:
        streams = cluster.ask(3)
        await asyncio.sleep(1.0)
        began = asyncio.get_running_loop().time()
        cluster.network.partition("f0", "w0")
        await until(lambda: all(stream.is_over for stream in streams), 80.0)
        assert 25.0 < asyncio.get_running_loop().time() - began < 70.0
        assert {stream.error.code for stream in streams if stream.error is not None} == {"worker_lost"}
        late = cluster.ask(1)
        await until(lambda: late[0].is_over, 40.0)
        assert late[0].error is not None
        assert "check that the workers' processes run" in late[0].error.message
        cluster.network.heal("f0", "w0")
        await until(lambda: cluster.reachable() == 1, 15.0)
        [after] = cluster.ask(1)
        await until(lambda: after.is_over, 60.0)
        after.check()

    clustered(body, num_workers=1)


def test_a_frontend_that_is_cut_off_for_a_while_goes_on_with_its_streams() -> None:
    async def body(cluster: Cluster) -> None:
        cluster.ask()
        await asyncio.sleep(1.0)
        for name in ("w0", "w1", "r0", "disc"):
            cluster.network.partition("f0", name)
        await asyncio.sleep(10.0)
        for name in ("w0", "w1", "r0", "disc"):
            cluster.network.heal("f0", name)
        await cluster.whole()

    clustered(body)


def test_what_a_worker_keeps_for_a_stalled_frontend_is_bounded() -> None:
    async def body(cluster: Cluster) -> None:
        cluster.ask(20)
        await asyncio.sleep(1.0)
        stall_process(cluster.network, "f0")
        await asyncio.sleep(25.0)
        for name in ("w0", "w1"):
            gauges = cluster.runtimes[name].plane.gauges()
            assert gauges.send_buffer_bytes < 2 << 20
        resume_process(cluster.network, "f0")
        await cluster.whole()

    clustered(body)
