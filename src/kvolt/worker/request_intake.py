"""RequestIntake: takes requests from streams to the engine, and ends them early: cancelled, withdrawn, past their
deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import msgspec

from kvolt.core.card import EngineInfo
from kvolt.core.endpoints import withdrawn_error
from kvolt.core.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineDied,
    EngineFailed,
    KvoltError,
    NotFound,
    Unavailable,
    Unsupported,
)
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Request
from kvolt.engines.contract import Engine, check_sampling_fields
from kvolt.runtime.plane.port import IncomingStream
from kvolt.runtime.tasks import TaskGroup
from kvolt.worker.control import adapter_names
from kvolt.worker.kv.handoffs import EngineHandoffs, Handoffs
from kvolt.worker.kv.tiering import Tiering
from kvolt.worker.metrics import CANCELLED, DEADLINE, FAILED, REFUSED, WITHDRAWN
from kvolt.worker.open_requests import OpenRequests
from kvolt.worker.preparation import Work, onboard_then_submit, run_handoff, with_expanded_prompt

log = logging.getLogger(__name__)

_decode_request = msgspec.msgpack.Decoder(Request).decode


class RequestIntake:
    """See the module."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        requests: OpenRequests,
        handoffs: Handoffs | EngineHandoffs | None,
        tiering: Tiering | None,
    ) -> None:
        self._engine = engine
        self._info = info
        self._open = requests
        self._handoffs = handoffs
        self._tiering = tiering
        self._task_group = TaskGroup("requests")
        self.instance = InstanceId("")
        """Id of the worker; set when it is registered."""
        self._has_engine_ended = False
        """No more steps come; new requests are refused."""

    async def close(self) -> None:
        await self._task_group.close()

    def on_stream(self, stream: IncomingStream) -> None:
        try:
            self._accept(stream)
        except EngineFailed:
            self._open.metrics.on_end(FAILED, None)
            raise
        except KvoltError:
            self._open.metrics.on_end(REFUSED, None)
            raise

    def end_all(self, error: EngineDied) -> None:
        """The engine has ended: end all requests and refuse new ones."""
        self._has_engine_ended = True
        for request_id in self._open:
            self._end(request_id, FAILED, error)

    async def withdraw(self, request_id: RequestId) -> bool:
        """End a request that has not started, or release a prompt held for a handoff. Returns whether it did."""
        waiting = self._open.get(request_id)
        if waiting is None:
            return self._handoffs is not None and self._handoffs.drop(request_id)
        # A request that is not submitted waits for its KV.
        if waiting.is_submitted and not await self._engine.withdraw(request_id):
            return False
        self._end(request_id, WITHDRAWN, withdrawn_error())
        return True

    def _end(self, request_id: RequestId, outcome: str, error: KvoltError) -> bool:
        """End the stream of a request with an error; False if it is closed already."""
        entry = self._open.close(request_id, outcome)
        if entry is not None:
            entry.stream.end(error)
        return entry is not None

    def _accept(self, stream: IncomingStream) -> None:
        request = with_expanded_prompt(stream.decode_body(_decode_request))
        request_id, info = request.request_id, self._info
        if self._has_engine_ended:  # the request has not started: another worker can take it
            raise Unavailable("the worker's engine has ended", reason="no_engine")
        if request.model != info.model:
            raise NotFound(f"this worker does not serve {request.model!r}", kind="model", name=request.model)
        if request.lora and request.lora not in adapter_names(self._engine, info.features):
            # Unloaded since the router chose this worker; another worker may have it.
            raise Unavailable(
                f"the adapter {request.lora!r} is not loaded on this worker", reason="no_adapter"
            )
        check_sampling_fields(request.sampling, self._engine.sampling_fields, info.engine)
        dp_rank = request.routing.pinned_dp_rank
        if dp_rank is not None and dp_rank not in info.dp_ranks:
            raise Unavailable(f"this worker has no data-parallel rank {dp_rank}", reason="no_rank")
        self._end_stale(request_id, stream)
        deadline_s = stream.deadline_s
        if deadline_s is not None:  # the request has the rest of the call's time
            request = msgspec.structs.replace(request, deadline_s=deadline_s)
        if request.prefill_only and self._handoffs is None:
            raise Unsupported(f"a worker with role {info.role} does not serve remote prefill")
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
        self._open.forget_streams()  # those of the last batch include the old one
        old.end(Cancelled("the request continues on another connection"))

    def _prepare(self, request: Request) -> Work | None:
        """Work before the engine gets the request, or instead: handoffs and onboarding. None for most requests."""
        work: Callable[[], Work] | None = None
        is_handoff = request.handoff is not None or request.rendezvous is not None
        if self._handoffs is not None and (request.prefill_only or is_handoff):
            work = partial(run_handoff, self._handoffs, request, self._open, self._submit, self.instance)
        is_decode_first = request.rendezvous is not None and not request.prefill_only
        if (
            self._tiering is not None
            and not is_decode_first
            and (keys := self._tiering.find_offloaded(request))
        ):
            return onboard_then_submit(self._tiering, request, keys, self._open, self._submit, work)
        return None if work is None else work()

    def _submit(self, request: Request) -> None:
        """Submit to the engine. An unexpected error fails this request only."""
        try:
            self._engine.submit(request)
        except KvoltError:
            raise
        except Exception as error:
            log.exception("engine submit failed: request_id=%s", request.request_id)
            self._abort(request.request_id)  # the engine may hold parts of it
            message = f"the engine failed to accept the request ({type(error).__name__})"
            raise EngineFailed(message, engine=self._info.engine) from error

    def _abort(self, request_id: RequestId) -> None:
        try:
            self._engine.abort(request_id)
        except Exception:  # the request is over either way
            log.exception("engine abort failed: request_id=%s", request_id)

    def _cancel(self, request_id: RequestId) -> None:
        if self._open.close(request_id, CANCELLED) is not None:
            self._abort(request_id)

    def _on_deadline(self, request_id: RequestId, after_s: float) -> None:
        late = DeadlineExceeded("the request's deadline has passed", stage="total", after_s=after_s)
        if self._end(request_id, DEADLINE, late):
            self._abort(request_id)
