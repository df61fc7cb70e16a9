"""In-memory network on virtual time: hosts, connections and injected faults.

`link` models a single connection. Must not know the meaning of the bytes or the loop; all randomness comes from one
generator.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvolt.core.errors import ConfigError, ConnectFailed, NotFound
from kvolt.runtime.network import Listener, ProtocolFactory, join_address, split_address
from kvolt.runtime.security.identity import Identity
from kvolt.testing.virtual.link import Kind, LinkProfile, Pipe, Route, VirtualTransport

_DYNAMIC_PORTS = range(49152, 65536)
_FIRST_CONNECT_RETRY_S = 1.0
_OWN_NAMES = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")


@dataclass(slots=True, eq=False)
class _VirtualListener:
    host: VirtualHost
    port: int
    factory: ProtocolFactory
    context: contextvars.Context

    @property
    def address(self) -> str:
        return join_address(self.host.name, self.port)

    async def close(self) -> None:
        if self.host.listeners.get(self.port) is self:
            del self.host.listeners[self.port]


class VirtualHost:
    """One machine with one process: a `Network` port with addresses `name:port`."""

    def __init__(self, network: VirtualNetwork, name: str) -> None:
        self.name = name
        self.identity: Identity | None = None
        """Identity that the peers of its connections see; None as without TLS."""
        self.alive = True
        self.answers = True
        """False after a silent crash: connection attempts get no response."""
        self.paused = False
        self.pending_losses: list[Callable[[], None]] = []
        """Callbacks of connections that ended while the process was paused."""
        self.num_crashes = 0
        self.listeners: dict[int, _VirtualListener] = {}
        self._network = network
        self._next_port = 0

    @property
    def certificate(self) -> object:
        """As of `ssl.SSLObject.getpeercert`."""
        return None if self.identity is None else {"subjectAltName": (("URI", self.identity.uri),)}

    def wake(self) -> None:
        self.paused = False
        for report in self.pending_losses:
            report()
        self.pending_losses.clear()

    def factory_at(self, port: int) -> ProtocolFactory | None:
        listener = self.listeners.get(port)
        return None if listener is None else listener.factory

    async def listen(self, address: str, factory: ProtocolFactory) -> Listener:
        name, port = split_address(address)
        if not self.alive or name not in (self.name, *_OWN_NAMES):
            raise ConfigError(
                f"cannot listen on {address}", key="host", remedy="use an address of this machine"
            )
        if port in self.listeners:
            raise ConfigError(
                f"{address} is already in use",
                key="port",
                remedy="choose another port, or 0 for any free one",
            )
        listener = _VirtualListener(self, port or self._free_port(), factory, contextvars.copy_context())
        self.listeners[listener.port] = listener
        return listener

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol:
        try:
            name, port = split_address(address)
        except ConfigError as error:
            raise ConnectFailed(error.message, address=address) from error
        try:
            target = self if name in _OWN_NAMES else self._network.find(name)
        except NotFound:
            raise ConnectFailed(f"cannot connect to {address}: unknown host", address=address) from None
        try:
            async with asyncio.timeout(timeout_s):
                listener = await self._shake_hands(target, port)
        except TimeoutError:
            raise ConnectFailed(f"{address} did not answer within {timeout_s:g} s", address=address) from None
        if listener is None:
            raise ConnectFailed(f"cannot connect to {address}: Connection refused", address=address)
        protocol = factory()
        client = self._network.link(self, self._free_port(), listener)
        client.open(protocol)
        return protocol

    async def _shake_hands(self, target: VirtualHost, port: int) -> _VirtualListener | None:
        """One round trip, repeated while packets are lost. None: refused, or this host is down."""
        route = self._network.route(self, target)
        num_crashes = self.num_crashes
        retry_s = _FIRST_CONNECT_RETRY_S
        while self.alive and self.num_crashes == num_crashes:
            await asyncio.sleep(self._network.draw_latency_s(route.profile))
            if route.partitioned_at is None and target.answers and not self.paused:
                listener = target.listeners.get(port)
                await asyncio.sleep(self._network.draw_latency_s(route.profile))
                unchanged = self.num_crashes == num_crashes and listener is target.listeners.get(port)
                if unchanged and route.partitioned_at is None:
                    return listener
            await asyncio.sleep(retry_s)
            retry_s *= 2
        return None

    def _free_port(self) -> int:
        while True:
            port = _DYNAMIC_PORTS[self._next_port % len(_DYNAMIC_PORTS)]
            self._next_port += 1
            if port not in self.listeners:
                return port


HostRef = VirtualHost | str


class VirtualNetwork:
    """All hosts and connections, and methods that inject faults.

    No end is notified of a silent fault. Tasks of a crashed process are not stopped but have no effect on the network:
    end them before `restart`.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        profile: LinkProfile | None = None,
        retransmit_s: float = 15.0,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.rng = rng
        self.profile = profile or LinkProfile()
        self.retransmit_s = retransmit_s
        self.log = log
        self._hosts: dict[str, VirtualHost] = {}
        self._routes: dict[tuple[str, str], Route] = {}
        self._clients: dict[VirtualTransport, None] = {}
        """Client end of every connection, in order of opening."""

    def host(self, name: str) -> VirtualHost:
        """Return the host with this name, created at the first call."""
        if name not in self._hosts:
            self._hosts[name] = VirtualHost(self, name)
        return self._hosts[name]

    def find(self, host: HostRef) -> VirtualHost:
        name = host if isinstance(host, str) else host.name
        if name not in self._hosts:
            raise NotFound(f"no virtual host {name}", kind="host", name=name)
        return self._hosts[name]

    # -- shape of the links

    def shape(self, a: HostRef, b: HostRef, profile: LinkProfile) -> None:
        """Set the profile between two hosts; bytes on the wire keep their arrival times."""
        self.route(self.find(a), self.find(b)).profile = profile

    def slow(self, a: HostRef, b: HostRef, latency_s: float, bytes_per_s: float | None) -> None:
        profile = self.route(self.find(a), self.find(b)).profile
        self.note(f"slow {_name(a)} {_name(b)}")
        self.shape(a, b, msgspec.structs.replace(profile, latency_s=latency_s, bytes_per_s=bytes_per_s))

    # -- faults

    def cut(self, a: HostRef, b: HostRef, silent: bool) -> None:
        """End the current connections between two hosts; new ones can be opened."""
        self.note(f"cut {_name(a)} {_name(b)} silent={silent}")
        for client in self._between(a, b):
            if silent:
                client.out.dead = client.into.dead = True
            else:
                self._reset(client)

    def partition(self, a: HostRef, b: HostRef) -> None:
        """Block all traffic between two hosts until `heal`; no end is notified."""
        route = self.route(self.find(a), self.find(b))
        if route.partitioned_at is None:
            self.note(f"partition {_name(a)} {_name(b)}")
            route.partitioned_at = asyncio.get_running_loop().time()

    def heal(self, a: HostRef, b: HostRef) -> None:
        """End a partition: held bytes arrive; after more than `retransmit_s`, connections are reset."""
        route = self.route(self.find(a), self.find(b))
        if route.partitioned_at is None:
            return
        self.note(f"heal {_name(a)} {_name(b)}")
        lasted_s = asyncio.get_running_loop().time() - route.partitioned_at
        route.partitioned_at = None
        for client in self._between(a, b):
            if client.out.dead:
                continue
            if lasted_s > self.retransmit_s:
                self._reset(client)
            else:
                client.out.retransmit()
                client.into.retransmit()

    def pause(self, host: HostRef) -> None:
        """Pause a process: it reads nothing, gets no notifications, and its writes stay queued."""
        self.note(f"pause {_name(host)}")
        self.find(host).paused = True

    def resume(self, host: HostRef) -> None:
        resumed = self.find(host)
        if not resumed.paused:
            return
        self.note(f"resume {_name(host)}")
        resumed.wake()
        for end in self._ends_of(resumed):
            end.context.run(end.flush)
            end.into.arm()

    def crash(self, host: HostRef, silent: bool) -> None:
        """Crash the process. Peers see resets, or nothing if silent (power loss)."""
        crashed = self.find(host)
        if not crashed.alive:
            return
        self.note(f"crash {_name(host)} silent={silent}")
        crashed.wake()
        crashed.alive = False
        crashed.answers = not silent
        crashed.num_crashes += 1
        crashed.listeners.clear()
        for end in self._ends_of(crashed):
            if silent:
                end.out.dead = end.into.dead = True
            elif not end.lost:
                end.out.send(Kind.RESET)
            end.lose(ConnectionResetError(f"{crashed.name} crashed"))

    def restart(self, host: HostRef) -> None:
        """Restart the host without listeners."""
        self.note(f"restart {_name(host)}")
        restarted = self.find(host)
        restarted.alive = restarted.answers = True

    def close(self) -> None:
        """End every connection and listener; nothing of the network stays on the loop."""
        for host in self._hosts.values():
            self.resume(host)
            host.listeners.clear()
        for client in list(self._clients):
            client.lose(None)
            client.out.receiver.lose(None)

    # -- for hosts, pipes and transports

    def note(self, event: str) -> None:
        if self.log is not None:
            self.log(f"{asyncio.get_running_loop().time():.9f} {event}")

    def draw_latency_s(self, profile: LinkProfile) -> float:
        if not profile.jitter_s:
            return profile.latency_s
        return profile.latency_s + profile.jitter_s * self.rng.random()

    def route(self, a: VirtualHost, b: VirtualHost) -> Route:
        key = (min(a.name, b.name), max(a.name, b.name))
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = Route(self.profile)
        return route

    def link(self, host: VirtualHost, port: int, listener: _VirtualListener) -> VirtualTransport:
        """Create a connection; return its client end. The other end opens when the first segment arrives."""
        peer = listener.host
        name = (peer.name, listener.port)
        client = VirtualTransport(host, port, name, contextvars.copy_context(), peer.certificate)
        server = VirtualTransport(
            peer, listener.port, (host.name, port), listener.context.copy(), host.certificate
        )
        loop, route = asyncio.get_running_loop(), self.route(host, peer)
        client.out = server.into = Pipe(self, route, loop, client, server)
        server.out = client.into = Pipe(self, route, loop, server, client)
        self._clients[client] = None
        self.note(f"connect {client.address}>{server.address}")
        client.out.send(Kind.OPEN)
        return client

    def remove_connection(self, end: VirtualTransport) -> None:
        """Remove a connection whose ends are both lost."""
        end.out.stop()
        end.into.stop()
        client = end if end in self._clients else end.out.receiver
        self._clients.pop(client, None)

    def _reset(self, client: VirtualTransport) -> None:
        client.lose(ConnectionResetError(f"connection to {client.out.receiver.address} was reset"))
        client.out.receiver.lose(ConnectionResetError(f"connection to {client.address} was reset"))

    def _between(self, a: HostRef, b: HostRef) -> list[VirtualTransport]:
        route = self.route(self.find(a), self.find(b))
        return [client for client in self._clients if client.out.route is route]

    def _ends_of(self, host: VirtualHost) -> list[VirtualTransport]:
        ends = [end for client in self._clients for end in (client, client.out.receiver)]
        return [end for end in ends if end.host.name == host.name]


def _name(host: HostRef) -> str:
    return host if isinstance(host, str) else host.name
