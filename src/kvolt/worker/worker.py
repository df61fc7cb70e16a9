"""Worker: serves an engine behind an endpoint.

Passes requests from streams to the engine and step outputs back, and publishes load, KV events, metrics and health
(progress of the engine). There is no task per request: a step output goes to all its streams at once, and the request
plane sends it in one frame per peer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec

from kvolt.core.card import EngineInfo, Link, ModelCard, card_hash
from kvolt.core.delta import StepOutput
from kvolt.core.endpoints import (
    CARD,
    CONTROL,
    GENERATE,
    KV_TOPIC,
    LOAD_TOPIC,
    Withdraw,
    WithdrawResult,
    component_name,
    withdrawn_error,
)
from kvolt.core.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineDied,
    EngineFailed,
    KvoltError,
    NotFound,
    Unavailable,
    Unsupported,
    from_info,
)
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.kv_events import KvChange
from kvolt.core.kv_recovery import KvRecoveryRequest, KvRecoveryResponse
from kvolt.core.load import LoadReport, WorkerLoad
from kvolt.core.request import RENDEZVOUS_ADDRESS_KEY, Request
from kvolt.engines.contract import (
    Calibrated,
    Engine,
    KvAddressable,
    MetricsProvider,
    check_sampling_fields,
    features_of,
)
from kvolt.runtime.endpoint.address import EndpointAddress
from kvolt.runtime.endpoint.server import msgpack_decoder
from kvolt.runtime.health import State
from kvolt.runtime.plane.port import IncomingStream
from kvolt.runtime.plane.steps import StepSender
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import TaskGroup
from kvolt.scheduler.step_pace import models_differ
from kvolt.worker.control import ClearKv, CommandResult, ControlRequest, adapter_names, kv_recovery, perform
from kvolt.worker.engine_handoffs import EngineHandoffs
from kvolt.worker.handoffs import Handoffs, HandoffStats
from kvolt.worker.kv_compatibility import check_peers, with_slabs
from kvolt.worker.kv_event_publisher import HISTORY_BYTES, KvJournal
from kvolt.worker.kv_moving import KvMover
from kvolt.worker.metrics import (
    CANCELLED,
    DEADLINE,
    FAILED,
    FINISHED,
    REFUSED,
    WITHDRAWN,
    Labels,
    WorkerMetrics,
)
from kvolt.worker.onboarding import onboard_then_submit
from kvolt.worker.open_requests import OpenRequests
from kvolt.worker.peer_workers import PeerWorkers
from kvolt.worker.pool_event_publisher import watch_pool
from kvolt.worker.prefill_requests import new_handoffs, run_handoff, with_expanded_prompt, without_transferred
from kvolt.worker.progress import Progress
from kvolt.worker.tiering import Tiering, TieringFactory
from kvolt.worker.vllm_metric_names import WITH_VLLM_NAMES, vllm_names

log = logging.getLogger(__name__)

_LOAD_INTERVAL_S = 0.1
_LATENCY_INTERVAL_S = 10.0
_CREATE_TIERS_S = 600.0
"""Time to create the tiers; allocating terabytes on a disk takes minutes."""

_decode_request = msgspec.msgpack.Decoder(Request).decode
_encode = msgspec.msgpack.Encoder().encode


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a worker, independent of its engine."""

    stuck_after_s: float = 30.0
    """The engine is unhealthy after this long with requests and no step; ten times as long before its first step."""
    kv_history_bytes: int = HISTORY_BYTES
    """Recent KV events kept for routers that missed some."""
    taints: tuple[str, ...] = ()
    """Taints in addition to the engine's; requests may require or prefer them."""


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
        self._plain_ids: tuple[RequestId, ...] = ()
        self._plain = StepSender(())
        self._has_engine_ended = False
        """No more steps come; new requests are refused."""
        self._progress = Progress(
            self._clock, self._options.stuck_after_s, self._on_stuck, lambda: self._set_health(State.READY)
        )
        self.info: EngineInfo | None = None
        self.features: tuple[str, ...] = ()
        self.metrics = WorkerMetrics()
        """Collector for the process's registry."""
        self._open = OpenRequests(self._clock.monotonic, self.metrics, self._progress)
        self.journal: KvJournal | None = None
        self.handoffs: Handoffs | EngineHandoffs | None = None
        self.tiering: Tiering | None = None
        self._peer_workers: PeerWorkers | None = None

    async def start(self) -> None:
        """Start the engine, then register: a registered worker can compute."""
        self._set_health(State.STARTING)
        began_at = self._clock.monotonic()
        info = await self._engine.start()
        self.features = info.features or features_of(self._engine)
        loras = info.loras or adapter_names(self._engine, self.features)
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
        self._set_health(State.READY)
        self._runtime.add_status_details("engine", self._describe)
        self._serve_control(component)
        card = self._engine.card
        await self._runtime.serve(
            EndpointAddress(self._namespace, component, CARD), self._serve_card, str, info=card_hash(card)
        )
        self._generate = EndpointAddress(self._namespace, component, GENERATE)
        if self.tiering is not None and self.tiering.peers is not None:
            self._peer_workers = PeerWorkers(self._runtime, self._generate, *self.tiering.peers)
            await self._peer_workers.start()
        instance = await self._runtime.serve_streams(self._generate, self._on_stream, info=info)
        self._instance = instance.id
        self._start_metrics(info, component, began_at)
        if self.tiering is not None:
            self.tiering.publish_changes()
            self._task_group.start(watch_pool(self.tiering.cache.host, self.update_registration), "pool")
        if self._peer_workers is not None:
            self._peer_workers.connect(instance.id)
        if isinstance(self._engine, Calibrated) and self._engine.latency is not None:
            self._task_group.start(self._register_latency(self._engine), "latency")
        log.info("worker serving: model=%s role=%s engine=%s", card.name, info.role, info.engine)

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
            self._set_health(State.UNHEALTHY, failure.message)
            self._fail_all(failure)
            raise failure from error
        finally:
            self._progress.close()
        self._fail_all(EngineDied("the engine was closed", engine=self._engine_name))

    def _engine_death(self, error: Exception) -> EngineDied:
        """The error for requests. EngineFailed explains itself; anything else is logged with its traceback."""
        if isinstance(error, EngineFailed):
            log.error("engine died: %s", error.message)
            first_line = error.message.partition("\n")[
                0
            ]  # the rest is the engine's output, which is in the log
            return EngineDied(f"the engine died: {first_line}", engine=self._engine_name)
        log.exception("engine died")
        return EngineDied(f"the engine died ({type(error).__name__})", engine=self._engine_name)

    async def close(self) -> None:
        self._progress.close()
        if self._peer_workers is not None:
            await self._peer_workers.close()
        await self._task_group.close()
        if self.handoffs is not None:
            await self.handoffs.close()
        if self.tiering is not None:
            await self.tiering.close()
        await self._engine.close()

    async def clear_kv_blocks(self) -> dict[str, int | None]:
        """Drop all cached blocks and return their number. Unsupported if the engine cannot."""
        cleared = (await perform(self._engine, self.features, ClearKv())).cleared_blocks
        if self.tiering is not None:
            cleared = (cleared or 0) + self.tiering.clear()
        return {"cleared_blocks": cleared}

    # --- requests

    def _on_stream(self, stream: IncomingStream) -> None:
        try:
            self._accept(stream)
        except EngineFailed:
            self.metrics.on_end(FAILED, None)
            raise
        except KvoltError:
            self.metrics.on_end(REFUSED, None)
            raise

    def _accept(self, stream: IncomingStream) -> None:
        request = with_expanded_prompt(stream.decode_body(_decode_request))
        request_id = request.request_id
        if self._has_engine_ended:  # the request has not started: another worker can take it
            raise Unavailable("the worker's engine has ended", reason="no_engine")
        if self.info is None or request.model != self.info.model:
            raise NotFound(f"this worker does not serve {request.model!r}", kind="model", name=request.model)
        if request.lora and request.lora not in adapter_names(self._engine, self.features):
            # Unloaded since the router chose this worker; another worker may have it.
            raise Unavailable(
                f"the adapter {request.lora!r} is not loaded on this worker", reason="no_adapter"
            )
        check_sampling_fields(request.sampling, self._engine.sampling_fields, self._engine_name)
        dp_rank = request.routing.pinned_dp_rank
        if dp_rank is not None and dp_rank not in self.info.dp_ranks:
            raise Unavailable(f"this worker has no data-parallel rank {dp_rank}", reason="no_rank")
        self._end_stale(request_id, stream)
        deadline_s = stream.deadline_s
        if deadline_s is not None:  # the request has the rest of the call's time
            request = msgspec.structs.replace(request, deadline_s=deadline_s)
        if request.prefill_only and self.handoffs is None:
            raise Unsupported(f"a worker with role {self.info.role} does not serve remote prefill")
        work = self._prepare(request)
        if work is None:
            self._submit(request)
        entry = self._open.add(request, stream, self._on_deadline, work is None or request.prefill_only)
        if work is not None:
            entry.preparation = self._task_group.start(work, f"handoff {request_id}")
        stream.on_cancel = lambda error: self._cancel(request_id)

    def _end_stale(self, request_id: RequestId, stream: IncomingStream) -> None:
        """End an older stream of the same request whose connection is dead. Unavailable if that stream may be alive.

        After a network cut a frontend may send its request again before this side has closed the old connection.
        """
        entry = self._open.get(request_id)
        if entry is None:
            return
        old, work = entry.stream, entry.preparation
        is_stale = old.is_peer_silent and old.peer_host == stream.peer_host
        if not is_stale or (work is not None and not work.done()):
            raise Unavailable(f"request {request_id} is still running on this worker", reason="id_in_use")
        old.on_cancel = None  # the end of its connection must not drop the new stream
        self._cancel(request_id)
        self._plain_ids = ()  # the streams of the last batch include the old one
        old.end(Cancelled("the request continues on another connection"))

    def _prepare(self, request: Request) -> Coroutine[Any, Any, None] | None:
        """Work before the engine gets the request, or instead: handoffs and onboarding. None for most requests."""
        work: Callable[[], Coroutine[Any, Any, None]] | None = None
        is_handoff = request.handoff is not None or request.rendezvous is not None
        if self.handoffs is not None and (request.prefill_only or is_handoff):
            work = partial(run_handoff, self.handoffs, request, self._open, self._submit, self._instance)
        is_decode_first = request.rendezvous is not None and not request.prefill_only
        if (
            self.tiering is not None
            and not is_decode_first
            and (keys := self.tiering.find_offloaded(request))
        ):
            return onboard_then_submit(self.tiering, request, keys, self._open, self._submit, work)
        return None if work is None else work()

    def _submit(self, request: Request) -> None:
        """Submit to the engine. An unexpected error fails this request only."""
        try:
            self._engine.submit(request)
        except KvoltError:
            raise
        except Exception as error:
            log.exception("engine submit failed: request=%s", request.request_id)
            self._abort(request.request_id)  # the engine may hold parts of it
            message = f"the engine failed to accept the request ({type(error).__name__})"
            raise EngineFailed(message, engine=self._engine_name) from error

    def _abort(self, request_id: RequestId) -> None:
        try:
            self._engine.abort(request_id)
        except Exception:  # the request is over either way
            log.exception("engine abort failed: request=%s", request_id)

    def _cancel(self, request_id: RequestId) -> None:
        if self._open.close(request_id, CANCELLED) is not None:
            self._abort(request_id)

    async def _withdraw(self, request_id: RequestId) -> bool:
        """End a request that has not started, or release a prompt held for a handoff. Returns whether it did."""
        if request_id not in self._open:
            return self.handoffs is not None and self.handoffs.drop(request_id)
        waiting = self._open.get(request_id)
        is_preparing = waiting is not None and not waiting.is_submitted  # waits for its KV
        if not is_preparing and not await self._engine.withdraw(request_id):
            return False
        entry = self._open.close(request_id, WITHDRAWN)
        if entry is not None:
            entry.stream.end(withdrawn_error())
        return True

    def _on_deadline(self, request_id: RequestId, after_s: float) -> None:
        entry = self._open.close(request_id, DEADLINE)
        if entry is not None:
            self._abort(request_id)
            entry.stream.end(
                DeadlineExceeded("the request's deadline has passed", stage="total", after_s=after_s)
            )

    # --- step outputs

    def _deliver(self, step: StepOutput) -> None:
        now = self._clock.monotonic()
        num_tokens = len(step.plain_tokens)
        if step.plain_ids:
            if step.plain_ids is not self._plain_ids:
                self._plain_ids = step.plain_ids
                self._plain = StepSender([self._open.stream_of(each) for each in step.plain_ids])
            self._plain.send(step.plain_tokens)
        for request_id, engine_delta in step.deltas:
            num_tokens += len(engine_delta.token_ids)
            entry = self._open.get(request_id)
            if entry is None:
                continue  # closed since the step began
            delta = engine_delta
            if entry.transferred_blocks and self.info is not None:
                delta = without_transferred(delta, entry.transferred_blocks * self.info.block_size)
            if entry.stages is None:
                entry.stream.send(delta)
                if delta.stages is not None and isinstance(self.handoffs, EngineHandoffs):
                    self.handoffs.count(delta.stages)
            else:
                entry.stream.send(msgspec.structs.replace(delta, stages=entry.stages))
                entry.stages = None
            if delta.cached_tokens is not None and not delta.index:
                self._open.on_first_token(entry, delta.cached_tokens)
            if delta.finish is not None:
                entry.num_choices_left -= 1
                if entry.num_choices_left == 0:
                    self._open.close(request_id, FINISHED)
                    self.metrics.finish_counts[delta.finish] += 1
                    entry.stream.end()
        for request_id, failure in step.failed:
            entry = self._open.close(request_id, FAILED)
            if entry is not None:
                entry.stream.end(from_info(failure))
        self.metrics.on_tokens(num_tokens)
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

    def _fail_all(self, error: EngineDied) -> None:
        self._has_engine_ended = True
        for request_id in self._open:
            entry = self._open.close(request_id, FAILED)
            if entry is not None:
                entry.stream.end(error)

    # --- health

    def _set_health(self, state: State, reason: str = "") -> None:
        self._runtime.health.set("engine", state, reason)

    def _on_stuck(self, reason: str) -> None:
        log.error("engine stuck: %s", reason)
        self._set_health(State.UNHEALTHY, reason)

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
        }

    async def _serve_card(self, requested: str) -> AsyncIterator[ModelCard]:
        card = self._engine.card
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
            yield WithdrawResult(await self._withdraw(request.request_id))
            return
        if isinstance(request, KvRecoveryRequest):
            for part in kv_recovery(self.journal, self.info, request):
                yield part
            return
        try:
            result = await perform(self._engine, self.features, request)
            if isinstance(request, ClearKv) and self.tiering is not None:
                num_cleared = (result.cleared_blocks or 0) + self.tiering.clear()
                result = msgspec.structs.replace(result, cleared_blocks=num_cleared)
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
                await self.update_registration(latency=latency)
            has_differed = differs

    async def register_links(self, links: dict[str, Link]) -> None:
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
