"""The request plane as the worker shell and the journey use it.

Four ways, by the job's system:

* `kvolt whole step`: the step loop sends plain tokens for the whole batch, one call at the client takes them;
* `kvolt tls`: `kvolt whole step` over mutual TLS, as with a cluster key;
* `kvolt step`: the same server, the client's sinks are called for each token;
* `kvolt sink`: the step loop sends a delta on each stream, the client's sinks are called on arrival.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from benchmarks.runtime.workload import WAIT_S, Arrivals, Job, Tally, Work, sample_steps

from kvolt.core.delta import Delta, plain_delta
from kvolt.core.endpoints import EndpointAddress
from kvolt.core.errors import KvoltError
from kvolt.runtime.clock import SystemClock, ThreadBlocking, new_id
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.runtime.network import Listener, ProtocolFactory, SocketNetwork
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.steps import StepSender
from kvolt.runtime.plane.streams import Sink
from kvolt.runtime.plane.tcp_plane import tcp_plane
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.runtime.security.credentials import Credentials, KeySource
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.runtime.security.secure_network import SecureNetwork

ENDPOINT = EndpointAddress.parse("bench.worker.generate")

WHOLE, STEP, SINK = "kvolt whole step", "kvolt step", "kvolt sink"
TLS = "kvolt tls"

_CHECK_ALL_EVERY = 16
"""Steps between two looks at every stream."""

_writable = attrgetter("writable")


class CountingNetwork(SocketNetwork):
    """Network that counts writes, so that the bare socket can make as many."""

    writes = 0

    async def listen(self, address: str, factory: ProtocolFactory) -> Listener:
        return await super().listen(address, lambda: self._counted(factory()))

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol:
        return await super().connect(address, lambda: self._counted(factory()), timeout_s)

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

    def __init__(self, name: str, seed: int, key: str = "") -> None:
        """`key`: cluster key for TLS; empty: plain TCP."""
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
            tcp_plane(SecureNetwork(_credentials(key, clock)) if key else self.network),
            lambda plane: MemDiscovery(store, clock, rng),
            lambda discovery, plane, server: MemEvents(bus, new_id(rng)),
        )
        self.runtime = Runtime(ports, ProcessOptions(name))

    @property
    def address(self) -> str:
        return self.runtime.plane.address or ""

    def counters(self) -> dict[str, int]:
        stats = self.runtime.plane.stats
        return {"writes": self.network.writes, "bytes_out": stats.bytes_out, "merged": stats.merged}

    async def close(self) -> None:
        await self.runtime.close()
        self._blocking.close()


def _credentials(key: str, clock: SystemClock) -> Credentials:
    return Credentials(KeySource(Path(key), Identity(ProcessRole.FRONTEND, "benchmark")), clock)


class StreamServer(KvoltSide):
    """Answers all streams from one step loop."""

    def __init__(self, job: Job, more_streams: int = 0) -> None:
        super().__init__("server", 1, job.key)
        self._streams: list[ServedStream] = []
        self._arrivals = Arrivals(job.streams + more_streams)
        self._tokens = sample_steps(job.streams)
        self._deltas = [[plain_delta(token_id) for token_id in step] for step in self._tokens]

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
        last, mask = streams[-1], len(deltas) - 1
        for step in range(1, work.steps + 1):
            for stream, delta in zip(streams, deltas[step & mask], strict=True):
                stream.send(delta)
            # A reader takes the streams in order, so the last one stands for all; this is not guaranteed,
            # hence the check of every one now and then (and the count of merges at the end).
            if not last.writable or (step % _CHECK_ALL_EVERY == 0 and not all(map(_writable, streams))):
                await self._wait_writable()
            await asyncio.sleep(0)
        return {}

    async def _wait_writable(self) -> None:
        """Wait until every stream would send the next delta unmerged."""
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


class StepServer(StreamServer):
    """Answers all streams with one call per step."""

    async def produce(self, work: Work) -> dict[str, Any]:
        tokens, mask = self._tokens, len(self._tokens) - 1
        sender, session = StepSender(self._streams), self._streams[0].session
        for step in range(work.steps):
            sender.send(tokens[step & mask])
            if session.step_owner is None:  # the step went stream by stream: some may have no credit
                await self._wait_writable()
            await asyncio.sleep(0)
        return {}


class _Sink:
    """The least that a reader can do with an item: look at it and know when the last one came."""

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


class _WholeStepSink(_Sink):
    """A sink that leaves plain tokens to one object for all; what is more than a plain token comes here."""

    __slots__ = ("steps",)

    def __init__(self, tally: Tally, steps: _WholeSteps) -> None:
        super().__init__(tally)
        self.steps = steps


class _WholeSteps:
    __slots__ = ("_tally",)

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def on_step(self, sinks: Sequence[Sink], token_ids: Sequence[int]) -> None:
        self._tally.add(len(token_ids))


class KvoltClient(KvoltSide):
    """Reads all streams: plain tokens of a step in one call, or a sink per stream."""

    def __init__(self, job: Job) -> None:
        super().__init__("client", 2, job.key)
        self._job = job
        self._tally = Tally(job.streams)
        self.consume = self._tally.consume

    async def open(self) -> None:
        await self.runtime.start()
        client = await self.runtime.client(ENDPOINT, static=[self._job.address])
        steps = _WholeSteps(self._tally)
        for number in range(self._job.streams):
            if self._job.system in (WHOLE, TLS):
                await client.call(number, _WholeStepSink(self._tally, steps))
            else:
                await client.call(number, _Sink(self._tally))

    def counters(self) -> dict[str, int]:
        return {**super().counters(), "tokens": self._tally.tokens}


async def serve(job: Job) -> StreamServer:
    server = StreamServer(job) if job.system == SINK else StepServer(job)
    await server.start()
    return server


async def connect(job: Job) -> KvoltClient:
    return KvoltClient(job)
