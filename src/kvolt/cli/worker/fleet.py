"""Many workers in one process, for simulated engines: hundreds on one event loop.

Other processes see each as a separate worker with an address, a registration, KV events, load and a line in
`kvolt status`. The workers share the discovery client and its lease, the event plane, the admin port, and the metrics,
which are merged. Operator commands for the process apply to every worker (`Runtime.children`); the process ends when
one engine dies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import replace

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvolt.cli.process import Process, raise_open_file_limit
from kvolt.cli.worker.transfers import Transfers
from kvolt.core.errors import ConfigError, DiscoveryLost
from kvolt.engines.contract import Engine
from kvolt.runtime.discovery.port import Discovery, LeaseId, WatchEvent
from kvolt.runtime.events.port import EventPlane, EventStream
from kvolt.runtime.health import Health, HealthState
from kvolt.runtime.network import join_address, split_address
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import Scope
from kvolt.worker.kv.transfer_metrics import HandoffMetrics, PathMetrics
from kvolt.worker.metrics import WorkerMetrics
from kvolt.worker.worker import Worker, WorkerOptions, stats_of

_CONCURRENT_STARTS = 32
_HISTORY_BYTES = 64 << 20
"""Memory for recent KV events of all workers together."""
_MIN_HISTORY_BYTES = 64 << 10
_PROCESS_FILES = 256
_FILES_PER_WORKER = 32
_WORST_FIRST = (
    HealthState.UNHEALTHY,
    HealthState.STARTING,
    HealthState.DRAINING,
    HealthState.CORDONED,
    HealthState.READY,
)


class WorkerFleet:
    """Workers of one process: `start`, then `run` until an engine or the process ends, then `close`."""

    def __init__(
        self,
        process: Process,
        new_engine: Callable[[], Engine],
        options: WorkerOptions,
        count: int,
    ) -> None:
        self._process = process
        self._transfers = Transfers(process.runtime, process.settings.transfer)
        self._new_engine = new_engine
        history = max(_HISTORY_BYTES // count, _MIN_HISTORY_BYTES)
        self._options = msgspec.structs.replace(
            options, kv_history_bytes=min(options.kv_history_bytes, history)
        )
        self._count = count
        self._states: Counter[HealthState] = Counter({HealthState.STARTING: count})
        self.workers: list[Worker] = []
        """Workers NAME-0, NAME-1, ... in this order."""

    async def start(self) -> None:
        """Start and register all workers. Raises ConfigError if runtime.port is set."""
        main = self._process.runtime
        if split_address(main.options.listen)[1]:
            raise ConfigError(
                f"runtime.port is {main.options.listen}, but {self._count} workers cannot share a port",
                key="runtime.port",
                remedy="set it to 0: each worker uses a free port",
            )
        self._update_health()
        raise_open_file_limit(_PROCESS_FILES + _FILES_PER_WORKER * self._count)
        lease = await main.discovery.lease(main.options.lease_ttl_s)
        main.children += [self._part(number, lease) for number in range(self._count)]
        settings = self._process.settings
        self.workers += [
            Worker(part, self._new_engine(), settings.namespace, self._options, self._transfers.mover)
            for part in main.children
        ]
        for worker in self.workers:
            self._transfers.add_listener(worker.register_links)
        remaining = iter(zip(main.children, self.workers, strict=True))

        async def start_remaining() -> None:
            for part, worker in remaining:
                await part.start()
                await worker.start()

        async with Scope("start") as scope:
            for number in range(min(self._count, _CONCURRENT_STARTS)):
                scope.start(start_remaining(), f"start-{number}")
        self._process.metrics.registry.register(FleetMetrics(self.workers))
        self._process.metrics.registry.register(HandoffMetrics(lambda: stats_of(self.workers)))
        self._process.metrics.registry.register(
            PathMetrics(lambda: self._transfers.paths, lambda: self._transfers.started_agent)
        )
        main.add_status_details("workers", lambda: self._count)
        main.commands["clear_kv_blocks"] = self._clear_kv_blocks

    def _part(self, number: int, lease: LeaseId) -> Runtime:
        main = self._process.runtime
        ports = replace(
            main.ports,
            discovery=lambda plane: _SharedDiscovery(main.discovery, lease),
            events=lambda discovery, plane, server: _SharedEvents(main.events),
        )
        host = split_address(main.options.listen)[0]
        name = f"{main.options.name}-{number}"
        part = Runtime(ports, replace(main.options, name=name, listen=join_address(host, 0)))
        part.admin_address = main.admin_address
        part.health = _PartHealth(self._on_health)
        return part

    async def run(self) -> None:
        """Run until all engines are closed. Raises EngineDied as soon as one dies."""
        async with Scope("workers") as scope:
            for number, worker in enumerate(self.workers):
                scope.start(worker.run(), str(number))

    async def close(self) -> None:
        await self._transfers.close()  # before the memory that it uses
        for worker in self.workers:
            await worker.close()

    async def _clear_kv_blocks(self, body: bytes) -> dict[str, int | None]:
        answers = [await worker.operations.clear_kv_blocks() for worker in self.workers]
        return {"cleared_blocks": sum(answer["cleared_blocks"] or 0 for answer in answers)}

    # --- health

    def _on_health(self, before: HealthState, now: HealthState) -> None:
        self._states[before] -= 1
        self._states[now] += 1
        self._update_health()

    def _update_health(self) -> None:
        """Set the health of the process to that of its worst worker."""
        worst = next(state for state in _WORST_FIRST if self._states[state])
        number = self._states[worst]
        reason = "" if worst is HealthState.READY else f"{number} of {self._count} workers"
        self._process.runtime.health.set("workers", worst, reason)


class FleetMetrics(Collector):
    """Merged metrics of all workers, instead of hundreds of series per metric."""

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        first = self._workers[0].metrics
        merged = WorkerMetrics()
        merged.labels = msgspec.structs.replace(first.labels, instance="all")
        merged.block_size, merged.alias_families = first.block_size, first.alias_families
        for worker in self._workers:
            merged.absorb(worker.metrics)
        return merged.collect()


class _PartHealth(Health):
    """Health checks of one worker; calls `on_change` when the worst state changes."""

    def __init__(self, on_change: Callable[[HealthState, HealthState], None]) -> None:
        super().__init__()
        self._on_change = on_change
        self._worst = HealthState.STARTING

    def set(self, name: str, state: HealthState, reason: str = "", required: bool = True) -> None:
        super().set(name, state, reason, required)
        self._update()

    def remove(self, name: str) -> None:
        super().remove(name)
        self._update()

    def _update(self) -> None:
        states = {check.state for check in self._checks.values()} or {HealthState.STARTING}
        before, self._worst = self._worst, next(state for state in _WORST_FIRST if state in states)
        if before is not self._worst:
            self._on_change(before, self._worst)


class _SharedDiscovery(Discovery):
    """Discovery of the process for one worker: `close` deletes the keys of this worker only."""

    def __init__(self, whole: Discovery, lease: LeaseId) -> None:
        self._whole = whole
        self._lease = lease
        self._keys: dict[str, None] = {}

    async def lease(self, ttl_s: float, name: LeaseId | None = None) -> LeaseId:
        return self._lease

    async def put(
        self, key: str, value: bytes, lease: LeaseId, on_lost: Callable[[], None] | None = None
    ) -> None:
        self._keys[key] = None
        await self._whole.put(key, value, lease, on_lost)

    async def delete(self, key: str) -> None:
        self._keys.pop(key, None)
        await self._whole.delete(key)

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        return await self._whole.get_prefix(prefix)

    def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        return self._whole.watch_prefix(prefix)

    async def revoke(self, lease: LeaseId) -> None:
        """No effect: the lease belongs to the process."""

    async def close(self) -> None:
        while self._keys:
            key, _ = self._keys.popitem()
            try:
                await self._whole.delete(key)
            except DiscoveryLost:
                return  # the keys expire with the lease


class _SharedEvents(EventPlane):
    """Event plane of the process for one worker. Events name their worker."""

    def __init__(self, whole: EventPlane) -> None:
        self._whole = whole

    @property
    def publisher(self) -> str:
        return self._whole.publisher

    async def start(self) -> None:
        """No effect: started with the process."""

    def publish(self, topic: str, payload: bytes) -> None:
        self._whole.publish(topic, payload)

    def subscribe(self, topic: str, queue_limit: int = 10_000) -> EventStream:
        return self._whole.subscribe(topic, queue_limit)

    async def close(self) -> None:
        """No effect: closed with the process."""
