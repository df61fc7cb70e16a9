"""Run one kvolt process: start it, wait for a signal, stop it in order.

Shared by all verbs that start a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import uvloop
from prometheus_client import CollectorRegistry

from kvolt.runtime.admin import AdminServer
from kvolt.runtime.clock import SystemClock, ThreadBlocking
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.join.server import JoinServer
from kvolt.runtime.logs import setup_logs
from kvolt.runtime.metrics import LoopLag, Metrics
from kvolt.runtime.network import is_loopback, join_address
from kvolt.runtime.plane.metrics import PlaneCollector
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.security.identity import Identity, ProcessRole
from kvolt.runtime.security.secure_network import AdminNetwork
from kvolt.runtime.stop import StopSignal
from kvolt.runtime.supervisor.plan import READY_FILE_VARIABLE, SUPERVISOR_PID_VARIABLE
from kvolt.runtime.system_ports import check_directory, enroll_process, make_ports, process_options
from kvolt.runtime.tasks import Scope

Body = Callable[["Process"], Awaitable[None]]
Stopper = Callable[[float], Awaitable[None]]


class Process:
    """A started process: its runtime, settings, metrics and shutdown hooks."""

    def __init__(self, settings: Settings, runtime: Runtime, metrics: Metrics) -> None:
        self.settings = settings
        self.runtime = runtime
        self.metrics = metrics
        self._stoppers: list[Stopper] = []

    def before_close(self, stopper: Stopper) -> None:
        """Add a shutdown hook `stopper(drain_s)`, called in reverse order before the runtime closes."""
        self._stoppers.append(stopper)

    async def close(self, drain_s: float) -> None:
        if self._stoppers:  # they may drain for long
            await self.runtime.stop_accepting()
        while self._stoppers:
            await self._stoppers.pop()(drain_s)
        await self.runtime.close(drain_s)


def run_loop(main: Callable[[], Awaitable[int]]) -> int:
    """Run a coroutine to its end on uvloop."""

    async def entry() -> int:
        return await main()

    return uvloop.run(entry())


def raise_open_file_limit(count: int) -> None:
    """Raise the open file limit of this process to `count`, or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def run_process(settings: Settings, name: str, body: Body, role: ProcessRole) -> int:
    """Run one process; return its exit code. The process stops when `body` returns."""
    clock = SystemClock()
    setup_logs(settings.log.level, settings.log.format, name, sys.stderr, clock)

    async def main() -> int:
        stop = StopSignal()
        stop.install()
        await check_directory(settings)
        started = asyncio.Event()

        async def run_started() -> None:
            async with running(settings, name, role) as process:
                started.set()
                await _until_stopped(process, body, stop)
            scope.cancel()

        async def abort_start() -> None:
            """On a signal before the start is complete, exit without draining."""
            await stop.wait()
            if not started.is_set():
                scope.cancel()

        async with Scope(name) as scope:
            scope.start(run_started(), "run_started")
            scope.start(abort_start(), "start")
        return 0

    return run_loop(main)


class _ReadyFile:
    """File by which a supervisor, if any, knows that this process serves, and removes to say that it stops."""

    def __init__(self) -> None:
        path = os.environ.pop(READY_FILE_VARIABLE, None)  # not for the child processes of this one
        self._path = None if path is None else Path(path)
        self._was_created = False

    def create(self) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError):  # only the restart back-off and the shown state depend on it
                self._path.touch()
                self._was_created = True

    def was_removed(self) -> bool:
        return self._path is not None and self._was_created and not self._path.exists()


async def _until_stopped(process: Process, body: Body, stop: StopSignal) -> None:
    """Run the body until it ends or a signal arrives. After a signal the body continues while the process drains."""

    async def run_body() -> None:
        await body(process)
        scope.cancel()

    async def watch() -> None:
        await stop.wait()
        await process.close(process.settings.runtime.drain_timeout_s)
        scope.cancel()

    async with Scope("process") as scope:
        scope.start(watch(), "stop")
        scope.start(LoopLag(process.runtime.ports.clock, process.metrics.loop_lag).run(), "loop-lag")
        scope.start(run_body(), "body")


@asynccontextmanager
async def running(settings: Settings, name: str, role: ProcessRole) -> AsyncIterator[Process]:
    """Runtime of a process with its admin server; closed in order at the end."""
    metrics = Metrics(CollectorRegistry(), settings.metrics.aliases)
    supervisor_pid = os.environ.pop(SUPERVISOR_PID_VARIABLE, None)
    ready_file = _ReadyFile()
    options = replace(
        process_options(settings, name),
        pid=os.getpid(),
        supervisor_pid=int(supervisor_pid) if supervisor_pid else None,
        on_registered=ready_file.create,
        is_stopping=ready_file.was_removed,
    )
    identity = Identity.of(role, name)
    credentials = await enroll_process(settings, identity)
    blocking = ThreadBlocking()
    runtime = Runtime(make_ports(settings, metrics, blocking, identity, credentials), options)
    process = Process(settings, runtime, metrics)
    metrics.registry.register(PlaneCollector(runtime.plane))
    metrics.count_tasks(asyncio.get_running_loop())
    admin_host = settings.admin.host
    credentials = None if is_loopback(admin_host) else runtime.ports.credentials
    admin = AdminServer(
        runtime.ports.network if credentials is None else AdminNetwork(credentials, metrics.count_handshake),
        runtime.ports.clock,
        runtime.health,
        metrics,
        runtime,
        settings.runtime.drain_timeout_s,
        requires_identity=credentials is not None,
    )
    join: JoinServer | None = None
    try:
        if settings.admin.enabled:
            runtime.admin_address = await admin.start(join_address(admin_host, settings.admin.port))
        if settings.discovery.join_listen is not None:
            join = JoinServer(runtime.discovery, runtime.ports.clock, settle_s=2 * settings.discovery.ttl_s)
            join.register_endpoints(runtime.server)
        await runtime.start()
        if settings.discovery.join_listen is not None:
            await runtime.plane.listen(settings.discovery.join_listen)
        yield process
    finally:
        await process.close(0.0)
        if join is not None:
            await join.close()
        await admin.close()
        blocking.close()
