"""The `tcp` request plane: one connection per peer, dialed on first use and shared by all calls.

A connection accepted from a peer is also used for calls to that peer (its hello contains its listen address), so
a pair of processes needs one connection and one open direction. This requires that the peer connects from the host
named in its hello; otherwise that address is dialed. It keeps a process on another host from receiving the calls of
an address that it claims. It proves nothing among processes on one host or behind one NAT: that needs authentication.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from kvolt.core.errors import Cancelled, ConnectFailed, KvoltError, ProtocolError
from kvolt.runtime.logs import is_logged
from kvolt.runtime.network import (
    Listener,
    Network,
    join_address,
    peer_group,
    same_host,
    split_address,
    split_host,
)
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.runtime.plane.connection import Connection, ConnectionOptions, silent_error
from kvolt.runtime.plane.dials import Dials
from kvolt.runtime.plane.open_gate import OpenGate
from kvolt.runtime.plane.port import (
    ClosedListener,
    Destination,
    OutgoingStream,
    PlaneFactory,
    ServeStream,
    SilentListener,
)
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.stats import PlaneGauges, PlaneStats
from kvolt.runtime.plane.streams import Decode, Sink
from kvolt.runtime.plane.wire import VERSIONS, Hello
from kvolt.runtime.security.access import may_serve
from kvolt.runtime.tasks import TaskGroup
from kvolt.version import __version__

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 8192
"""Limit per process; more are refused."""
MAX_CONNECTIONS_PER_PEER = 1024
"""Limit per peer address (IPv6: per /64)."""


class TcpPlane:
    """RequestPlane over byte streams. `on_open` gets every stream opened by a peer."""

    def __init__(
        self,
        network: Network,
        options: ConnectionOptions,
        process: str,
        on_open: ServeStream,
        stats: PlaneStats | None = None,
    ) -> None:
        self._network = network
        self._options = options
        self._process = process
        self.stats = stats or PlaneStats()
        max_message_bytes = options.limits.max_message_bytes
        self.unfinished = ByteBudget(4 * max_message_bytes, 2 * max_message_bytes)
        self._gate = OpenGate(on_open, self.unfinished)
        self._accepted: Counter[str] = Counter()
        """Number of accepted connections by `peer_group`."""
        self._open_listeners: list[Listener] = []
        self._advertised: str | None = None
        self._by_address: dict[str, Connection] = {}
        self._all: dict[Connection, None] = {}
        self._silent: dict[Connection, None] = {}
        self._task_group = TaskGroup("connections")
        self._dials = Dials(
            network, self.stats, self._task_group, self._dialed, self._set_current, self._drop
        )
        self._closed_listeners: list[ClosedListener] = []
        self._silent_listeners: list[SilentListener] = []
        self._closed = False
        self._going_away = False

    @property
    def address(self) -> str | None:
        """Advertised address, once listening."""
        return self._advertised

    @property
    def num_open(self) -> int:
        return len(self._all)

    def all(self) -> list[Connection]:
        return list(self._all)

    def gauges(self) -> PlaneGauges:
        connections = self.all()
        sessions = [connection.session for connection in connections]
        num_dialed = sum(connection.dialer for connection in connections)
        return PlaneGauges(
            num_accepted=len(connections) - num_dialed,
            num_dialed=num_dialed,
            num_calls=sum(session.num_calls for session in sessions),
            num_served=sum(session.num_served for session in sessions),
            num_backlogged=sum(session.num_backlogged for session in sessions),
            num_bulk=sum(session.num_bulk for session in sessions),
            send_buffer_bytes=sum(connection.send_buffer_bytes for connection in connections),
            num_opens_waiting=self._gate.num_waiting,
            num_refused_streams=self._gate.num_refused,
            unfinished_bytes=self.unfinished.used_bytes,
            unfinished_limit_bytes=self.unfinished.limit_bytes,
            num_shed=self.unfinished.num_shed,
        )

    def on_closed(self, listener: ClosedListener) -> None:
        self._closed_listeners.append(listener)

    def on_silent(self, listener: SilentListener) -> None:
        self._silent_listeners.append(listener)

    def remove_listeners(self, *listeners: ClosedListener | SilentListener) -> None:
        self._closed_listeners = [known for known in self._closed_listeners if known not in listeners]
        self._silent_listeners = [known for known in self._silent_listeners if known not in listeners]

    def is_responsive(self, address: str) -> bool:
        connection = self._by_address.get(address)
        return connection is None or connection.is_responsive

    def close_silent(self, address: str) -> None:
        for connection in list(self._silent):
            peer = connection.session.peer
            if self._by_address.get(address) is connection or (peer is not None and peer.address == address):
                connection.abort(silent_error(address, connection.silent_s))

    async def listen(self, address: str, advertise: str | None = None) -> str:
        listener = await self._network.listen(address, self._accept)
        self._open_listeners.append(listener)
        if self._advertised is None:
            self._advertised = _with_port(advertise, listener.address) if advertise else listener.address
        return listener.address

    async def open(
        self,
        to: Destination,
        body: bytes,
        sink: Sink,
        decode: Decode,
        *,
        connect_s: float,
        deadline_s: float | None = None,
        context: dict[str, str] | None = None,
        automatic_credit: bool = False,
    ) -> OutgoingStream:
        connection = self._by_address.get(to.address)
        if connection is None or not connection.ready:
            loop = asyncio.get_running_loop()
            dial_started = loop.time()
            connection = await self.get(to.address, connect_s)
            if deadline_s is not None:
                deadline_s = max(deadline_s - (loop.time() - dial_started), 0.0)
        self._check_server(connection, to)
        return connection.session.open(to.target, body, sink, decode, deadline_s, context, automatic_credit)

    def _check_server(self, connection: Connection, to: Destination) -> None:
        """Raise ConnectFailed if the peer at this address has the certificate of another process, or of another role
        than the endpoint's servers."""
        identity, endpoint = connection.peer_identity, to.target.partition("#")[0]
        if identity is None or (may_serve(identity, endpoint) and to.identity in ("", identity.uri)):
            return
        if not connection.dialer and self._by_address.get(to.address) is connection:
            del self._by_address[to.address]  # the peer only claims the address: dial it
        wanted = f"{endpoint} of {to.identity or 'this cluster'}"
        raise ConnectFailed(f"{to.address} is {identity.uri}, not {wanted}", address=to.address)

    async def ensure_connected(self, address: str, timeout_s: float) -> None:
        await self.get(address, timeout_s)

    async def get(self, address: str, timeout_s: float) -> Connection:
        """A ready connection to the address, dialed if necessary.

        Raises ConnectFailed when there is none in time.
        """
        connection = self.ready_to(address)
        if connection is not None:
            return connection
        if self._closed:
            raise ConnectFailed("this process is stopping", address=address)
        return await self._dials.connect(address, timeout_s)

    def ready_to(self, address: str) -> Connection | None:
        """An open connection to the address, without dialing."""
        connection = self._by_address.get(address)
        return connection if connection is not None and connection.ready else None

    def go_away(self) -> None:
        self._going_away = True
        for connection in self.all():
            connection.session.go_away()

    async def stop_listening(self) -> None:
        while self._open_listeners:
            await self._open_listeners.pop().close()

    async def close(self) -> None:
        self._closed = True
        await self.stop_listening()
        await self._task_group.close()
        for connection in self.all():
            connection.flush()
            connection.close(Cancelled("this process is stopping"))

    # ---

    def _accept(self) -> asyncio.Protocol:
        return self._create_connection(dialer=False)

    def _dialed(self) -> Connection:
        return self._create_connection(dialer=True)

    def _drop(self, connection: Connection) -> None:
        """Forget a connection that was never opened."""
        self._all.pop(connection, None)

    def _on_made(self, connection: Connection) -> ProtocolError | None:
        if connection.dialer:
            return None
        group = peer_group(connection.peer_host)
        self._accepted[group] += 1
        if self.num_open > MAX_CONNECTIONS:
            limit, owner = MAX_CONNECTIONS, "this process"
        elif self._accepted[group] > MAX_CONNECTIONS_PER_PEER:
            limit, owner = MAX_CONNECTIONS_PER_PEER, f"address {group}"
        else:
            return None
        self.stats.refused_connections += 1
        if is_logged(self.stats.refused_connections):
            log.warning(
                "connection refused: peer=%s reason=%s has %d connections refused=%d",
                connection.peer_name,
                owner,
                limit,
                self.stats.refused_connections,
            )
        return ProtocolError(f"{owner} has reached its limit of {limit} connections", rule="connections")

    def _create_connection(self, *, dialer: bool) -> Connection:
        limits = self._options.limits
        hello = Hello(
            versions=VERSIONS,
            process=self._process,
            address=self._advertised,
            max_frame_bytes=limits.max_frame_bytes,
            max_message_bytes=limits.max_message_bytes,
            heartbeat_s=self._options.heartbeat_s,
            software=f"kvolt {__version__}",
        )
        connection = Connection(
            dialer=dialer,
            hello=hello,
            options=self._options,
            on_made=self._on_made,
            on_open=self._on_open,
            on_ready=self._on_ready,
            on_closed=self._on_closed,
            on_silent=self._on_silent,
            stats=self.stats,
            budget=self.unfinished,
        )
        self._all[connection] = None
        return connection

    def _on_open(self, connection: Connection, stream: ServedStream) -> None:
        stream.peer_host = connection.peer_host
        stream.peer_identity = connection.peer_identity
        self._gate.start_stream(connection, connection.peer_host, stream)

    def _on_ready(self, connection: Connection) -> None:
        if self._going_away:
            connection.session.go_away()
        peer = connection.session.peer
        self._dials.wake(connection)
        if peer is None:
            return
        for other in self._silent:
            is_same = other.session.peer is not None and other.session.peer.process == peer.process
            if is_same and same_host(
                other.peer_host, connection.peer_host
            ):  # a hello may claim any process id
                other.mark_replaced()
        if peer.address is None or connection.dialer:
            return
        if same_host(split_host(peer.address)[0], connection.peer_host):
            current = self._by_address.get(peer.address)
            if current is None or (not current.ready and not _awaits_other_process(current, peer)):
                self._set_current(connection, peer.address)

    def _set_current(self, connection: Connection, address: str) -> None:
        """Use this connection for calls to the address from now on."""
        previous = self._by_address.get(address)
        self._by_address[address] = connection
        if previous is not None and previous.silent:
            previous.mark_replaced()
            for listener in list(self._silent_listeners):
                listener(address, False)

    def _on_silent(self, connection: Connection) -> None:
        if connection.silent:
            self._silent[connection] = None
        else:
            self._silent.pop(connection, None)
        session, addresses = connection.session, self._addresses_of(connection)
        if connection.silent and (session.num_calls or session.num_served):
            log.warning(
                "peer silent: address=%s calls=%d served=%d; keeping its streams for %g s",
                addresses[0] if addresses else connection.peer_name,
                session.num_calls,
                session.num_served,
                self._options.stall_grace_s,
            )
        for address in addresses:
            if not connection.silent:
                self._dials.cancel(address, connection)
            for listener in list(self._silent_listeners):
                listener(address, connection.silent)

    def _addresses_of(self, connection: Connection) -> list[str]:
        return [address for address, known in self._by_address.items() if known is connection]

    def _on_closed(self, connection: Connection, reason: KvoltError) -> None:
        self._all.pop(connection, None)
        self._silent.pop(connection, None)
        self._gate.drop_source(connection)
        if connection.is_admitted and not connection.dialer:
            group = peer_group(connection.peer_host)
            self._accepted[group] -= 1
            if not self._accepted[group]:
                del self._accepted[group]
        self._dials.wake(connection)
        for address in self._addresses_of(connection):
            del self._by_address[address]
            for listener in self._closed_listeners:
                listener(address, reason)


def _with_port(advertise: str, listening: str) -> str:
    host, port = split_host(advertise)
    return advertise if port is not None else join_address(host, split_address(listening)[1])


def _awaits_other_process(connection: Connection, peer: Hello) -> bool:
    """Whether a silent connection is kept for a different process than this peer."""
    expected = connection.session.peer
    return connection.silent and expected is not None and expected.process != peer.process


def tcp_plane(network: Network, options: ConnectionOptions | None = None) -> PlaneFactory:
    """PlaneFactory of the `tcp` plane."""
    return lambda process, on_open: TcpPlane(network, options or ConnectionOptions(), process, on_open)
