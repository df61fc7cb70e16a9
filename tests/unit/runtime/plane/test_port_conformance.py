"""The tcp plane passes the conformance suite: on sockets with both loops, and on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import uvloop
from tests.unit.runtime.security.certificates import issued_credentials

from kvolt.runtime.clock import SystemClock, ThreadBlocking
from kvolt.runtime.network import Listener, Network, ProtocolFactory, SocketNetwork
from kvolt.runtime.plane.connection import ConnectionOptions
from kvolt.runtime.plane.port import IncomingStream, OutgoingStream, RequestPlane
from kvolt.runtime.plane.session import SessionLimits
from kvolt.runtime.plane.tcp_plane import tcp_plane
from kvolt.runtime.security.secure_network import SecureNetwork
from kvolt.testing.plane import faults_suite as plane_faults_suite
from kvolt.testing.plane import suite as plane_suite
from kvolt.testing.plane.suite import Case, Harness, ProcessPorts, run_case
from kvolt.testing.virtual.link import LinkProfile
from kvolt.testing.virtual.loop import InlineBlocking, VirtualClock, run_virtual
from kvolt.testing.virtual.network import VirtualNetwork

CASES = (*plane_suite.CASES, *plane_faults_suite.CASES)
LIMITS = SessionLimits(window_items=32, max_message_bytes=16 << 20)


class _Gate(asyncio.Protocol):
    """Stands between a socket and its protocol, and can let nothing through either way."""

    def __init__(self, inner: asyncio.Protocol, silent: bool) -> None:
        self.inner = inner
        self.silent = silent
        self.transport: Any = None
        self.lost = False
        self.held: list[Callable[[], None]] | None = None
        """What came or was written while it is held back."""

    def hold(self) -> None:
        self.held = self.held or []

    def release(self) -> None:
        held, self.held = self.held or [], None
        for each in held:
            each()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.inner.connection_made(_GatedTransport(self, transport))

    def data_received(self, data: bytes) -> None:
        if self.held is not None:
            self.held.append(partial(self.data_received, data))
        elif not self.silent:
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
        if self._gate.held is not None:
            self._gate.held.append(partial(self.write, data))
        elif not self._gate.silent and not self._gate.lost:
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class GatedNetwork:
    """Sockets of one process that a test can cut or make silent."""

    def __init__(self, sockets: Network) -> None:
        self._sockets = sockets
        self._gates: list[_Gate] = []
        self._silent = self._holds = False

    async def listen(self, address: str, factory: ProtocolFactory) -> Listener:
        return await self._sockets.listen(address, lambda: self._gate(factory))

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol:
        gate = await self._sockets.connect(address, lambda: self._gate(factory), timeout_s)
        assert isinstance(gate, _Gate)
        return gate.inner

    def _gate(self, factory: ProtocolFactory) -> _Gate:
        self._gates.append(_Gate(factory(), self._silent))
        if self._holds:
            self._gates[-1].hold()
        return self._gates[-1]

    def hold(self) -> None:
        self._holds = True
        for gate in self._gates:
            gate.hold()

    def release(self) -> None:
        self._holds = False
        for gate in self._gates:
            gate.release()

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


class SocketHarness(Harness):
    dead_after_s = 0.8
    stall_grace_s = 3.0
    window_items = LIMITS.window_items
    max_message_bytes = LIMITS.max_message_bytes

    def __init__(self) -> None:
        super().__init__()
        self._options = ConnectionOptions(0.2, self.dead_after_s, LIMITS, self.stall_grace_s)
        self._networks: dict[str, GatedNetwork] = {}
        self._blocking = ThreadBlocking(1)

    def sockets(self, name: str) -> Network:
        return SocketNetwork()

    def ports(self, name: str) -> ProcessPorts:
        network = self._networks[name] = GatedNetwork(self.sockets(name))
        return ProcessPorts(SystemClock(), network, self._blocking, tcp_plane(network, self._options))

    def address(self, name: str) -> str:
        return "127.0.0.1:0"

    async def cut(self, name: str) -> None:
        self._networks[name].cut()

    async def isolate(self, name: str) -> None:
        self._networks[name].set_silent(True)

    async def rejoin(self, name: str) -> None:
        self._networks[name].set_silent(False)

    async def stall(self, name: str) -> None:
        self._networks[name].hold()

    async def end_stall(self, name: str) -> None:
        self._networks[name].release()

    async def close(self) -> None:
        await super().close()
        self._blocking.close()
        for network in self._networks.values():
            network.cut()
        await asyncio.sleep(0.01)  # the transports' last callbacks


class TlsHarness(SocketHarness):
    def sockets(self, name: str) -> Network:
        return SecureNetwork(issued_credentials(name))


class VirtualHarness(Harness):
    dead_after_s = 3.0
    stall_grace_s = 9.0
    window_items = LIMITS.window_items
    max_message_bytes = LIMITS.max_message_bytes

    def __init__(self) -> None:
        super().__init__()
        self._options = ConnectionOptions(1.0, self.dead_after_s, LIMITS, self.stall_grace_s)
        self._names: list[str] = []
        profile = LinkProfile(jitter_s=0.0002, bytes_per_s=1e9, rechunk=True)
        self._network = VirtualNetwork(random.Random(7), profile=profile)

    def ports(self, name: str) -> ProcessPorts:
        self._names.append(name)
        host = self._network.host(name)
        return ProcessPorts(VirtualClock(), host, InlineBlocking(), tcp_plane(host, self._options))

    def address(self, name: str) -> str:
        return f"{name}:0"

    def _others(self, name: str) -> list[str]:
        return [other for other in self._names if other != name]

    async def cut(self, name: str) -> None:
        for other in self._others(name):
            self._network.cut(name, other, silent=False)

    async def isolate(self, name: str) -> None:
        for other in self._others(name):
            self._network.partition(name, other)

    async def rejoin(self, name: str) -> None:
        for other in self._others(name):
            self._network.heal(name, other)

    async def stall(self, name: str) -> None:
        self._network.pause(name)

    async def end_stall(self, name: str) -> None:
        self._network.resume(name)

    async def close(self) -> None:
        await super().close()
        self._network.close()


class _Behind:
    """Shows what a port names and nothing else, and is no instance of what it stands for."""

    def __init__(self, inner: Any, port: type) -> None:
        names = {name for name in (*vars(port), *port.__annotations__) if not name.startswith("_")}
        self.__dict__.update(_inner=inner, _names=names)

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(f"the port has no {name}")
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._names:
            raise AttributeError(f"the port has no {name}")
        setattr(self._inner, name, value)


class _PlaneBehind(_Behind):
    async def open(self, *arguments: Any, **options: Any) -> Any:
        return _Behind(await self._inner.open(*arguments, **options), OutgoingStream)


class PortOnlyHarness(VirtualHarness):
    """The same plane, with only RequestPlane and its streams visible."""

    def ports(self, name: str) -> ProcessPorts:
        ports = super().ports(name)

        def plane(process: str, on_open: Callable[[Any], None]) -> Any:
            inner = ports.plane(process, lambda stream: on_open(_Behind(stream, IncomingStream)))
            return _PlaneBehind(inner, RequestPlane)

        return replace(ports, plane=plane)


def on_real_loop(
    case: Case,
    make_loop: Callable[[], asyncio.AbstractEventLoop],
    harness: type[SocketHarness] = SocketHarness,
) -> None:
    complaints: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await run_case(case, harness)

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
def test_tls_on_uvloop(case: Case) -> None:
    on_real_loop(case, uvloop.new_event_loop, TlsHarness)


@pytest.mark.parametrize("case", CASES, ids=plane_suite.name)
def test_virtual(case: Case) -> None:
    run_virtual(lambda: run_case(case, VirtualHarness), until_s=600)


@pytest.mark.parametrize("case", CASES, ids=plane_suite.name)
def test_the_port_is_sufficient(case: Case) -> None:
    run_virtual(lambda: run_case(case, PortOnlyHarness), until_s=600)
