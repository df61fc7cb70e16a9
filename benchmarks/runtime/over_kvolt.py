"""The request plane as the worker shell and the journey use it.

Three ways, by the job's system:

* `kvolt sink`: the step loop sends on the streams themselves, the client's sink is called on arrival;
* `kvolt iterator`: the same server, one `async for` task per stream at the client;
* `kvolt generators`: one async generator per stream at the server, `async for` at the client.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from operator import attrgetter
from typing import Any

from benchmarks.runtime.workload import (
    WAIT_S,
    Arrivals,
    Job,
    StepClock,
    Tally,
    Work,
    sample_deltas,
)

from kvolt.core.delta import Delta
from kvolt.core.errors import KvoltError
from kvolt.runtime.address import EndpointAddress
from kvolt.runtime.clock import SystemClock, ThreadBlocking, new_id
from kvolt.runtime.discovery_mem import MemDiscovery, MemStore
from kvolt.runtime.events_mem import MemBus, MemEvents
from kvolt.runtime.network import Listener, ProtocolFactory, SocketNetwork
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.runtime.streams import ServedStream
from kvolt.runtime.tasks import Crew

ENDPOINT = EndpointAddress.parse("bench.worker.generate")

SINK, ITERATOR, GENERATORS = "kvolt sink", "kvolt iterator", "kvolt generators"

_CHECK_ALL_EVERY = 16
"""Steps between two looks at every stream."""

_writable = attrgetter("writable")


class CountingNetwork:
    """Sockets whose writes are counted, so that the bare socket can be given as many."""

    def __init__(self) -> None:
        self._sockets = SocketNetwork()
        self.writes = 0

    async def listen(self, address: str, factory: ProtocolFactory) -> Listener:
        return await self._sockets.listen(address, lambda: self._counted(factory()))

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol:
        return await self._sockets.connect(address, lambda: self._counted(factory()), timeout_s)

    def _counted(self, protocol: asyncio.Protocol) -> asyncio.Protocol:
        made = protocol.connection_made
        protocol.connection_made = lambda transport: made(_CountedTransport(transport, self))  # type: ignore[method-assign,arg-type]
        return protocol


class _CountedTransport:
    def __init__(self, transport: Any, network: CountingNetwork) -> None:
        self._transport = transport
        self._write = transport.write
        self._network = network

    def write(self, data: bytes) -> None:
        self._network.writes += 1
        self._write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class KvoltSide:
    """A process of kvolt with a request plane and nothing else."""

    def __init__(self, name: str, seed: int) -> None:
        clock = SystemClock()
        rng = random.Random(seed)
        store, bus = MemStore(), MemBus()
        self.network = CountingNetwork()
        self._blocking = ThreadBlocking()
        ports = Ports(
            clock,
            rng,
            self.network,
            self._blocking,
            lambda connections: MemDiscovery(store, clock, rng),
            lambda discovery: MemEvents(bus, new_id(rng)),
        )
        self.runtime = Runtime(ports, ProcessOptions(name))

    @property
    def address(self) -> str:
        return self.runtime.connections.address or ""

    def counters(self) -> dict[str, int]:
        stats = self.runtime.connections.stats
        return {
            "writes": self.network.writes,
            "bytes_out": stats.bytes_out,
            "frames_out": stats.frames_out,
            "items_in": stats.items_in,
            "merged": stats.merged,
        }

    async def close(self) -> None:
        await self.runtime.close()
        self._blocking.close()


class StreamServer(KvoltSide):
    """Answers all streams from one step loop."""

    def __init__(self, job: Job) -> None:
        super().__init__("server", 1)
        self._streams: list[ServedStream] = []
        self._arrivals = Arrivals(job.streams)
        self._deltas = sample_deltas()

    async def start(self) -> None:
        await self.runtime.start()
        await self.runtime.serve_streams(ENDPOINT, self._on_stream)

    def _on_stream(self, stream: ServedStream) -> None:
        stream.body = b""
        self._streams.append(stream)
        self._arrivals.add()

    async def wait_open(self) -> None:
        await self._arrivals.wait()

    async def produce(self, work: Work) -> dict[str, Any]:
        streams, deltas = self._streams, self._deltas
        last = streams[-1]
        for step in range(1, work.steps + 1):
            delta = deltas[step & 1023]
            for stream in streams:
                stream.send(delta)
            # A reader takes the streams in order, so the last one tells of all; that is a habit, not a
            # promise, hence the look at every one now and then (and the count of merges at the end).
            if not last.writable or (step % _CHECK_ALL_EVERY == 0 and not all(map(_writable, streams))):
                await self._wait_writable()
            await asyncio.sleep(0)
        return {}

    async def _wait_writable(self) -> None:
        """Until every stream would send the next delta as it is, instead of merging it."""
        for stream in self._streams:
            if stream.writable:
                continue
            room = asyncio.Event()
            stream.on_writable = room.set
            async with asyncio.timeout(WAIT_S):
                while not stream.writable:
                    if stream.closed:
                        raise RuntimeError("a stream was closed under the benchmark")
                    room.clear()
                    await room.wait()
            stream.on_writable = None


class GeneratorServer(KvoltSide):
    """Answers each stream from an async generator of its own."""

    def __init__(self, job: Job) -> None:
        super().__init__("server", 1)
        self._clock = StepClock(job.streams)
        self._arrivals = Arrivals(job.streams)
        self._deltas = sample_deltas()

    async def start(self) -> None:
        await self.runtime.start()
        await self.runtime.serve(ENDPOINT, self._generate, int)

    async def _generate(self, request: int) -> AsyncIterator[Delta]:
        clock, deltas = self._clock, self._deltas
        self._arrivals.add()
        num_written = 0
        while True:
            await clock.after(num_written)
            num_written += 1
            yield deltas[num_written & 1023]
            clock.written()

    async def wait_open(self) -> None:
        await self._arrivals.wait()

    async def produce(self, work: Work) -> dict[str, Any]:
        await self._clock.run(work.steps)
        return {}


class _CountingSink:
    __slots__ = ("_tally",)

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def on_item(self, item: Delta) -> None:
        tally = self._tally
        tally.tokens += len(item.token_ids)
        if tally.tokens >= tally.expected:
            tally.reach()

    def on_end(self, error: KvoltError | None) -> None:
        self._tally.fail(error)


class KvoltClient(KvoltSide):
    """Reads all streams, by sinks or by one task per stream."""

    def __init__(self, job: Job) -> None:
        super().__init__("client", 2)
        self._job = job
        self._tally = Tally()
        self._crew = Crew("readers")

    async def open(self) -> None:
        await self.runtime.start()
        client = await self.runtime.client(ENDPOINT, static=[self._job.address])
        for number in range(self._job.streams):
            if self._job.system == SINK:
                await client.call(number, _CountingSink(self._tally))
            else:
                self._crew.start(self._read(await client.stream(number)), "reader")

    async def _read(self, answers: AsyncIterator[Delta]) -> None:
        tally = self._tally
        try:
            async for delta in answers:
                tally.tokens += len(delta.token_ids)
                if tally.tokens >= tally.expected:
                    tally.reach()
        except KvoltError as error:
            tally.fail(error)

    async def consume(self, work: Work) -> dict[str, Any]:
        await self._tally.reached(work.steps * self._job.streams)
        return {}

    def counters(self) -> dict[str, int]:
        return {**super().counters(), "tokens": self._tally.tokens}

    async def close(self) -> None:
        await self._crew.close()
        await super().close()


async def serve(job: Job) -> StreamServer | GeneratorServer:
    server = GeneratorServer(job) if job.system == GENERATORS else StreamServer(job)
    await server.start()
    return server


async def connect(job: Job) -> KvoltClient:
    return KvoltClient(job)
