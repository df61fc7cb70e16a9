"""Which role may call which endpoint and register which key."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.unit.runtime.security.test_secure_network import credentials
from tests.waits import MUST_HAPPEN_S

from kvolt.core.endpoints import (
    EndpointAddress,
    Instance,
    PublisherRegistration,
    encode_instance,
    publishers_prefix,
)
from kvolt.core.errors import AccessDenied, ConfigError, ConnectFailed
from kvolt.core.ids import InstanceId
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.config.settings import ClusterSettings
from kvolt.runtime.endpoint.call import Deadlines, decode_any, open_stream
from kvolt.runtime.join import server as join_server
from kvolt.runtime.plane.connection import ConnectionOptions
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.plane.tcp_plane import TcpPlane
from kvolt.runtime.process_control import CONTROL_ENDPOINT, EVENTS_ENDPOINT, STATUS_ENDPOINT
from kvolt.runtime.security.access import DISCOVERY_ENDPOINTS, check_call, check_registration, may_serve
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.exposure import check_exposure
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.runtime.security.secure_network import SecureNetwork

JOIN_SERVER = (
    join_server.HOLD,
    join_server.PUT,
    join_server.DELETE,
    join_server.REVOKE,
    join_server.GET,
    join_server.WATCH,
)


def identity(role: ProcessRole) -> Identity:
    return Identity(role, "a")


def instance_of(component: str, endpoint: str, name: str = "id") -> Instance:
    address = EndpointAddress("default", component, endpoint)
    return Instance(id=InstanceId(name), endpoint=address, address="10.0.0.5:1", identity="kvolt://worker/a")


def test_the_join_server_is_known_by_its_prefix() -> None:
    assert all(endpoint.startswith(DISCOVERY_ENDPOINTS) for endpoint in JOIN_SERVER)


@pytest.mark.parametrize("role", [ProcessRole.WORKER, ProcessRole.POOL])
def test_workers_and_pools_may_call_what_they_need(role: ProcessRole) -> None:
    for endpoint in (*JOIN_SERVER, STATUS_ENDPOINT, "default.m-decode-1.kv"):
        check_call(identity(role), endpoint)


@pytest.mark.parametrize("role", [ProcessRole.WORKER, ProcessRole.POOL])
@pytest.mark.parametrize(
    "endpoint",
    [
        CONTROL_ENDPOINT,
        EVENTS_ENDPOINT,
        "default.m-decode-1.generate",
        "default.m-decode-1.control",
        "default.kv-pool.control",  # lists the blocks of all workers
        "default.router.route",
        "kvolt.router.session",
        "kvolt.frontend.trace",
        "kv",
        "",
    ],
)
def test_workers_and_pools_may_not_call_others(role: ProcessRole, endpoint: str) -> None:
    with pytest.raises(AccessDenied):
        check_call(identity(role), endpoint)


@pytest.mark.parametrize("role", [ProcessRole.FRONTEND, ProcessRole.ROUTER, ProcessRole.CLIENT])
def test_others_may_call_and_register_all(role: ProcessRole) -> None:
    check_call(identity(role), CONTROL_ENDPOINT)
    check_registration(identity(role), "instances/default/router/route/1", b"")


@pytest.mark.parametrize(
    ("role", "component", "endpoint", "allowed"),
    [
        (ProcessRole.WORKER, "m-decode-1", "generate", True),
        (ProcessRole.WORKER, "m-decode-1", "card", True),
        (ProcessRole.WORKER, "router", "route", False),
        (ProcessRole.WORKER, "frontend", "http", False),
        (ProcessRole.WORKER, "kv-pool", "generate", False),
        (ProcessRole.POOL, "kv-pool", "control", True),
        (ProcessRole.POOL, "m-decode-1", "generate", False),
    ],
)
def test_registrations_by_role(role: ProcessRole, component: str, endpoint: str, allowed: bool) -> None:
    own = identity(role).uri
    instance = msgspec.structs.replace(instance_of(component, endpoint), identity=own)
    if allowed:
        check_registration(identity(role), instance.key, encode_instance(instance))
    else:
        with pytest.raises(AccessDenied):
            check_registration(identity(role), instance.key, encode_instance(instance))


def test_a_registration_describes_the_instance_of_its_key() -> None:
    own = instance_of("m-decode-1", "generate")
    for value in (
        encode_instance(instance_of("m-decode-1", "generate", "victim")),
        encode_instance(instance_of("router", "route")),
        encode_instance(msgspec.structs.replace(own, identity="kvolt://worker/victim")),
        encode_instance(msgspec.structs.replace(own, identity="")),
        b"not an instance",
    ):
        with pytest.raises(AccessDenied, match="another instance"):
            check_registration(identity(ProcessRole.WORKER), own.key, value)


def test_workers_may_register_event_publishers_and_nothing_else() -> None:
    key, own = publishers_prefix("default") + "1", PublisherRegistration("10.0.0.5:1", 2, "kvolt://worker/a")
    check_registration(identity(ProcessRole.WORKER), key, msgspec.msgpack.encode(own))
    for forged in (msgspec.structs.replace(own, identity="kvolt://worker/victim"), None):
        with pytest.raises(AccessDenied, match="another process"):
            check_registration(identity(ProcessRole.WORKER), key, msgspec.msgpack.encode(forged))
    check_registration(identity(ProcessRole.FRONTEND), "plans/default", b"")
    with pytest.raises(AccessDenied):
        check_registration(identity(ProcessRole.WORKER), "plans/default", b"")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "gpu-7", "fe80::1", "127.0.0.1.example.com"])
def test_a_listener_for_other_machines_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="any machine") as caught:
        check_exposure(ClusterSettings(), host, "runtime.host", "the request plane")
    assert "--cluster-key" in caught.value.fields["remedy"]
    assert "--insecure-network" in caught.value.fields["remedy"]
    check_exposure(ClusterSettings(key="key"), host, "runtime.host", "the request plane")
    check_exposure(ClusterSettings(insecure_network=True), host, "runtime.host", "the request plane")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_loopback_needs_no_key(host: str) -> None:
    check_exposure(ClusterSettings(), host, "runtime.host", "the request plane")


@pytest.mark.parametrize(
    ("endpoint", "worker", "pool"),
    [
        (STATUS_ENDPOINT, True, True),
        (CONTROL_ENDPOINT, True, True),
        (EVENTS_ENDPOINT, True, True),
        ("default.m-decode-1.generate", True, False),
        ("default.m-decode-1.card", True, False),
        ("default.m-decode-1.control", True, False),
        ("default.m-decode-1.kv", True, False),
        ("default.kv-pool.control", False, True),
        ("default.router.route", False, False),
        ("kvolt.router.session", False, False),
        *((endpoint, False, False) for endpoint in JOIN_SERVER),
    ],
)
def test_what_workers_and_pools_may_serve(endpoint: str, worker: bool, pool: bool) -> None:
    assert may_serve(identity(ProcessRole.WORKER), endpoint) is worker
    assert may_serve(identity(ProcessRole.POOL), endpoint) is pool
    assert may_serve(identity(ProcessRole.FRONTEND), endpoint)


async def test_a_worker_does_not_answer_in_place_of_a_join_server(tmp_path: Path) -> None:
    authority = ClusterAuthority.create(SystemClock().wall())
    opened: list[str] = []

    def plane(role: ProcessRole) -> TcpPlane:
        network = SecureNetwork(credentials(tmp_path, authority, Identity(role, role.value)))
        return TcpPlane(network, ConnectionOptions(), role, lambda stream: opened.append(stream.target))

    worker, frontend = plane(ProcessRole.WORKER), plane(ProcessRole.FRONTEND)
    address = await worker.listen("127.0.0.1:0")
    try:
        with pytest.raises(ConnectFailed, match=r"not kvolt\.discovery\.get of this cluster"):
            await open_stream(frontend, Destination(address, join_server.GET), "", Deadlines(), decode_any)
        await open_stream(frontend, Destination(address, STATUS_ENDPOINT), None, Deadlines(), decode_any)
        async with asyncio.timeout(20):
            while not opened:
                await asyncio.sleep(0.01)
        assert opened == [STATUS_ENDPOINT]
    finally:
        await frontend.close()
        await worker.close()


async def test_calls_reach_the_process_that_is_registered_only(tmp_path: Path) -> None:
    """Another worker at its address, or one that claims the address, gets none of its requests."""
    authority = ClusterAuthority.create(SystemClock().wall())
    opened: list[str] = []

    def plane(role: ProcessRole, name: str) -> TcpPlane:
        network = SecureNetwork(credentials(tmp_path, authority, Identity(role, name)))
        return TcpPlane(network, ConnectionOptions(), name, lambda stream: opened.append(stream.target))

    rogue, frontend = plane(ProcessRole.WORKER, "rogue"), plane(ProcessRole.FRONTEND, "f")
    address, target = await rogue.listen("127.0.0.1:0"), "default.m-decode-1.generate"
    try:
        to = Destination(address, target, "kvolt://worker/victim")
        with pytest.raises(ConnectFailed, match="is kvolt://worker/rogue, not"):
            await open_stream(frontend, to, None, Deadlines(), decode_any)
        to = Destination(address, target, "kvolt://worker/rogue")
        await open_stream(frontend, to, None, Deadlines(), decode_any)
        async with asyncio.timeout(MUST_HAPPEN_S):
            while not opened:
                await asyncio.sleep(0.01)
        assert opened == [target]
    finally:
        await frontend.close()
        await rogue.close()
