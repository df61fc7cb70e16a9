"""An in-memory network on virtual time: hosts, byte streams, and the faults that a test may cause.

Owns the way of bytes between virtual hosts: latency, bandwidth, buffers, back-pressure, and what a
fault does to each end. It must not know what the bytes mean, nor which loop runs it: all waiting goes
through `loop.call_at`, all chance through the one generator it was given.

    write -> unsent ->  [ on the wire -> arrived, not read ]  -> data_received
             (sender)   [        window of one _Pipe       ]     (receiver)

The window is bounded like a pair of socket buffers. When it is full, bytes stay unsent, and past the
high-water mark the sender's protocol is told to pause.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

import msgspec

from kvolt.core.errors import ConfigError, ConnectFailed, NotFound
from kvolt.runtime.network import Listener, ProtocolFactory, join_address, split_address

_SEGMENT_BYTES = 64 * 1024
"""Longest piece on the wire: a quarter of the default window, so that a long write is pipelined."""

_HIGH_WATER_BYTES = 64 * 1024
"""asyncio's own default."""

_DYNAMIC_PORTS = range(49152, 65536)
_FIRST_CONNECT_RETRY_S = 1.0
_OWN_NAMES = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True):
    """How each direction of each connection between two hosts behaves."""

    latency_s: float = 0.0005
    jitter_s: float = 0.0
    """Up to this much more latency, drawn per piece; bytes never overtake each other."""
    bytes_per_s: float | None = None
    window_bytes: int = 256 * 1024
    rechunk: bool = False
    """Deliver in other pieces than written: some cut, some joined."""


class _Kind(Enum):
    OPEN = auto()
    DATA = auto()
    END = auto()
    RESET = auto()


@dataclass(slots=True)
class _Segment:
    arrive_at: float
    kind: _Kind
    data: bytes


@dataclass(slots=True)
class _Route:
    """What all connections between two hosts share."""

    profile: LinkProfile
    partitioned_at: float | None = None


@dataclass(slots=True, eq=False)
class _Pipe:
    """One direction of a connection: the segments on the wire, or arrived and not read yet."""

    network: VirtualNetwork
    route: _Route
    loop: asyncio.AbstractEventLoop
    sender: VirtualTransport
    receiver: VirtualTransport
    segments: deque[_Segment] = field(default_factory=deque)
    """In stream order: one whose time has come still waits for those ahead of it."""
    in_flight_bytes: int = 0
    dead: bool = False
    line_free_at: float = 0.0
    timer: asyncio.TimerHandle | None = None

    def room_bytes(self) -> int:
        return self.route.profile.window_bytes - self.in_flight_bytes

    def send(self, kind: _Kind, data: bytes = b"") -> None:
        self.in_flight_bytes += len(data)
        if not (data and self.route.profile.rechunk):
            self._put(kind, data, joined=False)
            return
        rng = self.network.rng
        while data:
            size = rng.randint(1, len(data))
            self._put(kind, data[:size], joined=rng.random() < 0.4)
            data = data[size:]

    def _put(self, kind: _Kind, data: bytes, joined: bool) -> None:
        now = self.loop.time()
        profile = self.route.profile
        self.line_free_at = max(now, self.line_free_at)
        if profile.bytes_per_s is not None:
            self.line_free_at += len(data) / profile.bytes_per_s
        arrive_at = self.line_free_at + self.network.draw_latency_s(profile)
        tail = self.segments[-1] if self.segments else None
        if joined and tail is not None and tail.kind is _Kind.DATA and tail.arrive_at > now:
            tail.data += data
            tail.arrive_at = max(tail.arrive_at, arrive_at)
        else:
            self.segments.append(_Segment(arrive_at, kind, data))
        self.arm()

    def arm(self) -> None:
        """Set the timer of the next arrival, if there is one to wait for."""
        if self.timer is None and self._readable():
            at = self.segments[0].arrive_at
            self.timer = self.loop.call_at(at, self._arrive, context=self.receiver.context)

    def _readable(self) -> bool:
        if self.dead or not self.segments or self.receiver.reading_paused or self.receiver.host.paused:
            return False
        partitioned_at = self.route.partitioned_at
        return partitioned_at is None or self.segments[0].arrive_at <= partitioned_at

    def _arrive(self) -> None:
        self.timer = None
        now = self.loop.time()
        # The head may have moved since the timer was set: joined with later bytes, held, or read by now.
        while self._readable() and self.segments[0].arrive_at <= now:
            segment = self.segments.popleft()
            self.in_flight_bytes -= len(segment.data)
            if self.network.log is not None:
                what = f"{len(segment.data)} bytes" if segment.data else segment.kind.name.lower()
                self.network.note(f"{self.sender.address}>{self.receiver.address} {what}")
            self.receiver.receive(segment)
        self.sender.context.run(self.sender.flush)
        self.arm()

    def retransmit(self) -> None:
        """After a partition: what was held sets out again, in order."""
        earliest = self.loop.time() + self.route.profile.latency_s
        for segment in self.segments:
            segment.arrive_at = max(segment.arrive_at, earliest)
        self.arm()

    def stop(self) -> None:
        self.dead = True
        self.segments.clear()
        self.in_flight_bytes = 0
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class VirtualTransport(asyncio.Transport):
    """One end of a connection; behaves as asyncio's own socket transport does.

    `close()` always ends in `connection_lost`: a peer that takes nothing for `retransmit_s` is given up.
    """

    out: _Pipe
    into: _Pipe

    def __init__(
        self, host: VirtualHost, port: int, peer: tuple[str, int], context: contextvars.Context
    ) -> None:
        super().__init__({"sockname": (host.name, port), "peername": peer, "socket": None})
        self.host = host
        self.address = join_address(host.name, port)
        self.context = context
        """Protocol callbacks run in this, not in the context of whoever happened to send."""
        self.lost = False
        self.reading_paused = False
        self._port = port
        self._protocol: Any = None
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._high_bytes = _HIGH_WATER_BYTES
        self._low_bytes = _HIGH_WATER_BYTES // 4
        self._writing_paused = False
        self._eof_written = False
        self._end_sent = False
        self._closing = False
        self._aborted = False
        self._linger: asyncio.TimerHandle | None = None

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def open(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol
        self._tell(protocol.connection_made, self)

    def _tell(self, callback: Callable[..., Any], *args: Any) -> Any:
        try:
            return callback(*args)
        except Exception as error:  # the protocol's fault: asyncio reports it and drops the connection
            context = {
                "message": "protocol failed",
                "exception": error,
                "transport": self,
                "protocol": self._protocol,
            }
            self.out.loop.call_exception_handler(context)
            self.abort()

    # -- reading

    def receive(self, segment: _Segment) -> None:
        kind = segment.kind
        if kind is _Kind.RESET:
            self.lose(ConnectionResetError(f"{self.out.receiver.address} reset the connection"))
        elif self.lost:
            if kind is _Kind.DATA:
                self.out.send(_Kind.RESET)
        elif self._closing:
            pass  # asyncio reads nothing more after close()
        elif kind is _Kind.DATA:
            self._tell(self._protocol.data_received, segment.data)
        elif kind is _Kind.OPEN:
            self._accept()
        elif not self._tell(self._protocol.eof_received):
            self.close()

    def _accept(self) -> None:
        listener = self.host.listeners.get(self._port)
        protocol = None if listener is None else self._tell(listener.factory)
        if protocol is None:
            self.abort()
        else:
            self.open(protocol)

    def is_reading(self) -> bool:
        return not self._closing and not self.reading_paused

    def pause_reading(self) -> None:
        if not self._closing:
            self.reading_paused = True

    def resume_reading(self) -> None:
        self.reading_paused = False
        self.into.arm()

    # -- writing

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data must be bytes-like, not {type(data).__name__}")
        if self._eof_written:
            raise RuntimeError("cannot write after write_eof()")
        payload = bytes(data)
        size = len(payload)
        if self._closing or not size:
            return
        if not self._unsent and size <= min(_SEGMENT_BYTES, self.out.room_bytes()) and not self.host.paused:
            self.out.send(_Kind.DATA, payload)
            return
        self._unsent.append(memoryview(payload))
        self._unsent_bytes += size
        self._fill_window()
        if self._unsent_bytes > self._high_bytes and not self._writing_paused:
            self._writing_paused = True
            self._tell(self._protocol.pause_writing)

    def _fill_window(self) -> None:
        while self._unsent and not self.host.paused and (room_bytes := self.out.room_bytes()) > 0:
            head = self._unsent[0]
            size = min(len(head), room_bytes, _SEGMENT_BYTES)
            self.out.send(_Kind.DATA, bytes(head[:size]))
            self._unsent_bytes -= size
            if size == len(head):
                self._unsent.popleft()
            else:
                self._unsent[0] = head[size:]

    def flush(self) -> None:
        """There may be room now: send what waits, then do what waited for that."""
        if self.lost or self.host.paused:
            return
        self._fill_window()
        if self._writing_paused and self._unsent_bytes <= self._low_bytes:
            self._writing_paused = False
            self._tell(self._protocol.resume_writing)
        if self._unsent or self.lost:
            return
        if self._aborted:
            self.out.send(_Kind.RESET)
        elif (self._closing or self._eof_written) and not self._end_sent:
            self._end_sent = True
            self.out.send(_Kind.END)
        if self._closing:
            self.lose(None)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._closing:
            self._eof_written = True
            self.flush()

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_bytes, self._high_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = _HIGH_WATER_BYTES if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"water marks must be high >= low >= 0, not {high} and {low}")
        self._high_bytes, self._low_bytes = high, low

    # -- the end

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Send what was written, then the end of the stream; read nothing more."""
        if self._closing:
            return
        self._closing = True
        self.resume_reading()
        self.flush()
        if not self.lost:
            self._linger_on()

    def abort(self) -> None:
        """Drop what was not sent and reset the connection."""
        self._closing = self._aborted = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self.flush()

    def _linger_on(self) -> None:
        wait_s = self.out.network.retransmit_s
        self._linger = self.out.loop.call_later(wait_s, self._give_up_if_stuck, self._unsent_bytes)

    def _give_up_if_stuck(self, unsent_bytes_before: int) -> None:
        if self._unsent_bytes < unsent_bytes_before:
            self._linger_on()
            return
        self.out.send(_Kind.RESET)
        self.lose(TimeoutError(f"{self.out.receiver.address} took nothing more"))

    def lose(self, error: BaseException | None) -> None:
        """End here at once, whatever the peer knows; the protocol is told in its own turn."""
        if self.lost:
            return
        self.lost = self._closing = True
        self._unsent.clear()
        self._unsent_bytes = 0
        if self._linger is not None:
            self._linger.cancel()
        self.out.network.note(f"lost {self.address} {type(error).__name__ if error else 'closed'}")
        if self.host.paused:
            self.host.losses_untold.append(partial(self._tell_loss, error))
        else:
            self._tell_loss(error)
        if self.out.receiver.lost:
            self.out.network.forget(self)
        else:
            self.resume_reading()  # what still arrives is dropped, or answered with a reset

    def _tell_loss(self, error: BaseException | None) -> None:
        if self._protocol is not None:
            self.out.loop.call_soon(self._protocol.connection_lost, error, context=self.context)


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
    """One machine with one process: a `Network` port. Its own addresses are `name:port`."""

    def __init__(self, network: VirtualNetwork, name: str) -> None:
        self.name = name
        self.alive = True
        self.answers = True
        """False after a silent crash: not even a refusal comes back."""
        self.paused = False
        self.losses_untold: list[Callable[[], None]] = []
        """Connections that ended while the process was stopped."""
        self.num_crashes = 0
        self.listeners: dict[int, _VirtualListener] = {}
        self._network = network
        self._next_port = 0

    def wake(self) -> None:
        self.paused = False
        for tell in self.losses_untold:
            tell()
        self.losses_untold.clear()

    async def listen(self, address: str, factory: ProtocolFactory) -> Listener:
        name, port = split_address(address)
        if not self.alive or name not in (self.name, *_OWN_NAMES):
            raise ConfigError(
                f"cannot listen on {address}", key="host", remedy="use an address of this machine"
            )
        if port in self.listeners:
            raise ConfigError(
                f"{address} is taken by another process",
                key="port",
                remedy="choose another port, or 0 for any free one",
            )
        listener = _VirtualListener(self, port or self._free_port(), factory, contextvars.copy_context())
        self.listeners[listener.port] = listener
        return listener

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol:
        name, port = split_address(address)
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
        """One round trip, tried again while packets are lost. None: refused, or this host is down."""
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
    """All hosts and all connections between them; a test breaks them through the methods below.

    A silent fault is one that no end is told about. What tasks of a crashed process still do is not
    stopped here, it only stays without effect: end them before `restart`.
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
        self._routes: dict[tuple[str, str], _Route] = {}
        self._clients: dict[VirtualTransport, None] = {}
        """The connecting end of every connection, in the order in which they were opened."""

    def host(self, name: str) -> VirtualHost:
        """The host of that name; new at the first call."""
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
        """A profile of their own for two hosts; bytes already on the wire keep their times."""
        self.route(self.find(a), self.find(b)).profile = profile

    def slow(self, a: HostRef, b: HostRef, latency_s: float, bytes_per_s: float | None) -> None:
        profile = self.route(self.find(a), self.find(b)).profile
        self.note(f"slow {_name(a)} {_name(b)}")
        self.shape(a, b, msgspec.structs.replace(profile, latency_s=latency_s, bytes_per_s=bytes_per_s))

    # -- faults

    def cut(self, a: HostRef, b: HostRef, silent: bool) -> None:
        """End the present connections between two hosts; new ones can be opened."""
        self.note(f"cut {_name(a)} {_name(b)} silent={silent}")
        for client in self._between(a, b):
            if silent:
                client.out.dead = client.into.dead = True
            else:
                self._reset(client)

    def partition(self, a: HostRef, b: HostRef) -> None:
        """Nothing passes between two hosts until `heal`; no end is told."""
        route = self.route(self.find(a), self.find(b))
        if route.partitioned_at is None:
            self.note(f"partition {_name(a)} {_name(b)}")
            route.partitioned_at = asyncio.get_running_loop().time()

    def heal(self, a: HostRef, b: HostRef) -> None:
        """End a partition: held bytes arrive after all, but past `retransmit_s` connections are reset."""
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
        """A stopped process: it reads nothing, is told nothing, and what it writes stays with it."""
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
        """The process is gone. Peers see resets, or nothing at all (a machine without power)."""
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
                end.out.send(_Kind.RESET)
            end.lose(ConnectionResetError(f"{crashed.name} crashed"))

    def restart(self, host: HostRef) -> None:
        """Up again, with nothing listening yet."""
        self.note(f"restart {_name(host)}")
        restarted = self.find(host)
        restarted.alive = restarted.answers = True

    def close(self) -> None:
        """End every connection and listener; after that nothing of the network is left on the loop."""
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

    def route(self, a: VirtualHost, b: VirtualHost) -> _Route:
        key = (min(a.name, b.name), max(a.name, b.name))
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = _Route(self.profile)
        return route

    def link(self, host: VirtualHost, port: int, listener: _VirtualListener) -> VirtualTransport:
        """A new connection: its connecting end. The other end opens when the first segment arrives."""
        peer = listener.host
        client = VirtualTransport(host, port, (peer.name, listener.port), contextvars.copy_context())
        server = VirtualTransport(peer, listener.port, (host.name, port), listener.context.copy())
        loop, route = asyncio.get_running_loop(), self.route(host, peer)
        client.out = server.into = _Pipe(self, route, loop, client, server)
        server.out = client.into = _Pipe(self, route, loop, server, client)
        self._clients[client] = None
        self.note(f"connect {client.address}>{server.address}")
        client.out.send(_Kind.OPEN)
        return client

    def forget(self, end: VirtualTransport) -> None:
        """Both ends are lost: nothing may arrive any more."""
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
        return [end for end in ends if end.host is host]


def _name(host: HostRef) -> str:
    return host if isinstance(host, str) else host.name
