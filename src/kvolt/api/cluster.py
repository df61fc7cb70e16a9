"""A running cluster seen from outside: its registrations, and calls to its processes; registers nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from kvolt.core.card import EngineInfo
from kvolt.core.endpoints import (
    GENERATE,
    INSTANCES,
    EndpointAddress,
    Instance,
    InstanceState,
    decode_instance,
)
from kvolt.core.errors import MALFORMED, ConfigError, InvalidRequest, KvoltError, NotFound
from kvolt.runtime.clock import ThreadBlocking
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.discovery.port import Discovery
from kvolt.runtime.endpoint.call import Deadlines, ResponseStream, open_stream
from kvolt.runtime.endpoint.server import EndpointServer
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.network import is_wildcard, join_address, split_address
from kvolt.runtime.plane.port import Destination, RequestPlane
from kvolt.runtime.plane.streams import Decode
from kvolt.runtime.process_control import (
    CONTROL_ENDPOINT,
    MAX_CONTROL_S,
    STATUS_ENDPOINT,
    ControlRequest,
    ProcessStatus,
)
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.runtime.system_ports import check_directory, make_ports
from kvolt.runtime.tasks import Scope

_MAX_CONCURRENT_CALLS = 32
_LIMITS = Deadlines(connect_s=2.0, first_s=2.0, between_s=2.0, total_s=3.0)
_CONTROL_S = 5.0
"""For a control request itself, besides the time that the process may take to drain."""
_ENGINE_S = {"sleep": 300.0, "wake_up": 300.0}
"""For the weights of a large model to move."""
_decode_info = msgspec.msgpack.Decoder(EngineInfo).decode
_decode_addresses = msgspec.msgpack.Decoder(dict[str, str]).decode
_decode_status = msgspec.msgpack.Decoder(ProcessStatus).decode


class ProcessView(msgspec.Struct, frozen=True):
    """A registered process and its reported status."""

    name: str
    address: str
    admin: str | None
    status: ProcessStatus | None
    problem: str = ""
    """Why there is no status."""
    http: str | None = None
    """Where a frontend listens, HOST:PORT."""


class WorkerView(msgspec.Struct, frozen=True):
    """A registered worker, from its registration."""

    id: str
    """Instance id, as in `nvext.worker_id` and `x-kvolt-worker-instance-id`."""
    process: str
    address: str
    state: InstanceState
    info: EngineInfo
    """Model, role, engine, capacity, adapters and taints."""


class Cluster:
    """Discovery and request plane of a namespace."""

    def __init__(self, discovery: Discovery, plane: RequestPlane, namespace: str) -> None:
        self._discovery = discovery
        self._plane = plane
        self._namespace = namespace
        self._frontend = EndpointAddress(namespace, "frontend", "http")

    async def list_processes(self) -> list[ProcessView]:
        """Query the status of every registered process, sorted by name. Raises DiscoveryLost."""
        content = await self._discovery.get_prefix(f"{INSTANCES}{self._namespace}/")
        processes: dict[str, Instance] = {}
        listening: dict[str, str | None] = {}
        for value in content.values():
            instance = decode_instance(value)
            if instance is not None:
                processes.setdefault(instance.address, instance)
                if instance.endpoint == self._frontend:
                    listening[instance.address] = http_address(instance)
        views: list[ProcessView] = []
        remaining = iter(processes.values())

        async def query_remaining() -> None:
            for instance in remaining:
                view = await self._query_status(instance)
                views.append(msgspec.structs.replace(view, http=listening.get(instance.address)))

        async with Scope("status") as scope:
            for number in range(min(len(processes), _MAX_CONCURRENT_CALLS)):
                scope.start(query_remaining(), f"query-{number}")
        return sorted(views, key=lambda view: (view.name, view.address))

    async def list_workers(self) -> list[WorkerView]:
        """Registered workers, sorted by process. Raises DiscoveryLost."""
        content = await self._discovery.get_prefix(f"{INSTANCES}{self._namespace}/")
        workers: list[WorkerView] = []
        for value in content.values():
            instance = decode_instance(value)
            if instance is None or instance.endpoint.endpoint != GENERATE:
                continue
            try:
                info = _decode_info(instance.info)
            except MALFORMED:
                continue  # of another version; `list_processes` has it
            workers.append(WorkerView(instance.id, instance.process, instance.address, instance.state, info))
        return sorted(workers, key=lambda worker: (worker.process, worker.id))

    async def list_urls(self) -> list[str]:
        """Base URLs of the registered frontends. Raises DiscoveryLost."""
        instances = await self.instances(self._frontend)
        urls = []
        for instance in instances:
            address = http_address(instance)
            if address is not None:
                host, port = split_address(address)
                if is_wildcard(host):
                    host = split_address(instance.address)[0]
                scheme = _decode_addresses(instance.info).get("scheme", "http")
                urls.append(f"{scheme}://{join_address(host, port)}")
        return list(dict.fromkeys(urls))

    async def control(self, address: str, verb: str, timeout_s: float) -> ProcessStatus:
        """Send `cordon`, `drain`, `resume`, `sleep` or `wake_up` to a process; returns its status afterwards.

        `timeout_s`: time that its running requests get to finish (`drain` and `sleep`).
        """
        if not 0 <= timeout_s <= MAX_CONTROL_S:  # false for NaN
            raise InvalidRequest(f"the timeout must be 0 to {MAX_CONTROL_S:g} s", param="timeout_s")
        total_s = timeout_s + _ENGINE_S.get(verb, _CONTROL_S)
        limits = Deadlines(connect_s=2.0, first_s=total_s, total_s=total_s)
        request = ControlRequest(verb, timeout_s)
        to = Destination(address, CONTROL_ENDPOINT)
        async with await open_stream(self._plane, to, request, limits, _decode_status) as stream:
            status: ProcessStatus = await anext(stream)
            return status

    async def instances(self, endpoint: EndpointAddress) -> list[Instance]:
        """Registered instances of an endpoint, sorted by process. Raises DiscoveryLost."""
        content = await self._discovery.get_prefix(endpoint.prefix)
        decoded = [decode_instance(value) for value in content.values()]
        return sorted(
            (each for each in decoded if each is not None), key=lambda each: (each.process, each.id)
        )

    async def open(self, to: Destination, request: Any, limits: Deadlines, decode: Decode) -> ResponseStream:
        """Call an endpoint of a process. Raises ConnectFailed if nothing was sent."""
        return await open_stream(self._plane, to, request, limits, decode)

    async def _query_status(self, instance: Instance) -> ProcessView:
        try:
            to = Destination(instance.address, STATUS_ENDPOINT, instance.identity)
            async with await open_stream(self._plane, to, None, _LIMITS, _decode_status) as stream:
                status = await anext(stream)
            return ProcessView(instance.process, instance.address, instance.admin, status)
        except KvoltError as error:
            return ProcessView(instance.process, instance.address, instance.admin, None, error.message)


def find_process(views: Sequence[ProcessView], process: str) -> ProcessView:
    """The process with this name or address. NotFound if there is none, or if several have the name."""
    matches = [view for view in views if process in (view.name, view.address)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        addresses = ", ".join(view.address for view in matches)
        raise NotFound(
            f"{len(matches)} processes are named {process!r}; use an address: {addresses}",
            kind="process",
            name=process,
        )
    known = ", ".join(dict.fromkeys(view.name for view in views)) or "none"
    raise NotFound(f"no process {process!r} is registered; known: {known}", kind="process", name=process)


def http_address(instance: Instance) -> str | None:
    """Where a frontend listens, from its registration; None if that cannot be read."""
    try:
        address = _decode_addresses(instance.info).get("http")
        if address is not None:
            split_address(address)
    except (*MALFORMED, ConfigError):
        return None
    return address


@asynccontextmanager
async def visit(settings: Settings) -> AsyncIterator[Cluster]:
    """Connect to the cluster of these settings without registering."""
    await check_directory(settings)
    blocking = ThreadBlocking()
    identity = Identity.of(ProcessRole.CLIENT, "visitor")
    ports = make_ports(settings, Metrics(CollectorRegistry()), blocking, identity)
    plane = ports.plane("visitor", EndpointServer().on_open)
    discovery = ports.discovery(plane)
    try:
        yield Cluster(discovery, plane, settings.namespace)
    finally:
        await discovery.close()
        await plane.close()
        blocking.close()
