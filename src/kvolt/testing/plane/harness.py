"""What every case of the request plane's suite needs: the harness, the runner, and what cases are made of.

Must not know any plane: cases see only RequestPlane, Runtime, EndpointClient and what the handlers see.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kvolt.runtime.clock import Blocking, Clock, new_id
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.endpoint.address import EndpointAddress
from kvolt.runtime.endpoint.call import ResponseStream
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.runtime.network import Network
from kvolt.runtime.plane.port import PlaneFactory, RequestPlane, ServeStream
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.testing.discovery.observer import SOON_S, expect

_POLL_S = 0.005

E = TypeVar("E", bound=BaseException)


@dataclass(frozen=True, slots=True)
class Ground:
    """What a process stands on, and the plane under test."""

    clock: Clock
    network: Network
    blocking: Blocking
    plane: PlaneFactory


class Harness(ABC):
    """Makes the processes of one case, and knows how to break the way between them.

    A process is known by its name, which is used once. Time passes with `asyncio.sleep`.
    """

    dead_after_s: float
    """How long a peer may be silent: long against the machine's hiccups, at most 5 s."""
    stall_grace_s: float
    """How long streams of a silent peer are kept: at least three times as long, at most 30 s."""
    window_items: int
    """Items that may be on their way to a reader that takes none; at most 64."""
    max_message_bytes: int
    """Between 11 and 64 MB."""

    def __init__(self) -> None:
        self._store, self._bus = MemStore(), MemBus()
        self._runtimes: list[Runtime] = []
        self._planes: list[RequestPlane] = []

    @abstractmethod
    def ground(self, name: str) -> Ground:
        """For a process of this name."""

    @abstractmethod
    def address(self, name: str) -> str:
        """Where it should listen, on a port of the system's choice."""

    @abstractmethod
    async def cut(self, name: str) -> None:
        """End every connection of a process; both ends are told. New ones can be opened."""

    @abstractmethod
    async def isolate(self, name: str) -> None:
        """From now on nothing reaches a process or leaves it, and nobody is told."""

    @abstractmethod
    async def rejoin(self, name: str) -> None:
        """A process that was isolated can be reached again."""

    @abstractmethod
    async def hold_back(self, name: str) -> None:
        """From now on nothing reaches a process or leaves it; its connections stay up and lose no byte."""

    @abstractmethod
    async def release(self, name: str) -> None:
        """What was held back arrives."""

    async def runtime(self, name: str) -> Runtime:
        """A started process that finds all others of this harness."""
        ground, rng = self.ground(name), random.Random(name)
        ports = Ports(
            ground.clock,
            rng,
            ground.network,
            ground.blocking,
            ground.plane,
            lambda plane: MemDiscovery(self._store, ground.clock, rng),
            lambda discovery: MemEvents(self._bus, new_id(rng)),
        )
        runtime = Runtime(ports, ProcessOptions(name, listen=self.address(name)))
        self._runtimes.append(runtime)
        await runtime.start()
        return runtime

    async def plane(self, name: str, on_open: ServeStream) -> RequestPlane:
        """A plane that listens, with no process around it."""
        plane = self.ground(name).plane(name, on_open)
        self._planes.append(plane)
        await plane.listen(self.address(name))
        return plane

    async def close(self) -> None:
        """Close every process and plane made; then, in a subclass, what they stood on."""
        for runtime in self._runtimes:
            await runtime.close()
        for plane in self._planes:
            await plane.close()


Case = Callable[[Harness], Awaitable[None]]


def name(case: Case) -> str:
    return getattr(case, "__name__", repr(case))


async def run_case(case: Case, make_harness: Callable[[], Harness], timeout_s: float = 50.0) -> None:
    """One case with a harness of its own, made on the running loop; it must leave no task behind."""
    before = asyncio.all_tasks()
    harness = make_harness()
    try:
        async with asyncio.timeout(timeout_s):
            await case(harness)
    finally:
        await harness.close()
    left = sorted(task.get_name() for task in asyncio.all_tasks() - before)
    expect(not left, f"tasks left behind: {left}")


# -- what cases are made of


ENDPOINT = EndpointAddress("ns", "worker", "generate")


@asynccontextmanager
async def served(
    harness: Harness, handler: Callable[[Any], AsyncIterator[Any]], kind: Any = Any
) -> AsyncIterator[tuple[Runtime, Runtime, EndpointClient]]:
    """A process that serves the handler, one that calls, and its client, which sees the instance."""
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


async def fails(kind: type[E], work: Awaitable[Any]) -> E:
    """The error that the work must end with; not a subclass."""
    try:
        result = await work
    except BaseException as error:
        if type(error) is kind:
            return error
        raise
    raise AssertionError(f"no {kind.__name__} but {result!r:.200}")


async def count_to(number: int) -> AsyncIterator[int]:
    for value in range(number):
        yield value


class Probe:
    """A handler's life as its caller's test sees it."""

    def __init__(self) -> None:
        self.num_started = self.num_closed = self.num_sent = 0
        self.closed_at: list[float] = []

    async def forever(self, num_first: int) -> AsyncIterator[int]:
        """Some items, then silence until somebody ends it."""
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
