"""The worker shell: puts any engine behind an endpoint.

Owns the way from a stream to the engine and back, and what is told of it: load, KV events, metrics, health that
means progress. No task per request: an engine step answers all its streams in one go, and the request plane sends
them in one frame.
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
from kvolt.core.endpoints import CARD, CONTROL, GENERATE, KV_TOPIC, LOAD_TOPIC, component_name
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
from kvolt.core.kv_recovery import KvAnswer, KvQuestion
from kvolt.core.load import LoadReport, WorkerLoad
from kvolt.core.request import MEETING, Request
from kvolt.core.withdrawal import Withdraw, Withdrawn, withdrawn_error
from kvolt.engines.contract import Calibrated, Engine, KvPlaced, Measured, features_of
from kvolt.runtime.endpoint.address import EndpointAddress
from kvolt.runtime.endpoint.server import decoder
from kvolt.runtime.health import State
from kvolt.runtime.plane.port import IncomingStream
from kvolt.runtime.plane.steps import StepSender
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import Crew
from kvolt.scheduler.step_pace import differ
from kvolt.worker.control import ClearKv, ControlRequest, WorkerAnswer, loras_of, perform, recall
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
from kvolt.worker.onboarding import bring_back
from kvolt.worker.open_requests import OpenRequests
from kvolt.worker.peer_workers import PeerWorkers
from kvolt.worker.pool_event_publisher import tell_pool
from kvolt.worker.prefill_requests import as_expanded, hand_over, new_handoffs, without_moved
from kvolt.worker.progress import Progress
from kvolt.worker.tiering import NewTiering, Tiering
from kvolt.worker.vllm_metric_names import WITH_VLLM_NAMES

log = logging.getLogger(__name__)

_LOAD_INTERVAL_S = 0.1
_LATENCY_INTERVAL_S = 10.0
_TIERS_MADE_S = 600.0
"""Room for terabytes on a disk."""

_decode_request = msgspec.msgpack.Decoder(Request).decode
_encode = msgspec.msgpack.Encoder().encode


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may set about a worker, whatever its engine."""

    stuck_after_s: float = 30.0
    """With requests inside and no step for this long the engine is unhealthy; ten times as long before its first."""
    kv_history_bytes: int = HISTORY_BYTES
    """Recent KV events kept for who missed some."""
    taints: tuple[str, ...] = ()
    """Besides the engine's own: requests may demand or prefer them."""


class Worker:
    """One engine in one process. `start`, then `run` until the engine or the process ends."""

    def __init__(
        self,
        runtime: Runtime,
        engine: Engine,
        namespace: str,
        options: WorkerOptions | None = None,
        new_mover: Callable[[KvPlaced], KvMover] | None = None,
        new_tiering: NewTiering | None = None,
    ) -> None:
        """`new_mover`: how blocks come and go, for the roles that need it. `new_tiering`: where blocks are kept below
        the device."""
        self._runtime = runtime
        self._engine = engine
        self._namespace = namespace
        self._options = options or WorkerOptions()
        self._clock = runtime.ports.clock
        self._new_mover = new_mover
        self._new_tiering = new_tiering
        self._crew = Crew("worker")
        self._loads: dict[int, tuple[WorkerLoad, float]] = {}
        """Of each rank the latest, and when one was last published."""
        self._instance = InstanceId("")
        self._generate: EndpointAddress | None = None
        self._telling = asyncio.Lock()
        self._plain_ids: tuple[RequestId, ...] = ()
        self._plain = StepSender(())
        self._is_over = False
        """The engine has ended: what comes now would wait for steps that never come."""
        self._progress = Progress(
            self._clock, self._options.stuck_after_s, self._on_stuck, lambda: self._set_health(State.READY)
        )
        self.info: EngineInfo | None = None
        self.features: tuple[str, ...] = ()
        self.metrics = WorkerMetrics()
        """For the process's registry."""
        self._open = OpenRequests(self._clock.monotonic, self.metrics, self._progress)
        self.journal: KvJournal | None = None
        self.handoffs: Handoffs | EngineHandoffs | None = None
        self.tiering: Tiering | None = None
        self._neighbours: PeerWorkers | None = None

    async def start(self) -> None:
        """Start the engine, then register: who is registered can compute."""
        self._set_health(State.STARTING)
        began_at = self._clock.monotonic()
        info = await self._engine.start()
        self.features = info.features or features_of(self._engine)
        loras = info.loras or loras_of(self._engine, self.features)
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
        knows_blocks_before = "KvMovable" in self.features
        if isinstance(self.handoffs, Handoffs) and knows_blocks_before:
            info = msgspec.structs.replace(info, transfer_addresses={MEETING: self.handoffs.where})
            self.info = info
        await self._start_tiers(info)
        if self.tiering is not None:
            shares = self.tiering.peers is not None
            self.info = info = msgspec.structs.replace(info, has_tiers=True, shares_kv=shares)
        self._set_health(State.READY)
        self._runtime.add_details("engine", self._describe)
        self._serve_control(component)
        card = self._engine.card
        await self._runtime.serve(
            EndpointAddress(self._namespace, component, CARD), self._serve_card, str, info=card_hash(card)
        )
        self._generate = EndpointAddress(self._namespace, component, GENERATE)
        if self.tiering is not None and self.tiering.peers is not None:
            self._neighbours = PeerWorkers(self._runtime, self._generate, *self.tiering.peers)
            await self._neighbours.start()
        instance = await self._runtime.serve_streams(self._generate, self._on_stream, info=info)
        self._instance = instance.id
        self._measure(info, component, began_at)
        if self.tiering is not None:
            self.tiering.tell_changes()
            self._crew.start(tell_pool(self.tiering.cache.host, self.tell_anew), "pool")
        if self._neighbours is not None:
            self._neighbours.begin(instance.id)
        if isinstance(self._engine, Calibrated) and self._engine.latency is not None:
            self._crew.start(self._register_latency(self._engine), "latency")
        log.info("serving %s as %s with the %s engine", card.name, info.role, info.engine)

    async def _start_tiers(self, info: EngineInfo) -> None:
        """Before anybody is served: what is wrong with them is told at the start."""
        if self._new_tiering is None:
            return
        now, tell = self._clock.monotonic, self._tell_tiers
        try:
            make = partial(self._new_tiering, self._engine, info, now, tell)
            tiering = await self._runtime.ports.blocking.run(make, _TIERS_MADE_S)
            await tiering.start()
        except BaseException:
            await self._engine.close()
            raise
        self.tiering = tiering

    def _measure(self, info: EngineInfo, component: str, began_at: float) -> None:
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
        metrics.of_engine = self._engine.metrics if isinstance(self._engine, Measured) else None
        metrics.with_vllm_names = info.engine in WITH_VLLM_NAMES
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
        """Carry the engine's output to the streams, until the engine is closed. EngineDied when it dies."""
        try:
            async for step in self._engine.steps():
                self._deliver(step)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # whatever it was, the engine is gone
            failure = self._death(error)
            self._set_health(State.UNHEALTHY, failure.message)
            self._fail_all(failure)
            raise failure from error
        finally:
            self._progress.close()
        self._fail_all(EngineDied("the engine was closed", engine=self._engine_name))

    def _death(self, error: Exception) -> EngineDied:
        """An engine that knows what happened to it says so in words; anything else needs its traceback."""
        if isinstance(error, EngineFailed):
            log.error("the engine died: %s", error.message)
            first_line = error.message.partition("\n")[0]  # the rest is what it wrote: in the log now
            return EngineDied(f"the engine died: {first_line}", engine=self._engine_name)
        log.exception("the engine died")
        return EngineDied(f"the engine died ({type(error).__name__})", engine=self._engine_name)

    async def close(self) -> None:
        self._progress.close()
        if self._neighbours is not None:
            await self._neighbours.close()
        await self._crew.close()
        if self.handoffs is not None:
            await self.handoffs.close()
        if self.tiering is not None:
            await self.tiering.close()
        await self._engine.close()

    async def clear_kv_blocks(self) -> dict[str, int | None]:
        """Forget all cached blocks; how many. Unsupported when the engine has no such thing."""
        cleared = (await perform(self._engine, self.features, ClearKv())).cleared_blocks
        if self.tiering is not None:
            cleared = (cleared or 0) + self.tiering.clear()
        return {"cleared_blocks": cleared}

    # --- streams in

    def _on_stream(self, stream: IncomingStream) -> None:
        try:
            self._take(stream)
        except EngineFailed:
            self.metrics.on_end(FAILED, None)
            raise
        except KvoltError:
            self.metrics.on_end(REFUSED, None)
            raise

    def _take(self, stream: IncomingStream) -> None:
        request = as_expanded(stream.decode_body(_decode_request))
        request_id = request.request_id
        if self._is_over:  # nothing of it was begun: another worker can take it
            raise Unavailable("the worker's engine has ended", reason="no_engine")
        if self.info is None or request.model != self.info.model:
            raise NotFound(f"this worker does not serve {request.model!r}", kind="model", name=request.model)
        if request.lora and request.lora not in loras_of(self._engine, self.features):
            # Unloaded since the router heard of it: another worker may still have it.
            raise Unavailable(
                f"the adapter {request.lora!r} is not loaded at this worker", reason="no_adapter"
            )
        dp_rank = request.routing.pinned_dp_rank
        if dp_rank is not None and dp_rank not in self.info.dp_ranks:
            raise Unavailable(f"this worker has no data-parallel rank {dp_rank}", reason="no_rank")
        self._end_stale(request_id, stream)
        deadline_s = stream.deadline_s
        if deadline_s is not None:  # what is left of the call's time is the request's
            request = msgspec.structs.replace(request, deadline_s=deadline_s)
        if request.prefill_only and self.handoffs is None:
            raise Unsupported(f"a worker of the role {self.info.role} computes no prompts for others")
        work = self._before(request)
        if work is None:
            self._submit(request)
        entry = self._open.add(request, stream, self._on_deadline, work is None or request.prefill_only)
        if work is not None:
            entry.handing_over = self._crew.start(work, f"handoff {request_id}")
        stream.on_cancel = lambda error: self._drop(request_id)

    def _end_stale(self, request_id: RequestId, stream: IncomingStream) -> None:
        """End an older stream of the same request that its frontend has lost. Unavailable while that may be read.

        After a cut a frontend may resume its request here before this side has given the old connection up.
        """
        entry = self._open.get(request_id)
        if entry is None:
            return
        old, work = entry.stream, entry.handing_over
        is_stale = old.is_peer_silent and old.peer_host == stream.peer_host
        if not is_stale or (work is not None and not work.done()):
            raise Unavailable(f"request {request_id} is still running here", reason="id_in_use")
        old.on_cancel = None  # the end of its connection must not drop the new stream
        self._drop(request_id)
        self._plain_ids = ()  # the streams of the last batch include the old one
        old.end(Cancelled("the request goes on over another connection"))

    def _before(self, request: Request) -> Coroutine[Any, Any, None] | None:
        """What is done before the engine has a request, or in its place: KV that comes from others or from a tier, or
        goes to others. None for most."""
        work: Callable[[], Coroutine[Any, Any, None]] | None = None
        is_handed_over = request.handoff is not None or request.rendezvous is not None
        if self.handoffs is not None and (request.prefill_only or is_handed_over):
            work = partial(hand_over, self.handoffs, request, self._open, self._submit, self._instance)
        comes_in_parts = request.rendezvous is not None and not request.prefill_only
        if self.tiering is not None and not comes_in_parts and (keys := self.tiering.names_below(request)):
            return bring_back(self.tiering, request, keys, self._open, self._submit, work)
        return None if work is None else work()

    def _submit(self, request: Request) -> None:
        """An engine's bug with one request is that request's failure."""
        try:
            self._engine.submit(request)
        except KvoltError:
            raise
        except Exception as error:
            log.exception("the engine failed to take %s", request.request_id)
            self._abort(request.request_id)  # it may have got half of it
            message = f"the engine failed to take the request ({type(error).__name__})"
            raise EngineFailed(message, engine=self._engine_name) from error

    def _abort(self, request_id: RequestId) -> None:
        try:
            self._engine.abort(request_id)
        except Exception:  # the caller is gone either way
            log.exception("the engine failed to abort %s", request_id)

    def _drop(self, request_id: RequestId) -> None:
        if self._open.close(request_id, CANCELLED) is not None:
            self._abort(request_id)

    async def _withdraw(self, request_id: RequestId) -> bool:
        """Give a request back that has not begun, or let go of a prompt that nobody will fetch; whether it was so."""
        if request_id not in self._open:
            return self.handoffs is not None and self.handoffs.drop(request_id)
        waiting = self._open.get(request_id)
        is_elsewhere = (
            waiting is not None and not waiting.is_inside
        )  # its KV is on its way, and nothing has begun
        if not is_elsewhere and not await self._engine.withdraw(request_id):
            return False
        entry = self._open.close(request_id, WITHDRAWN)
        if entry is not None:
            entry.stream.end(withdrawn_error())
        return True

    def _on_deadline(self, request_id: RequestId, after_s: float) -> None:
        entry = self._open.close(request_id, DEADLINE)
        if entry is not None:
            self._abort(request_id)
            entry.stream.end(DeadlineExceeded("the request's time is over", stage="total", after_s=after_s))

    # --- steps out

    def _deliver(self, step: StepOutput) -> None:
        now = self._clock.monotonic()
        num_tokens = len(step.plain_tokens)
        if step.plain_ids:
            if step.plain_ids is not self._plain_ids:
                self._plain_ids = step.plain_ids
                self._plain = StepSender([self._open.stream_of(each) for each in step.plain_ids])
            self._plain.send(step.plain_tokens)
        for request_id, made in step.deltas:
            num_tokens += len(made.token_ids)
            entry = self._open.get(request_id)
            if entry is None:
                continue  # its caller has gone meanwhile
            delta = made
            if entry.moved_blocks and self.info is not None:
                delta = without_moved(made, entry.moved_blocks * self.info.block_size)
            if entry.stages is None:
                entry.stream.send(delta)
                if delta.stages is not None and isinstance(self.handoffs, EngineHandoffs):
                    self.handoffs.count(delta.stages)
            else:
                entry.stream.send(msgspec.structs.replace(delta, stages=entry.stages))
                entry.stages = None
            if delta.cached_tokens is not None and not delta.index:
                self._open.prompt_done(entry, delta.cached_tokens)
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
        self._progress.step(now, bool(self._open.num_inside))
        dp_rank = 0
        if step.load is not None:
            dp_rank = step.load.dp_rank
            self._report(step.load, now)
        if step.kv_changes and self.journal is not None:
            self.journal.record(step.kv_changes, dp_rank)
            if self.tiering is not None:
                self.tiering.saw(step.kv_changes)

    def _tell_tiers(self, changes: tuple[KvChange, ...]) -> None:
        if self.journal is not None:
            self.journal.record(changes)

    def _report(self, load: WorkerLoad, now: float) -> None:
        """Publish when membership changed, and else at most ten times a second."""
        self.metrics.on_load(load)
        before, sent_at = self._loads.get(load.dp_rank, (WorkerLoad(), float("-inf")))
        changed = (load.running, load.waiting) != (before.running, before.waiting)
        if changed or now - sent_at >= _LOAD_INTERVAL_S:
            sent_at = now
            self._runtime.events.publish(LOAD_TOPIC, _encode(LoadReport(self._instance, load)))
        self._loads[load.dp_rank] = (load, sent_at)

    def _fail_all(self, error: EngineDied) -> None:
        self._is_over = True
        for request_id in self._open:
            entry = self._open.close(request_id, FAILED)
            if entry is not None:
                entry.stream.end(error)

    # --- health

    def _set_health(self, state: State, reason: str = "") -> None:
        self._runtime.health.set("engine", state, reason)

    def _on_stuck(self, reason: str) -> None:
        log.error("the engine is stuck: %s", reason)
        self._set_health(State.UNHEALTHY, reason)

    # --- about us

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

    async def _serve_card(self, wanted: str) -> AsyncIterator[ModelCard]:
        card = self._engine.card
        if wanted not in ("", card_hash(card)):
            raise NotFound("this worker has another card", kind="card", name=wanted)
        yield card

    def _serve_control(self, component: str) -> None:
        """Not registered: it must answer while the worker is cordoned, too."""
        endpoint = str(EndpointAddress(self._namespace, component, CONTROL))
        server = self._runtime.server
        server.add(endpoint, InstanceId(""), server.generator(self._control, decoder(ControlRequest)))

    async def _control(self, request: ControlRequest) -> AsyncIterator[WorkerAnswer | KvAnswer | Withdrawn]:
        if isinstance(request, Withdraw):
            yield Withdrawn(await self._withdraw(request.request_id))
            return
        if isinstance(request, KvQuestion):
            for part in recall(self.journal, self.info, request):
                yield part
            return
        try:
            answer = await perform(self._engine, self.features, request)
            if isinstance(request, ClearKv) and self.tiering is not None:
                num_cleared = (answer.cleared_blocks or 0) + self.tiering.clear()
                answer = msgspec.structs.replace(answer, cleared_blocks=num_cleared)
        finally:  # also when who asked has gone meanwhile
            await self._tell_loras()
        yield answer

    async def _register_latency(self, engine: Calibrated) -> None:
        """Register the engine's step model again when its steps have moved it for a while, until this is cancelled."""
        differed = False
        while True:
            await asyncio.sleep(_LATENCY_INTERVAL_S)
            latency, registered = engine.latency, self.info.latency if self.info is not None else None
            differs = latency is not None and registered is not None and differ(latency, registered)
            if differs and differed:  # one look may fall into a stall
                await self.tell_anew(latency=latency)
            differed = differs

    async def tell_links(self, links: dict[str, Link]) -> None:
        """Register anew with the speeds at which KV comes here."""
        await self.tell_anew(links=links)

    async def _tell_loras(self) -> None:
        await self.tell_anew(loras=loras_of(self._engine, self.features))

    async def tell_anew(self, **changed: Any) -> None:
        """Register anew if that is other than before. One at a time: the last word must be the newest."""
        async with self._telling:
            if self.info is None or self._generate is None:
                return
            info = msgspec.structs.replace(self.info, **changed)
            if info != self.info:
                await self._runtime.update_info(self._generate, info)
                self.info = info


def stats_of(workers: Sequence[Worker]) -> list[HandoffStats]:
    """Of those that take part in handoffs."""
    return [worker.handoffs.stats for worker in workers if worker.handoffs is not None]
