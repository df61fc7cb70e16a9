"""Worker: serves an engine behind an endpoint.

Passes requests from streams to the engine and step outputs back, and publishes load, KV events, metrics and health
(progress of the engine). There is no task per request: a step output goes to all its streams at once, and the request
plane sends it in one frame per peer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from kvolt.core.card import EngineInfo, MeasuredLink, ModelCard, card_hash
from kvolt.core.delta import StepOutput
from kvolt.core.endpoints import (
    CARD,
    CONTROL,
    GENERATE,
    KV_TOPIC,
    LOAD_TOPIC,
    EndpointAddress,
    Withdraw,
    WithdrawResult,
    component_name,
)
from kvolt.core.errors import EngineDied, EngineFailed, NotFound
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import KvChange
from kvolt.core.kv_recovery import KvRecoveryRequest, KvRecoveryResponse
from kvolt.core.load import LoadReport, WorkerLoad
from kvolt.core.request import RENDEZVOUS_ADDRESS_KEY
from kvolt.engines.contract import Calibrated, Engine, KvAddressable, MetricsProvider, features_of
from kvolt.runtime.endpoint.server import msgpack_decoder
from kvolt.runtime.health import HealthState
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import TaskGroup
from kvolt.scheduler.step_pace import models_differ
from kvolt.worker.control import CommandResult, ControlRequest, adapter_names
from kvolt.worker.kv.compatibility import check_peers, with_slabs
from kvolt.worker.kv.event_publisher import HISTORY_BYTES, KvJournal, answer_recovery
from kvolt.worker.kv.handoffs import EngineHandoffs, Handoffs, HandoffStats
from kvolt.worker.kv.mover import KvMover
from kvolt.worker.kv.peer_workers import PeerWorkers
from kvolt.worker.kv.pool_event_publisher import watch_pool
from kvolt.worker.kv.tiering import Tiering, TieringFactory
from kvolt.worker.metrics import WITH_VLLM_NAMES, Labels, WorkerMetrics, vllm_names
from kvolt.worker.open_requests import OpenRequests, RequestProgress
from kvolt.worker.operations import Operations
from kvolt.worker.preparation import new_handoffs
from kvolt.worker.request_intake import RequestIntake
from kvolt.worker.served_card import ServedModel, served_card, with_served_card

log = logging.getLogger(__name__)

_LOAD_INTERVAL_S = 0.1
_LATENCY_INTERVAL_S = 10.0
_CREATE_TIERS_S = 600.0
"""Time to create the tiers; allocating terabytes on a disk takes minutes."""

_encode = msgspec.msgpack.Encoder().encode


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a worker, independent of its engine."""

    stuck_after_s: float = 30.0
    """The engine is unhealthy after this long with requests and no step; ten times as long before its first step."""
    kv_history_bytes: int = HISTORY_BYTES
    """Recent KV events kept for routers that missed some."""
    taints: tuple[str, ...] = ()
    """Taints in addition to the engine's; requests may require or prefer them."""
    lora_state: Path | None = None
    """File that keeps adapters loaded at run time for the next start."""
    served: ServedModel = ServedModel()


class Worker:
    """One engine in one process. `start`, then `run` until the engine or the process ends."""

    def __init__(
        self,
        runtime: Runtime,
        engine: Engine,
        namespace: str,
        options: WorkerOptions | None = None,
        new_mover: Callable[[KvAddressable], KvMover] | None = None,
        create_tiering: TieringFactory | None = None,
    ) -> None:
        """`new_mover`: creates the KvMover, for the roles that exchange KV. `create_tiering`: creates the tiers below
        the device."""
        self._runtime = runtime
        self._engine = engine
        self._namespace = namespace
        self._options = options or WorkerOptions()
        self._clock = runtime.ports.clock
        self._new_mover = new_mover
        self._create_tiering = create_tiering
        self._task_group = TaskGroup("worker")
        self._loads: dict[int, tuple[WorkerLoad, float]] = {}
        """Latest load per DP rank, and the time it was last published."""
        self._instance = InstanceId("")
        self._generate: EndpointAddress | None = None
        self._registration_lock = asyncio.Lock()
        self._progress = RequestProgress(
            self._clock,
            self._options.stuck_after_s,
            self._on_stuck,
            lambda: self._set_health(HealthState.READY),
        )
        self.info: EngineInfo | None = None
        self.features: tuple[str, ...] = ()
        self.operations = Operations(
            runtime,
            engine,
            lambda: self.tiering,
            self._options.lora_state,
            lambda asleep: self.update_registration(asleep=asleep),
        )
        self.metrics = WorkerMetrics()
        """Collector for the process's registry."""
        self._open = OpenRequests(self._clock.monotonic, self.metrics, self._progress)
        self.journal: KvJournal | None = None
        self.handoffs: Handoffs | EngineHandoffs | None = None
        self.tiering: Tiering | None = None
        self._intake: RequestIntake | None = None
        self._peer_workers: PeerWorkers | None = None

    async def start(self) -> None:
        """Start the engine, then register: a registered worker can compute."""
        self._set_health(HealthState.STARTING)
        began_at = self._clock.monotonic()
        info = with_served_card(await self._engine.start(), self._engine, self._options.served)
        self.features = info.features or features_of(self._engine)
        await self.operations.start(self.features)
        loras = adapter_names(self._engine, self.features) or info.loras
        taints = tuple(dict.fromkeys((*info.taints, *self._options.taints)))
        info = msgspec.structs.replace(info, features=self.features, loras=loras, taints=taints)
        self.info = info = with_slabs(info, self._engine)
        try:
            await check_peers(self._runtime, self._namespace, info)
        except BaseException:
            await self._engine.close()
            raise
        component = component_name(info.model, info.role, info.card)
        self.handoffs = new_handoffs(self._engine, info, self._new_mover, self._clock.monotonic)
        if isinstance(self.handoffs, Handoffs) and "KvMovable" in self.features:
            addresses = {RENDEZVOUS_ADDRESS_KEY: self.handoffs.rendezvous_address}
            self.info = info = msgspec.structs.replace(info, transfer_addresses=addresses)
        await self._start_tiers(info)
        if self.tiering is not None:
            shares = self.tiering.peers is not None
            self.info = info = msgspec.structs.replace(info, has_tiers=True, shares_kv=shares)
        self._set_health(HealthState.READY)
        self._runtime.add_status_details("engine", self._describe)
        self._serve_control(component)
        card = EndpointAddress(self._namespace, component, CARD)
        await self._runtime.serve(card, self._serve_card, str, info=info.card)
        self._generate = EndpointAddress(self._namespace, component, GENERATE)
        if self.tiering is not None and self.tiering.peers is not None:
            self._peer_workers = PeerWorkers(self._runtime, self._generate, *self.tiering.peers)
            await self._peer_workers.start()
        self._open.block_size = info.block_size
        if isinstance(self.handoffs, EngineHandoffs):
            self._open.on_stages = self.handoffs.count
        intake = self._intake = RequestIntake(self._engine, info, self._open, self.handoffs, self.tiering)
        instance = await self._runtime.serve_streams(self._generate, intake.on_stream, info=info)
        self._instance = intake.instance = instance.id
        self._start_metrics(info, component, began_at)
        if self.tiering is not None:
            self.tiering.publish_changes()
            self._task_group.start(watch_pool(self.tiering.cache.host, self.update_registration), "pool")
        if self._peer_workers is not None:
            self._peer_workers.connect(instance.id)
        if isinstance(self._engine, Calibrated) and self._engine.latency is not None:
            self._task_group.start(self._register_latency(self._engine), "latency")
        log.info(
            "worker serving: model=%s role=%s engine=%s kv_tokens=%d start=%.1fs",
            info.model,
            info.role,
            info.engine,
            info.capacity.kv_total_blocks * info.block_size,
            self._runtime.ports.clock.monotonic() - began_at,
        )

    async def _start_tiers(self, info: EngineInfo) -> None:
        """Create the tiers before the worker registers, so that errors show at startup."""
        if self._create_tiering is None:
            return
        now, publish = self._clock.monotonic, self._publish_tier_changes
        try:
            create = partial(self._create_tiering, self._engine, info, now, publish)
            tiering = await self._runtime.ports.blocking.run(create, _CREATE_TIERS_S)
            await tiering.start()
        except BaseException:
            await self._engine.close()
            raise
        self.tiering = tiering

    def _start_metrics(self, info: EngineInfo, component: str, began_at: float) -> None:
        clock, metrics = self._clock, self.metrics
        journal = self.journal = KvJournal(
            self._runtime.ports.rng.getrandbits(63),
            self._instance,
            lambda payload: self._runtime.events.publish(KV_TOPIC, payload),
            self._options.kv_history_bytes,
        )
        started_at = clock.monotonic()
        metrics.labels = Labels(
            namespace=self._namespace,
            component=component,
            endpoint=GENERATE,
            instance=self._instance,
            model=info.model,
        )
        metrics.block_size = info.block_size
        metrics.engine_metrics = self._engine.metrics if isinstance(self._engine, MetricsProvider) else None
        metrics.alias_families = vllm_names if info.engine in WITH_VLLM_NAMES else None
        metrics.load_time_s = started_at - began_at
        metrics.uptime_s = lambda: clock.monotonic() - started_at
        metrics.num_open = lambda: len(self._open)
        metrics.step_age_s = lambda: self._progress.age_s
        metrics.kv_history_bytes = lambda: journal.num_bytes
        metrics.kv_event_counts = journal.counts
        for dp_rank in info.dp_ranks:
            load = WorkerLoad(kv_total_blocks=info.capacity.kv_total_blocks, dp_rank=dp_rank)
            self._loads[dp_rank] = (load, float("-inf"))
            metrics.on_load(load)

    async def run(self) -> None:
        """Deliver the engine's output to the streams until the engine is closed. Raises EngineDied if it dies."""
        try:
            async for step in self._engine.steps():
                self._deliver(step)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # any error of `steps` means that the engine is dead
            failure = self._engine_death(error)
            self._set_health(HealthState.UNHEALTHY, failure.message)
            self._end_requests(failure)
            raise failure from error
        finally:
            self._progress.close()
        self._end_requests(EngineDied("the engine was closed", engine=self._engine_name))

    def _end_requests(self, error: EngineDied) -> None:
        if self._intake is not None:
            self._intake.end_all(error)

    def _engine_death(self, error: Exception) -> EngineDied:
        """The error for requests. EngineFailed explains itself; anything else is logged with its traceback."""
        if isinstance(error, EngineFailed):
            log.error("engine died: %s", error.message)
            summary, *_ = error.message.split("\n")  # then the engine's output, which is in the log
            return EngineDied(f"the engine died: {summary}", engine=self._engine_name)
        log.exception("engine died")
        return EngineDied(f"the engine died ({type(error).__name__})", engine=self._engine_name)

    async def close(self) -> None:
        self._progress.close()
        if self._peer_workers is not None:
            await self._peer_workers.close()
        await self._task_group.close()
        if self._intake is not None:
            await self._intake.close()
        if self.handoffs is not None:
            await self.handoffs.close()
        if self.tiering is not None:
            await self.tiering.close()
        await self._engine.close()

    # --- step outputs

    def _deliver(self, step: StepOutput) -> None:
        now = self._clock.monotonic()
        self.metrics.on_tokens(self._open.deliver(step))
        self._progress.on_step(now, bool(self._open.num_submitted))
        dp_rank = 0
        if step.load is not None:
            dp_rank = step.load.dp_rank
            self._publish_load(step.load, now)
        if step.kv_changes and self.journal is not None:
            self.journal.record(step.kv_changes, dp_rank)
            if self.tiering is not None:
                self.tiering.on_engine_changes(step.kv_changes)

    def _publish_tier_changes(self, changes: tuple[KvChange, ...]) -> None:
        if self.journal is not None:
            self.journal.record(changes)

    def _publish_load(self, load: WorkerLoad, now: float) -> None:
        """Publish if the number of requests changed, otherwise at most ten times a second."""
        self.metrics.on_load(load)
        before, sent_at = self._loads.get(load.dp_rank, (WorkerLoad(), float("-inf")))
        changed = (load.running, load.waiting) != (before.running, before.waiting)
        if changed or now - sent_at >= _LOAD_INTERVAL_S:
            sent_at = now
            self._runtime.events.publish(LOAD_TOPIC, _encode(LoadReport(self._instance, load)))
        self._loads[load.dp_rank] = (load, sent_at)

    # --- health

    def _set_health(self, state: HealthState, reason: str = "") -> None:
        self._runtime.health.set("engine", state, reason)

    def _on_stuck(self, reason: str) -> None:
        log.error("engine stuck: %s", reason)
        self._set_health(HealthState.UNHEALTHY, reason)

    # --- registration and control

    @property
    def _engine_name(self) -> str:
        return self.info.engine if self.info is not None else "?"

    def _describe(self) -> dict[str, Any]:
        assert self.info is not None
        load = next((load for load, _ in self._loads.values()), WorkerLoad())
        return {
            "engine": self.info.engine,
            "model": self.info.model,
            "role": self.info.role.value,
            "open": len(self._open),
            "load": msgspec.to_builtins(load),
            "features": list(self.features),
            "asleep": self.operations.is_asleep,
        }

    async def _serve_card(self, requested: str) -> AsyncIterator[ModelCard]:
        card = served_card(self._engine, self._options.served)
        if requested not in ("", card_hash(card)):
            raise NotFound("this worker has another card", kind="card", name=requested)
        yield card

    def _serve_control(self, component: str) -> None:
        """Serve commands. Not registered in discovery, so that it also answers while the worker is cordoned."""
        endpoint = str(EndpointAddress(self._namespace, component, CONTROL))
        server = self._runtime.server
        server.register(
            endpoint, InstanceId(""), server.wrap_generator(self._control, msgpack_decoder(ControlRequest))
        )

    async def _control(
        self, request: ControlRequest
    ) -> AsyncIterator[CommandResult | KvRecoveryResponse | WithdrawResult]:
        if isinstance(request, Withdraw):
            intake = self._intake
            yield WithdrawResult(intake is not None and await intake.withdraw(request.request_id))
            return
        if isinstance(request, KvRecoveryRequest):
            for part in answer_recovery(self.journal, self.info, request):
                yield part
            return
        try:
            result = await self.operations.perform(request)
        finally:  # also if the caller was cancelled
            await self._register_loras()
        yield result

    async def _register_latency(self, engine: Calibrated) -> None:
        """Register the engine's latency model again when it differs from the registered one twice in a row."""
        has_differed = False
        while True:
            await asyncio.sleep(_LATENCY_INTERVAL_S)
            latency, registered = engine.latency, self.info.latency if self.info is not None else None
            differs = latency is not None and registered is not None and models_differ(latency, registered)
            if differs and has_differed:  # a single difference may be caused by a stall
                await self.update_registration(latency=latency, has_estimated_latency=False)
            has_differed = differs

    async def register_links(self, links: dict[str, MeasuredLink]) -> None:
        """Update the registration with the transfer speeds to this worker."""
        await self.update_registration(links=links)

    async def _register_loras(self) -> None:
        await self.update_registration(loras=adapter_names(self._engine, self.features))

    async def update_registration(self, **changed: Any) -> None:
        """Update the registration if anything changed. Serialized, so that the newest update is the last."""
        async with self._registration_lock:
            if self.info is None or self._generate is None:
                return
            info = msgspec.structs.replace(self.info, **changed)
            if info != self.info:
                await self._runtime.update_info(self._generate, info)
                self.info = info


def stats_of(workers: Sequence[Worker]) -> list[HandoffStats]:
    """Handoff statistics of the workers that take part in handoffs."""
    return [worker.handoffs.stats for worker in workers if worker.handoffs is not None]
