"""`--attach`: servers that already run, as workers inside the frontend's process.

To routers each is a worker like others: an address, a registration, KV events, load. It is cordoned while its server is
away, so that nobody chooses it, and comes back with it. Servers that are not there yet are waited for, and keep nobody
else waiting; one that can never be attached ends the process at its start, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvolt.cli.process import Process
from kvolt.cli.worker.fleet import FleetMetrics
from kvolt.core.errors import ConfigError
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.registry import build_engine, parse_argument
from kvolt.engines.remote import RemoteEngine
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.endpoint.address import InstanceState
from kvolt.runtime.health import Health, State
from kvolt.runtime.network import join_address, split_address
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import Crew, Scope
from kvolt.worker.worker import Worker, WorkerOptions

ENGINE = "remote"
_SHORT_NAMES = {"events": "kv_events", "replay": "kv_events_replay"}

Arguments = dict[str, Any]


def parse_attached(given: Sequence[str], settings: Settings) -> list[Arguments]:
    """The arguments of each server's engine. ConfigError for what is wrong with them, or with `settings` for that."""
    if settings.frontend.processes > 1:
        raise ConfigError(
            "--attach goes with one process of the frontend",
            key="attach",
            remedy="leave out --processes, or run `kvolt worker --engine remote --arg url=URL` for each server",
        )
    for section, kind in (("discovery", settings.discovery.kind), ("events", settings.events.kind)):
        if kind == "mem":
            raise ConfigError(
                f"--attach needs {section} that several runtimes share, and {section}.kind is mem",
                key=f"{section}.kind",
                remedy="leave it as it is by default",
            )
    return [_parse(text) for text in given]


def _parse(text: str) -> Arguments:
    url, *others = text.split(",")
    arguments: Arguments = {"url": url, "start_timeout_s": None}
    for part in others:
        name, value = parse_argument(part, "--attach")
        arguments[_SHORT_NAMES.get(name, name)] = value
    build_engine(ENGINE, _SPEC, arguments)  # what is wrong is told before anything is started
    return arguments


_SPEC = EngineSpec(model="", role=Role.AGGREGATED)


@dataclass(slots=True, eq=False)
class _Server:
    """One of them, and whether its server is there."""

    engine: RemoteEngine
    part: Runtime
    worker: Worker
    away: str | None = None
    turning: asyncio.Lock = field(default_factory=asyncio.Lock)


class Attached:
    """`run` until the process ends."""

    def __init__(self, process: Process, given: Sequence[Arguments]) -> None:
        self._process = process
        self._given = given
        self._crew = Crew("attached")
        self._servers: list[_Server] = []

    async def run(self) -> None:
        try:
            self._servers += [self._server(arguments) for arguments in self._given]
            self._process.runtime.parts += [server.part for server in self._servers]
            self._process.metrics.registry.register(_Metrics(self._servers))
            async with Scope("attached") as scope:
                for server in self._servers:
                    scope.start(self._serve(server), server.engine.url)
        finally:
            await self._crew.close()
            for server in self._servers:
                await server.worker.close()

    async def _serve(self, server: _Server) -> None:
        await server.part.start()
        await server.worker.start()
        await server.worker.run()

    def _server(self, arguments: Arguments) -> _Server:
        main, settings = self._process.runtime, self._process.settings
        engine = cast(RemoteEngine, build_engine(ENGINE, _SPEC, arguments))
        host = split_address(main.options.listen)[0]
        part = Runtime(main.ports, replace(main.options, name=engine.url, listen=join_address(host, 0)))
        part.admin_address = main.admin_address
        part.health = _PartHealth(main.health, engine.url)
        server = _Server(engine, part, Worker(part, engine, settings.namespace, WorkerOptions()))

        def on_health(reason: str | None) -> None:
            server.away = reason
            part.health.set("server", State.READY if reason is None else State.CORDONED, reason or "")
            if not self._crew.closed:
                self._crew.start(self._turn(server), f"turn {engine.url}")

        engine.on_health = on_health
        return server

    async def _turn(self, server: _Server) -> None:
        """Take it out of the choice, or put it back unless an operator keeps the whole process out."""
        async with server.turning:
            if server.away is not None:
                await server.part.cordon()
                return
            status = await self._process.runtime.status()
            if all(each.state is InstanceState.READY for each in status.endpoints):
                await server.part.resume()


class _PartHealth(Health):
    """One server's checks. The process shows them, and is well without any of its servers."""

    def __init__(self, whole: Health, name: str) -> None:
        super().__init__()
        self._whole = whole
        self._name = name

    def set(self, name: str, state: State, reason: str = "") -> None:
        super().set(name, state, reason)
        self._whole.set_optional(f"{self._name} {name}", state, reason)

    def remove(self, name: str) -> None:
        super().remove(name)
        self._whole.remove(f"{self._name} {name}")


class _Metrics(Collector):
    """Of all workers, added up by model, as a worker's figures are labelled. A server's own are at its own port."""

    def __init__(self, servers: Sequence[_Server]) -> None:
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        by_model: dict[str, list[Worker]] = {}
        for server in self._servers:
            if server.worker.journal is not None:  # attached, and measured since
                by_model.setdefault(server.worker.metrics.labels.model, []).append(server.worker)
        families: dict[str, Metric] = {}
        for workers in by_model.values():
            for family in FleetMetrics(workers).collect():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()
