"""One process of a virtual cluster, which can crash, stall and restart."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.runtime import Ports, ProcessOptions, Runtime
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.virtual.loop import in_process
from kvolt.testing.virtual.network import VirtualNetwork
from kvolt.testing.virtual.ports import resume_process, stall_process

TTL_S = 5.0
"""TTL of leases."""

Body = Callable[[Runtime], Awaitable[None]]


class ProcessHost(Protocol):
    """Interface of the cluster for its processes."""

    network: VirtualNetwork
    limits: Deadlines

    def ports(self, name: str, life: int) -> Ports: ...

    def note(self, event: str) -> None: ...

    def fail(self, what: str) -> None: ...

    def on_gone(self, name: str) -> None:
        """Report that a process ended or crashes now."""
        ...


class ClusterProcess:
    """One process: runs `body` on a new Runtime after each start."""

    def __init__(self, cluster: ProcessHost, name: str, listen_port: int, body: Body) -> None:
        self.name = name
        self._cluster = cluster
        self._listen_port = listen_port
        self._body = body
        self._lives = 0
        self._task_group: TaskGroup | None = None
        self._runtime: Runtime | None = None
        self._stalled_at: float | None = None
        self._stalled_s = 0.0

    @property
    def alive(self) -> bool:
        return self._task_group is not None

    @property
    def runtime(self) -> Runtime | None:
        """Runtime since the last start; None while the process is down."""
        return self._runtime

    @property
    def stalled_s(self) -> float:
        """Total stalled time so far."""
        now = asyncio.get_running_loop().time()
        return self._stalled_s + (0.0 if self._stalled_at is None else now - self._stalled_at)

    def start(self) -> None:
        in_process(self.name, self._start)

    def _start(self) -> None:
        cluster = self._cluster
        self._lives += 1
        ports = cluster.ports(self.name, self._lives)
        options = ProcessOptions(
            name=self.name,
            listen=f"{self.name}:{self._listen_port}",
            lease_ttl_s=TTL_S,
            start_timeout_s=600.0,
            deadlines=cluster.limits,
        )
        self._runtime = Runtime(ports, options)
        self._task_group = TaskGroup(self.name, on_error=self._on_error)
        self._task_group.start(self._run(self._runtime), "main")
        cluster.note(f"{self.name} starts")

    async def _run(self, runtime: Runtime) -> None:
        await runtime.start()
        await self._body(runtime)

    def _on_error(self, error: BaseException) -> None:
        self._cluster.fail(f"{self.name} died: {error!r}")

    async def crash(self, silent: bool) -> None:
        """End immediately, without notice to any peer."""
        if self._task_group is None or self._runtime is None:
            return
        self._cluster.note(f"{self.name} crashes{' silently' if silent else ''}")
        self._cluster.network.crash(self.name, silent)
        self.resume()  # its tasks end without effect
        self._cluster.on_gone(self.name)
        await self._end(self._runtime, self._task_group, drain_s=None)

    def stall(self) -> None:
        """Stop running until `resume`, as after SIGSTOP; connections stay open."""
        if self._stalled_at is None:
            self._stalled_at = asyncio.get_running_loop().time()
            stall_process(self._cluster.network, self.name)

    def resume(self) -> None:
        """Continue, as after SIGCONT. No effect if the process is not stalled."""
        if self._stalled_at is not None:
            self._stalled_s = self.stalled_s
            self._stalled_at = None
        resume_process(self._cluster.network, self.name)

    def restart(self) -> None:
        if self._task_group is None:
            self._cluster.network.restart(self.name)
            self.start()

    async def stop(self) -> None:
        """Stop gracefully, as on SIGTERM."""
        self.resume()
        if self._task_group is not None and self._runtime is not None:
            await self._end(self._runtime, self._task_group, drain_s=1.0)
            self._cluster.on_gone(self.name)

    async def _end(self, runtime: Runtime, task_group: TaskGroup, drain_s: float | None) -> None:
        self._task_group = self._runtime = None
        if drain_s is not None:
            await runtime.close(drain_s)
        await task_group.close()
        abandoning = runtime.discovery.abandon()  # type: ignore[attr-defined]
        if abandoning is not None:
            await abandoning
        await runtime.abort()
