"""What `kvolt status` and `kvolt top` know of a running cluster: discovery, then each process itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from kvolt.cli.process import check_directory, make_ports
from kvolt.core.errors import KvoltError
from kvolt.runtime.clock import ThreadBlocking
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.discovery.port import Discovery
from kvolt.runtime.endpoint.address import INSTANCES, EndpointAddress, Instance, decode_instance
from kvolt.runtime.endpoint.call import Deadlines, ResponseStream
from kvolt.runtime.endpoint.client import open_stream
from kvolt.runtime.endpoint.server import EndpointServer
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.plane.port import Destination, RequestPlane
from kvolt.runtime.plane.streams import Decode
from kvolt.runtime.runtime import STATUS_ENDPOINT, ProcessStatus
from kvolt.runtime.tasks import Scope

_MAX_ASKED_AT_ONCE = 32
_LIMITS = Deadlines(connect_s=2.0, first_s=2.0, between_s=2.0, total_s=3.0)
_decode_status = msgspec.msgpack.Decoder(ProcessStatus).decode


class ProcessView(msgspec.Struct, frozen=True):
    """One process as seen from outside."""

    name: str
    address: str
    admin: str | None
    status: ProcessStatus | None
    problem: str = ""
    """Why there is no status."""


class Cluster:
    """A visitor: looks, and registers nothing."""

    def __init__(self, discovery: Discovery, plane: RequestPlane, namespace: str) -> None:
        self._discovery = discovery
        self._plane = plane
        self._namespace = namespace

    async def look(self) -> list[ProcessView]:
        """Every registered process with its own account of itself, by name. May raise DiscoveryLost."""
        content = await self._discovery.get_prefix(f"{INSTANCES}{self._namespace}/")
        processes: dict[str, Instance] = {}
        for value in content.values():
            instance = decode_instance(value)
            if instance is not None:
                processes.setdefault(instance.address, instance)
        views: list[ProcessView] = []
        unasked = iter(processes.values())

        async def ask_in_turn() -> None:
            for instance in unasked:
                views.append(await self._ask(instance))

        async with Scope("look") as scope:
            for number in range(min(len(processes), _MAX_ASKED_AT_ONCE)):
                scope.start(ask_in_turn(), f"asker-{number}")
        return sorted(views, key=lambda view: (view.name, view.address))

    async def instances(self, endpoint: EndpointAddress) -> list[Instance]:
        """All that are registered for an endpoint, by process. May raise DiscoveryLost."""
        content = await self._discovery.get_prefix(endpoint.prefix)
        found = [decode_instance(value) for value in content.values()]
        return sorted((each for each in found if each is not None), key=lambda each: (each.process, each.id))

    async def open(self, to: Destination, question: Any, limits: Deadlines, decode: Decode) -> ResponseStream:
        """Ask what a process serves for others. ConnectFailed: nothing was sent."""
        return await open_stream(self._plane, to, question, limits, decode)

    async def _ask(self, instance: Instance) -> ProcessView:
        try:
            to = Destination(instance.address, STATUS_ENDPOINT)
            async with await open_stream(self._plane, to, None, _LIMITS, _decode_status) as stream:
                status = await anext(stream)
            return ProcessView(instance.process, instance.address, instance.admin, status)
        except KvoltError as error:
            return ProcessView(instance.process, instance.address, instance.admin, None, error.message)


@asynccontextmanager
async def visit(settings: Settings) -> AsyncIterator[Cluster]:
    await check_directory(settings)
    blocking = ThreadBlocking()
    ports = make_ports(settings, Metrics(CollectorRegistry()), blocking)
    plane = ports.plane("visitor", EndpointServer().on_open)
    discovery = ports.discovery(plane)
    try:
        yield Cluster(discovery, plane, settings.namespace)
    finally:
        await discovery.close()
        await plane.close()
        blocking.close()
