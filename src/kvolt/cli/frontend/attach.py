"""`--attach`: run a worker for each external inference server inside the frontend process.

To routers each is an ordinary worker with an address, a registration, KV events and load. It is cordoned while its
server is unreachable and resumed when the server is back. Unreachable and unusable servers do not affect the others: an
unusable one is tried again at intervals. If no server can be used at start, the process ends with the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, cast

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvolt.cli.process import Process
from kvolt.cli.worker.fleet import FleetMetrics
from kvolt.core.endpoints import ATTACHED_DETAILS, InstanceState
from kvolt.core.errors import ConfigError, KvoltError
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.registry import build_engine, parse_argument
from kvolt.engines.remote import RemoteEngine
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.health import Health, HealthState
from kvolt.runtime.network import join_address, split_address
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import Scope, TaskGroup
from kvolt.worker.worker import Worker, WorkerOptions

log = logging.getLogger(__name__)

ENGINE = "remote"

_RETRY_S = 30.0
"""Pause before an unusable server is tried again."""
_SHORT_NAMES = {"events": "kv_events", "replay": "kv_events_replay"}

Arguments = dict[str, Any]


def parse_attached(texts: Sequence[str], settings: Settings) -> list[Arguments]:
    """Engine arguments of each server. Raises ConfigError if they or the settings are invalid."""
    if settings.frontend.processes > 1:
        raise ConfigError(
            "--attach requires a single frontend process",
            key="attach",
            remedy="omit --processes, or run `kvolt worker --engine remote --arg url=URL` for each server",
        )
    for section, kind in (("discovery", settings.discovery.kind), ("events", settings.events.kind)):
        if kind == "mem":
            raise ConfigError(
                f"--attach does not support {section}.kind = mem",
                key=f"{section}.kind",
                remedy="use the default",
            )
    return [_parse(text) for text in texts]


def _parse(text: str) -> Arguments:
    url, *others = text.split(",")
    arguments: Arguments = {"url": url, "start_timeout_s": None}
    for part in others:
        name, value = parse_argument(part, "--attach")
        arguments[_SHORT_NAMES.get(name, name)] = value
    build_engine(ENGINE, _SPEC, arguments)  # raises before anything is started
    return arguments


_SPEC = EngineSpec(model="", role=Role.AGGREGATED)


class ServerState(StrEnum):
    WAITING = "waiting"
    """Not attached yet, or unreachable."""
    ATTACHED = "attached"
    FAILED = "failed"
    """Cannot be used; tried again at intervals."""


@dataclass(slots=True, eq=False)
class _Server:
    """An external server with its worker. A new one is created for each attempt to attach the server."""

    engine: RemoteEngine
    part: Runtime
    worker: Worker
    unreachable_reason: str | None = None
    failure: KvoltError | None = None
    has_started: bool = False
    state_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def describe(self) -> dict[str, str]:
        """State for `kvolt status`."""
        state, reason = ServerState.WAITING, self.unreachable_reason or ""
        if self.failure is not None:
            state, reason = ServerState.FAILED, self.failure.message
        elif self.has_started and self.unreachable_reason is None:
            state = ServerState.ATTACHED
        return {"url": self.engine.url, "state": state.value, "reason": reason}


class Attached:
    """Workers of the external servers; `run` serves them until the process ends."""

    def __init__(self, process: Process, arguments: Sequence[Arguments], retry_s: float = _RETRY_S) -> None:
        self._process = process
        self._arguments = arguments
        self._retry_s = retry_s
        self._task_group = TaskGroup("attached")
        self._servers: list[_Server] = []
        self._was_any_attached = False

    async def run(self) -> None:
        """Raises the first error if no server can be used at start."""
        try:
            self._servers += [self._server(arguments) for arguments in self._arguments]
            self._process.runtime.children += [server.part for server in self._servers]
            self._process.runtime.add_status_details(
                ATTACHED_DETAILS, lambda: [server.describe() for server in self._servers]
            )
            self._process.metrics.registry.register(_Metrics(self._servers))
            async with Scope("attached") as scope:
                for number, server in enumerate(self._servers):
                    scope.start(self._serve(number), server.engine.url)
        finally:
            await self._task_group.close()
            for server in self._servers:
                await server.worker.close()
                await server.part.close()

    async def _serve(self, number: int) -> None:
        """Keep one server attached. An error of a server ends neither the process nor the other servers."""
        logged = ""
        while True:
            server = self._servers[number]
            try:
                await server.part.start()
                await server.worker.start()
                self._was_any_attached = server.has_started = True
                if server.unreachable_reason is None:
                    server.part.health.set("server", HealthState.READY)
                await server.worker.run()
                return
            except KvoltError as error:
                server.failure = error
                if not self._was_any_attached and all(each.failure is not None for each in self._servers):
                    raise
                server.part.health.set("server", HealthState.CORDONED, error.message)
                if error.message != logged:
                    logged = error.message
                    log.error(
                        "attached server failed: url=%s reason=%s remedy=%s retry_s=%g",
                        server.engine.url,
                        error.message,
                        error.fields.get("remedy", "see the log of the server"),
                        self._retry_s,
                    )
            await server.worker.close()
            await server.part.close()
            await asyncio.sleep(self._retry_s)
            self._replace(number)

    def _replace(self, number: int) -> None:
        """Create a new worker: an engine and its Runtime can be started only once."""
        children, before = self._process.runtime.children, self._servers[number]
        server = self._servers[number] = self._server(self._arguments[number])
        children[children.index(before.part)] = server.part

    def _server(self, arguments: Arguments) -> _Server:
        main, settings = self._process.runtime, self._process.settings
        engine = cast(RemoteEngine, build_engine(ENGINE, _SPEC, arguments))
        host = split_address(main.options.listen)[0]
        part = Runtime(main.ports, replace(main.options, name=engine.url, listen=join_address(host, 0)))
        part.admin_address = main.admin_address
        part.health = _PartHealth(main.health, engine.url)
        server = _Server(engine, part, Worker(part, engine, settings.namespace, WorkerOptions()))

        def on_health(reason: str | None) -> None:
            server.unreachable_reason = reason
            part.health.set(
                "server", HealthState.READY if reason is None else HealthState.CORDONED, reason or ""
            )
            if not self._task_group.closed:
                self._task_group.start(self._update_state(server), f"state {engine.url}")

        engine.on_health = on_health
        return server

    async def _update_state(self, server: _Server) -> None:
        """Cordon or resume the worker. A process that an operator cordoned stays cordoned."""
        async with server.state_lock:
            if server.unreachable_reason is not None:
                await server.part.cordon()
                return
            status = await self._process.runtime.status()
            if all(each.state is InstanceState.READY for each in status.endpoints):
                await server.part.resume()


class _PartHealth(Health):
    """Health checks of one server, shown by the process as optional checks."""

    def __init__(self, whole: Health, name: str) -> None:
        super().__init__()
        self._whole = whole
        self._name = name

    def set(self, name: str, state: HealthState, reason: str = "", required: bool = True) -> None:
        super().set(name, state, reason, required)
        self._whole.set(f"{self._name} {name}", state, reason, required=False)

    def remove(self, name: str) -> None:
        super().remove(name)
        self._whole.remove(f"{self._name} {name}")


class _Metrics(Collector):
    """Metrics of all workers, summed by model. Each server serves its own metrics itself."""

    def __init__(self, servers: Sequence[_Server]) -> None:
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        by_model: dict[str, list[Worker]] = {}
        for server in self._servers:
            if server.worker.journal is not None:  # attached
                by_model.setdefault(server.worker.metrics.labels.model, []).append(server.worker)
        families: dict[str, Metric] = {}
        for workers in by_model.values():
            for family in FleetMetrics(workers).collect():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()
