"""The worker shell: puts any engine behind an endpoint.

Owns the way from a stream to the engine and back. No task per request: an engine step answers all its
streams in one go, and the request plane sends them in one frame.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from kvolt.core.card import EngineInfo, ModelCard, card_hash
from kvolt.core.delta import StepOutput
from kvolt.core.errors import DeadlineExceeded, EngineFailed, InvalidRequest, NotFound, from_info
from kvolt.core.ids import RequestId
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request
from kvolt.engines.contract import Engine
from kvolt.engines.endpoints import CARD, GENERATE, LOAD_TOPIC, component_name
from kvolt.runtime.address import EndpointAddress
from kvolt.runtime.health import State
from kvolt.runtime.plane import IncomingStream
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.steps import StepSender

log = logging.getLogger(__name__)

_LOAD_INTERVAL_S = 0.1

_decode_request = msgspec.msgpack.Decoder(Request).decode
_encode = msgspec.msgpack.Encoder().encode


class LoadReport(msgspec.Struct, frozen=True):
    """What a worker publishes under LOAD_TOPIC."""

    instance: str
    load: WorkerLoad


@dataclass(slots=True)
class _Open:
    stream: IncomingStream
    num_choices_left: int
    deadline: asyncio.TimerHandle | None = None


class Worker:
    """One engine in one process. `start`, then `run` until the engine or the process ends."""

    def __init__(self, runtime: Runtime, engine: Engine, namespace: str) -> None:
        self._runtime = runtime
        self._engine = engine
        self._namespace = namespace
        self._open: dict[RequestId, _Open] = {}
        self._load = WorkerLoad()
        self._load_sent_at = float("-inf")
        self._instance = ""
        self._plain_ids: tuple[RequestId, ...] = ()
        self._plain = StepSender(())
        self._over: EngineFailed | None = None
        """The engine has ended: what comes now would wait for steps that never come."""
        self.info: EngineInfo | None = None

    async def start(self) -> None:
        """Start the engine, then register: who is registered can compute."""
        self._runtime.health.set("engine", State.STARTING)
        self.info = await self._engine.start()
        component = component_name(self.info.model, self.info.role, self.info.card)
        self._load = WorkerLoad(kv_total_blocks=self.info.capacity.kv_total_blocks)
        self._runtime.health.set("engine", State.READY)
        self._runtime.add_details("engine", self._describe)
        card = self._engine.card
        await self._runtime.serve(
            EndpointAddress(self._namespace, component, CARD), self._serve_card, str, info=card_hash(card)
        )
        instance = await self._runtime.serve_streams(
            EndpointAddress(self._namespace, component, GENERATE), self._on_stream, info=self.info
        )
        self._instance = instance.id
        log.info("serving %s as %s with the %s engine", card.name, self.info.role, self.info.engine)

    async def run(self) -> None:
        """Carry the engine's output to the streams, until the engine is closed. EngineFailed when it dies."""
        try:
            async for step in self._engine.steps():
                self._deliver(step)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # whatever it was, the engine is gone
            log.exception("the engine died")
            failure = EngineFailed(f"the engine died ({type(error).__name__})", engine=self._engine_name)
            self._runtime.health.set("engine", State.UNHEALTHY, failure.message)
            self._fail_all(failure)
            raise failure from error
        self._fail_all(EngineFailed("the engine was closed", engine=self._engine_name))

    async def close(self) -> None:
        await self._engine.close()

    # --- streams in

    def _on_stream(self, stream: IncomingStream) -> None:
        request: Request = stream.decode_body(_decode_request)
        request_id = request.request_id
        if self._over is not None:
            raise EngineFailed(self._over.message, engine=self._engine_name)
        if self.info is None or request.model != self.info.model:
            raise NotFound(f"this worker does not serve {request.model!r}", kind="model", name=request.model)
        if request_id in self._open:
            raise InvalidRequest(f"request {request_id} is running here already", param="request_id")
        if stream.deadline_s is not None:  # what is left of the call's time is the request's
            request = msgspec.structs.replace(request, deadline_s=stream.deadline_s)
        self._engine.submit(request)
        entry = self._open[request_id] = _Open(stream, request.sampling.num_choices)
        stream.on_cancel = lambda error: self._drop(request_id)
        if stream.deadline_s is not None:
            loop = asyncio.get_running_loop()
            entry.deadline = loop.call_later(
                stream.deadline_s, self._on_deadline, request_id, stream.deadline_s
            )

    def _drop(self, request_id: RequestId) -> None:
        if self._close(request_id) is not None:
            self._engine.abort(request_id)

    def _on_deadline(self, request_id: RequestId, after_s: float) -> None:
        entry = self._close(request_id)
        if entry is not None:
            self._engine.abort(request_id)
            entry.stream.end(DeadlineExceeded("the request's time is over", stage="total", after_s=after_s))

    def _close(self, request_id: RequestId) -> _Open | None:
        entry = self._open.pop(request_id, None)
        if entry is not None and entry.deadline is not None:
            entry.deadline.cancel()
        return entry

    # --- steps out

    def _deliver(self, step: StepOutput) -> None:
        if step.plain_ids:
            if step.plain_ids is not self._plain_ids:
                self._plain_ids = step.plain_ids
                self._plain = StepSender([self._stream_of(request_id) for request_id in step.plain_ids])
            self._plain.send(step.plain_tokens)
        for request_id, delta in step.deltas:
            entry = self._open.get(request_id)
            if entry is None:
                continue  # its caller has gone meanwhile
            entry.stream.send(delta)
            if delta.finish is not None:
                entry.num_choices_left -= 1
                if entry.num_choices_left == 0:
                    self._close(request_id)
                    entry.stream.end()
        for request_id, failure in step.failed:
            entry = self._close(request_id)
            if entry is not None:
                entry.stream.end(from_info(failure))
        if step.load is not None:
            self._report(step.load)

    def _stream_of(self, request_id: RequestId) -> IncomingStream | None:
        entry = self._open.get(request_id)
        return entry.stream if entry is not None else None

    def _report(self, load: WorkerLoad) -> None:
        """Publish when membership changed, and else at most ten times a second."""
        changed = (load.running, load.waiting) != (self._load.running, self._load.waiting)
        self._load = load
        now = self._runtime.ports.clock.monotonic()
        if changed or now - self._load_sent_at >= _LOAD_INTERVAL_S:
            self._load_sent_at = now
            self._runtime.events.publish(LOAD_TOPIC, _encode(LoadReport(self._instance, load)))

    def _fail_all(self, error: EngineFailed) -> None:
        self._over = error
        for request_id in list(self._open):
            entry = self._close(request_id)
            if entry is not None:
                entry.stream.end(error)

    # --- about us

    @property
    def _engine_name(self) -> str:
        return self.info.engine if self.info is not None else "?"

    def _describe(self) -> dict[str, Any]:
        assert self.info is not None
        return {
            "engine": self.info.engine,
            "model": self.info.model,
            "role": self.info.role.value,
            "open": len(self._open),
            "load": msgspec.to_builtins(self._load),
        }

    async def _serve_card(self, wanted: str) -> AsyncIterator[ModelCard]:
        card = self._engine.card
        if wanted not in ("", card_hash(card)):
            raise NotFound("this worker has another card", kind="card", name=wanted)
        yield card
