"""Ports and options of a process on this system, built from its settings."""

from __future__ import annotations

import os
import random
import secrets
import socket
from pathlib import Path

from kvolt.core.errors import ConfigError, DeadlineExceeded
from kvolt.runtime.clock import Blocking, Clock, SystemClock, ThreadBlocking, new_id
from kvolt.runtime.config.loader import default_discovery_path
from kvolt.runtime.config.settings import ClusterSettings, Settings
from kvolt.runtime.discovery.file import FileDiscovery
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.discovery.port import Discovery
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.server import EndpointServer
from kvolt.runtime.events.mem import MemBus, MemEvents
from kvolt.runtime.events.plane_events import PlaneEventOptions, PlaneEvents
from kvolt.runtime.events.port import EventPlane
from kvolt.runtime.events.subscriber_queue import EventCounters
from kvolt.runtime.events.zmq_plane import ZmqEvents
from kvolt.runtime.events.zmq_sockets import ZmqOptions
from kvolt.runtime.host.private_directory import make_private, untrusted_reason
from kvolt.runtime.join.client import JoinDiscovery
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.network import (
    Network,
    SocketNetwork,
    is_loopback,
    is_wildcard,
    join_address,
    split_address,
    split_host,
)
from kvolt.runtime.plane.connection import ConnectionOptions
from kvolt.runtime.plane.port import RequestPlane
from kvolt.runtime.plane.session import SessionLimits
from kvolt.runtime.plane.tcp_plane import tcp_plane
from kvolt.runtime.runtime import Ports, ProcessOptions
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.credentials import Credentials, FileSource, KeySource
from kvolt.runtime.security.enrolled import enroll
from kvolt.runtime.security.enrollment import SERVER_ROLES, EnrollmentServer
from kvolt.runtime.security.exposure import check_exposure
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.runtime.security.secure_network import SecureNetwork
from kvolt.runtime.security.used_tokens import UsedTokens

_CHECK_TIMEOUT_S = 1.0


def process_options(settings: Settings, name: str) -> ProcessOptions:
    plane = settings.plane
    check_exposed_hosts(settings)
    host = plane_host(settings)
    if is_wildcard(host) and settings.runtime.advertise is None:
        raise ConfigError(
            f"runtime.host is {host}, so other processes do not know this machine's address",
            key="runtime.advertise",
            remedy="set runtime.advertise to the name or address of this machine",
        )
    return ProcessOptions(
        name=name,
        listen=join_address(host, settings.runtime.port),
        advertise=settings.runtime.advertise,
        lease_ttl_s=settings.discovery.ttl_s,
        announce_s=2 * settings.discovery.poll_s,
        start_timeout_s=settings.runtime.start_timeout_s,
        deadlines=Deadlines(
            connect_s=plane.connect_timeout_s,
            first_s=plane.first_response_timeout_s,
            between_s=plane.between_responses_timeout_s,
            total_s=plane.total_timeout_s,
            stall_s=plane.stall_grace_s,
        ),
        stall_grace_s=plane.stall_grace_s,
    )


def connection_options(settings: Settings) -> ConnectionOptions:
    plane = settings.plane
    return ConnectionOptions(
        heartbeat_s=plane.heartbeat_s,
        dead_after_s=plane.dead_after_s,
        stall_grace_s=plane.stall_grace_s,
        limits=SessionLimits(
            max_frame_bytes=plane.max_frame_bytes,
            max_message_bytes=plane.max_message_bytes,
            window_items=plane.window_items,
            max_streams=plane.max_streams,
        ),
    )


def plane_host(settings: Settings) -> str:
    """Listen address: runtime.host if set, else an address that the other machines of the join server can reach.

    Raises ConfigError if no such address is known.
    """
    host = settings.runtime.host
    if not is_loopback(host):
        return host
    listen = settings.discovery.join_listen
    shared_on = split_address(listen)[0] if listen is not None else host
    if is_wildcard(shared_on) and settings.runtime.advertise is None:
        raise ConfigError(
            f"discovery.join_listen is {listen}, but the address of this machine is not set",
            key="runtime.advertise",
            remedy="set runtime.host or runtime.advertise to it, or listen on that address only",
        )
    if not is_loopback(shared_on):
        return shared_on
    join = settings.discovery.join
    if join is None:
        return host
    server, port = split_address(join)
    try:
        with socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((server, port))  # sends nothing; selects the route
            return str(probe.getsockname()[0])
    except OSError:
        return host


async def check_directory(settings: Settings) -> None:
    """Raise ConfigError if discovery.path cannot be a directory.

    A file system that does not respond is left to discovery, which retries.
    """
    if settings.discovery.kind != "file" or settings.discovery.path is None:
        return
    path = Path(settings.discovery.path)
    blocking = ThreadBlocking(1)
    try:
        if path == Path(default_discovery_path(os.environ)):
            await blocking.run(lambda: _own_directory(path.parent), _CHECK_TIMEOUT_S)
        nearest = await blocking.run(
            lambda: next(each for each in (path, *path.parents) if os.path.exists(each)), _CHECK_TIMEOUT_S
        )
        is_directory = await blocking.run(nearest.is_dir, _CHECK_TIMEOUT_S)
    except DeadlineExceeded:
        return
    finally:
        blocking.close()
    if not is_directory:
        raise ConfigError(
            f"discovery.path {path}: {nearest} is not a directory",
            key="discovery.path",
            remedy="set it to a directory, or to a path where one can be created",
        )


def _own_directory(path: Path) -> None:
    """Create the default directory, or check that this user owns it: its name is predictable."""
    try:
        make_private(path)
        reason = untrusted_reason(path)
    except OSError as error:
        reason = f"cannot be used: {(error.strerror or str(error)).lower()}"
    if reason is not None:
        raise ConfigError(
            f"{path} {reason}",
            key="discovery.path",
            remedy="remove it or `chmod 700` it, or use another directory with --discovery-path",
        )


def load_credentials(cluster: ClusterSettings, identity: Identity, clock: Clock) -> Credentials | None:
    """Credentials of this process; None if none are set. Raises ConfigError."""
    if cluster.key is not None:
        return Credentials(KeySource(Path(cluster.key), identity), clock)
    if cluster.certificate is None:
        return None
    if cluster.private_key is None or cluster.authority is None:
        raise ConfigError(
            "cluster.certificate needs cluster.private_key and cluster.authority",
            key="cluster.certificate",
            remedy="set all three, or cluster.key alone",
        )
    source = FileSource(Path(cluster.certificate), Path(cluster.private_key), Path(cluster.authority))
    return Credentials(source, clock)


def check_exposed_hosts(settings: Settings) -> None:
    """Raise ConfigError if an internal listener is reachable from other machines without a cluster key."""
    listen = settings.discovery.join_listen
    for key, host, what in (
        (
            "discovery.join_listen",
            split_address(listen)[0] if listen is not None else None,
            "the join server",
        ),
        ("runtime.host", plane_host(settings), "the request plane"),
        ("events.host", settings.events.host, "the event plane"),
        ("admin.host", settings.admin.host if settings.admin.enabled else None, "the admin port"),
    ):
        if host is not None:
            check_exposure(settings.cluster, host, key, what)


async def enroll_process(settings: Settings, identity: Identity) -> Credentials | None:
    """Credentials by the join token of the settings; None without one. Raises ConfigError."""
    token, address = settings.cluster.join_token, settings.discovery.join
    if token is None:
        return None
    if settings.cluster.key is not None or settings.cluster.certificate is not None:
        raise ConfigError(
            "cluster.join_token is for processes without a key or certificate",
            key="cluster.join_token",
            remedy="remove it, or remove cluster.key and cluster.certificate",
        )
    if address is None:
        raise ConfigError(
            "cluster.join_token needs the address of a join server",
            key="discovery.join",
            remedy="set --join HOST:PORT",
        )
    return await enroll(address, token, identity, SystemClock(), settings.runtime.start_timeout_s)


def _internal_network(
    settings: Settings,
    metrics: Metrics,
    clock: Clock,
    blocking: Blocking,
    credentials: Credentials | None,
    role: ProcessRole,
) -> Network:
    """Network between the processes of the cluster."""
    if credentials is None:
        return SocketNetwork()

    def authority() -> ClusterAuthority:
        key = credentials.authority
        assert key is not None, "checked below"
        return key

    listen, enrollment = settings.discovery.join_listen, None
    if listen is not None and role not in SERVER_ROLES:
        raise ConfigError(
            f"a {role} cannot be the join server of a cluster with a key: other processes would refuse it",
            key="discovery.join_listen",
            remedy=f"start the join server in a frontend or router, and this {role} with --join HOST:PORT",
        )
    if listen is not None and credentials.authority is not None:
        assert settings.cluster.key is not None
        used_tokens = UsedTokens(Path(settings.cluster.key), blocking)
        enrollment = listen, EnrollmentServer(authority, clock, metrics.count_handshake, used_tokens)
    return SecureNetwork(credentials, metrics.count_handshake, enrollment)


def make_ports(
    settings: Settings,
    metrics: Metrics,
    blocking: ThreadBlocking,
    identity: Identity,
    credentials: Credentials | None = None,
) -> Ports:
    """`identity`: what this process is, for its certificate. `credentials`: in place of those of the settings."""
    clock = SystemClock()
    credentials = credentials or load_credentials(settings.cluster, identity, clock)
    own = None if credentials is None else credentials.identity
    rng = random.Random(secrets.randbits(128))

    def discovery(plane: RequestPlane) -> Discovery:
        kind = settings.discovery.kind

        def on_state(connected: bool) -> None:
            metrics.discovery_connected[kind].set(connected)
            if not connected:
                metrics.discovery_losses.inc()

        match kind:
            case "mem":
                return MemDiscovery(MemStore(), clock, rng)
            case "join":
                address = settings.discovery.join
                if address is None:
                    raise ConfigError(
                        "discovery.kind is join, but discovery.join is not set",
                        key="discovery.join",
                        remedy="set --join HOST:PORT",
                    )
                split_address(address)
                return JoinDiscovery(
                    plane, address, rng, min(5.0, settings.runtime.start_timeout_s), on_state=on_state
                )
            case _:
                path = settings.discovery.path
                assert path is not None, "the config loader sets it"
                # Lease renewals must not wait behind the work of requests.
                thread = blocking.dedicated("discovery")
                return FileDiscovery(path, clock, thread, rng, settings.discovery.poll_s, on_state=on_state)

    def events(discovery: Discovery, plane: RequestPlane, server: EndpointServer) -> EventPlane:
        counters = EventCounters(
            published=lambda topic, number: metrics.events_published[topic].inc(number),
            received=lambda topic, number: metrics.events_received[topic].inc(number),
            missed=lambda topic, number: metrics.events_missed[topic].inc(number),
            dropped=lambda topic, number: metrics.events_dropped[topic].inc(number),
            rejected=lambda reason, number: metrics.events_rejected[reason].inc(number),
        )
        publisher = new_id(rng)
        if settings.events.kind == "mem":
            return MemEvents(MemBus(), publisher, counters, "" if own is None else own.uri)
        if own is not None:
            plane_options = PlaneEventOptions(
                namespace=settings.namespace, lease_ttl_s=settings.discovery.ttl_s
            )
            return PlaneEvents(plane_options, publisher, own, discovery, plane, server, counters)
        advertise = settings.runtime.advertise
        local = is_loopback(settings.events.host)
        options = ZmqOptions(
            namespace=settings.namespace,
            host=plane_host(settings) if local else settings.events.host,
            advertise_host=split_host(advertise)[0] if advertise else None,
            lease_ttl_s=settings.discovery.ttl_s,
        )
        return ZmqEvents(options, publisher, discovery, counters)

    internal = _internal_network(settings, metrics, clock, blocking, credentials, identity.role)
    plane = tcp_plane(internal, connection_options(settings))
    return Ports(clock, rng, SocketNetwork(), blocking, plane, discovery, events, credentials, own)
