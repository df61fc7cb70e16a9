"""Harness, runner and helpers of the request plane's suite.

Must not know any implementation: cases use only RequestPlane, Runtime, EndpointClient and handlers.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kvolt.core.endpoints import EndpointAddress
from kvolt.runtime.clock import Blocking, Clock, new_id
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.endpoint.call import ResponseStream
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.runtime.network import Network
from kvolt.runtime.plane.port import PlaneFactory, RequestPlane, ServeStream
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.testing.cases import SOON_S, expect

_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class ProcessPorts:
    """Ports of a process, and the plane under test."""

    clock: Clock
    network: Network
    blocking: Blocking
    plane: PlaneFactory


class Harness(ABC):
    """Creates the processes of one case and breaks the network between them.

    Process names are unique. Time passes with `asyncio.sleep`.
    """

    dead_after_s: float
    """Maximum silence of a peer: well above the pauses of a busy machine, at most 5 s."""
    stall_grace_s: float
    """Time for which streams of a silent peer are kept: at least three times `dead_after_s`, at most 30 s."""
    window_items: int
    """Maximum unread items per stream; at most 64."""
    max_message_bytes: int
    """Between 11 and 64 MB."""

    def __init__(self) -> None:
        self._store, self._bus = MemStore(), MemBus()
        self._runtimes: list[Runtime] = []
        self._planes: list[RequestPlane] = []

    @abstractmethod
    def ports(self, name: str) -> ProcessPorts:
        """Return the ports of a process."""

    @abstractmethod
    def address(self, name: str) -> str:
        """Return the listen address of a process, with a free port."""

    @abstractmethod
    async def cut(self, name: str) -> None:
        """Reset every connection of a process; both ends are notified. New ones can be opened."""

    @abstractmethod
    async def isolate(self, name: str) -> None:
        """Drop all traffic of a process without notifying its peers."""

    @abstractmethod
    async def rejoin(self, name: str) -> None:
        """End the isolation of a process."""

    @abstractmethod
    async def stall(self, name: str) -> None:
        """Delay all traffic of a process; its connections stay open and lose no byte."""

    @abstractmethod
    async def end_stall(self, name: str) -> None:
        """Deliver the delayed traffic."""

    async def runtime(self, name: str) -> Runtime:
        """Start a process that discovers all others of this harness."""
        process, rng = self.ports(name), random.Random(name)
        ports = Ports(
            process.clock,
            rng,
            process.network,
            process.blocking,
            process.plane,
            lambda plane: MemDiscovery(self._store, process.clock, rng),
            lambda discovery, plane, server: MemEvents(self._bus, new_id(rng)),
        )
        runtime = Runtime(ports, ProcessOptions(name, listen=self.address(name)))
        self._runtimes.append(runtime)
        await runtime.start()
        return runtime

    async def plane(self, name: str, on_open: ServeStream) -> RequestPlane:
        """Return a listening plane without a process."""
        plane = self.ports(name).plane(name, on_open)
        self._planes.append(plane)
        await plane.listen(self.address(name))
        return plane

    async def close(self) -> None:
        """Close all processes and planes; subclasses then release their own resources."""
        for runtime in self._runtimes:
            await runtime.close()
        for plane in self._planes:
            await plane.close()


Case = Callable[[Harness], Awaitable[None]]


async def run_case(case: Case, make_harness: Callable[[], Harness], timeout_s: float = 50.0) -> None:
    """Run one case with a new harness on the running loop; it must leave no task behind."""
    before = asyncio.all_tasks()
    harness = make_harness()
    try:
        async with asyncio.timeout(timeout_s):
            await case(harness)
    finally:
        await harness.close()
    left = sorted(task.get_name() for task in asyncio.all_tasks() - before)
    expect(not left, f"tasks left behind: {left}")


# -- helpers of cases


ENDPOINT = EndpointAddress("ns", "worker", "generate")


@asynccontextmanager
async def served(
    harness: Harness, handler: Callable[[Any], AsyncIterator[Any]], kind: Any = Any
) -> AsyncIterator[tuple[Runtime, Runtime, EndpointClient]]:
    """A process that serves the handler, a process that calls it, and its client."""
    server, caller = await harness.runtime("server"), await harness.runtime("caller")
    await server.serve(ENDPOINT, handler, kind)
    yield server, caller, await client_of(caller)


async def client_of(
    caller: Runtime, num_instances: int = 1, endpoint: EndpointAddress = ENDPOINT
) -> EndpointClient:
    client = await caller.client(endpoint)
    await client.wait_synced(SOON_S)
    await until(lambda: len(client.candidates()) == num_instances, f"{num_instances} candidates")
    return client


async def collect(stream: ResponseStream) -> list[Any]:
    async with asyncio.timeout(SOON_S):
        return [item async for item in stream]


async def answers(client: EndpointClient, request: Any) -> list[Any]:
    return await collect(await client.stream(request))


async def until(condition: Callable[[], bool], what: str, within_s: float = SOON_S) -> None:
    try:
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110 - a condition of another process has no event
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise AssertionError(f"not seen in {within_s:g} s: {what}") from None


async def count_to(number: int) -> AsyncIterator[int]:
    for value in range(number):
        yield value


class Probe:
    """Handlers that count their starts, items and ends."""

    def __init__(self) -> None:
        self.num_started = self.num_closed = self.num_sent = 0
        self.closed_at: list[float] = []

    async def forever(self, num_first: int) -> AsyncIterator[int]:
        """Yield some items, then wait until cancelled."""
        self.num_started += 1
        try:
            for value in range(num_first):
                self.num_sent += 1
                yield value
            await asyncio.Event().wait()
        finally:
            self.num_closed += 1
            self.closed_at.append(asyncio.get_running_loop().time())

    async def count_to(self, number: int) -> AsyncIterator[int]:
        for value in range(number):
            self.num_sent += 1
            yield value
