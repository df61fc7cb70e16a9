"""The tcp plane passes the conformance suite: on sockets with both loops, and on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from kvolt.runtime.clock import Blocking, Clock, SystemClock, ThreadBlocking, new_id
from kvolt.runtime.connection import ConnectionOptions
from kvolt.runtime.discovery_mem import MemDiscovery, MemStore
from kvolt.runtime.events_mem import MemBus, MemEvents
from kvolt.runtime.network import Listener, Network, ProtocolFactory, SocketNetwork
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.runtime.session import SessionLimits
from kvolt.testing import plane_faults_suite, plane_suite
from kvolt.testing.link import LinkProfile
from kvolt.testing.loop import InlineBlocking, VirtualClock, run_virtual
from kvolt.testing.network import VirtualNetwork
from kvolt.testing.plane_suite import Case, run_case

CASES = (*plane_suite.CASES, *plane_faults_suite.CASES)
LIMITS = SessionLimits(window_items=32, max_message_bytes=16 << 20)


class _Gate(asyncio.Protocol):
    """Stands between a socket and its protocol, and can let nothing through either way."""

    def __init__(self, inner: asyncio.Protocol, silent: bool) -> None:
        self.inner = inner
        self.silent = silent
        self.transport: Any = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.inner.connection_made(_GatedTransport(self, transport))

    def data_received(self, data: bytes) -> None:
        if not self.silent:
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.inner.connection_lost(exc)


class _GatedTransport:
    def __init__(self, gate: _Gate, transport: Any) -> None:
        self._gate = gate
        self._transport = transport

    def write(self, data: bytes) -> None:
        if not self._gate.silent:
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class GatedNetwork:
    """Sockets of one process that a test can cut or make silent."""

    def __init__(self) -> None:
        self._sockets = SocketNetwork()
        self._gates: list[_Gate] = []
        self._silent = False

    async def listen(self, address: str, factory: ProtocolFactory) -> Listener:
        return await self._sockets.listen(address, lambda: self._gate(factory))

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol:
        gate = await self._sockets.connect(address, lambda: self._gate(factory), timeout_s)
        assert isinstance(gate, _Gate)
        return gate.inner

    def _gate(self, factory: ProtocolFactory) -> _Gate:
        self._gates.append(_Gate(factory(), self._silent))
        return self._gates[-1]

    def cut(self) -> None:
        for gate in self._gates:
            if gate.transport is not None and not gate.lost:
                gate.transport.abort()

    def set_silent(self, silent: bool) -> None:
        self._silent = silent
        for gate in self._gates:
            gate.silent = True  # for good: a stream that has lost bytes cannot go on
        if not silent:
            self.cut()


class _Harness:
    """What both harnesses share: processes on one in-memory discovery and event bus."""

    window_items = LIMITS.window_items
    max_message_bytes = LIMITS.max_message_bytes

    def __init__(self, dead_after_s: float, heartbeat_s: float) -> None:
        self.dead_after_s = dead_after_s
        self._options = ConnectionOptions(heartbeat_s, dead_after_s, LIMITS)
        self._store, self._bus = MemStore(), MemBus()
        self._runtimes: list[Runtime] = []

    async def _start(self, name: str, clock: Clock, network: Network, blocking: Blocking) -> Runtime:
        rng = random.Random(name)
        ports = Ports(
            clock,
            rng,
            network,
            blocking,
            lambda connections: MemDiscovery(self._store, clock, rng),
            lambda discovery: MemEvents(self._bus, new_id(rng)),
        )
        runtime = Runtime(
            ports, ProcessOptions(name, listen=f"{self._host(name)}:0", connection=self._options)
        )
        self._runtimes.append(runtime)
        await runtime.start()
        return runtime

    def _host(self, name: str) -> str:
        raise NotImplementedError

    def num_connections(self, runtime: Runtime) -> int:
        return runtime.connections.num_open

    async def close(self) -> None:
        for runtime in self._runtimes:
            await runtime.close()


class SocketHarness(_Harness):
    def __init__(self) -> None:
        super().__init__(dead_after_s=0.8, heartbeat_s=0.2)
        self._networks: dict[str, GatedNetwork] = {}
        self._blocking = ThreadBlocking(1)

    def _host(self, name: str) -> str:
        return "127.0.0.1"

    async def runtime(self, name: str) -> Runtime:
        network = self._networks[name] = GatedNetwork()
        return await self._start(name, SystemClock(), network, self._blocking)

    async def cut(self, runtime: Runtime) -> None:
        self._networks[runtime.options.name].cut()

    async def isolate(self, runtime: Runtime) -> None:
        self._networks[runtime.options.name].set_silent(True)

    async def rejoin(self, runtime: Runtime) -> None:
        self._networks[runtime.options.name].set_silent(False)

    async def close(self) -> None:
        await super().close()
        self._blocking.close()
        for network in self._networks.values():
            network.cut()
        await asyncio.sleep(0.01)  # the transports' last callbacks


class VirtualHarness(_Harness):
    def __init__(self) -> None:
        super().__init__(dead_after_s=3.0, heartbeat_s=1.0)
        profile = LinkProfile(jitter_s=0.0002, bytes_per_s=1e9, rechunk=True)
        self._network = VirtualNetwork(random.Random(7), profile=profile)

    def _host(self, name: str) -> str:
        return name

    async def runtime(self, name: str) -> Runtime:
        return await self._start(name, VirtualClock(), self._network.host(name), InlineBlocking())

    def _others(self, runtime: Runtime) -> list[str]:
        return [each.options.name for each in self._runtimes if each is not runtime]

    async def cut(self, runtime: Runtime) -> None:
        for other in self._others(runtime):
            self._network.cut(runtime.options.name, other, silent=False)

    async def isolate(self, runtime: Runtime) -> None:
        for other in self._others(runtime):
            self._network.partition(runtime.options.name, other)

    async def rejoin(self, runtime: Runtime) -> None:
        for other in self._others(runtime):
            self._network.heal(runtime.options.name, other)

    async def close(self) -> None:
        await super().close()
        self._network.close()


def on_real_loop(case: Case, make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await run_case(case, SocketHarness)

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())
    assert complaints == []


@pytest.mark.parametrize("case", CASES, ids=plane_suite.name)
def test_sockets_on_asyncio(case: Case) -> None:
    on_real_loop(case, asyncio.new_event_loop)


@pytest.mark.parametrize("case", CASES, ids=plane_suite.name)
def test_sockets_on_uvloop(case: Case) -> None:
    on_real_loop(case, uvloop.new_event_loop)


@pytest.mark.parametrize("case", CASES, ids=plane_suite.name)
def test_virtual(case: Case) -> None:
    run_virtual(lambda: run_case(case, VirtualHarness), until_s=600)
