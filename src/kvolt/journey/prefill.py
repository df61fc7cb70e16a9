"""Calls to workers: the request and its deadlines after a routing decision, remote prefill, and withdrawal.

A remote prefill is one call to a prefill worker, which returns a handoff, including its reservation. Retries and
fallbacks are decided by the state machine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvolt.core.delta import Delta, StageTimes
from kvolt.core.endpoints import CONTROL, EndpointAddress, Instance, Withdraw, WithdrawResult
from kvolt.core.errors import Cancelled, DeadlineExceeded, KvoltError, ProtocolError
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, LinkCosts, Rendezvous, Request
from kvolt.journey.links import with_link_costs
from kvolt.router.breaker import Outcome, outcome_of
from kvolt.router.port import Decision, Router
from kvolt.router.selection.forecast import SupportsForecast
from kvolt.runtime.endpoint.call import Call, Deadlines, open_stream
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.port import Destination, RequestPlane
from kvolt.runtime.plane.streams import StepSink
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_MARGIN = 3.0
"""Multiple of the predicted TTFT that a first token may take: predictions err, and other requests may go first."""
_WITHDRAW_S = 2.0
_LIMITS = Deadlines(connect_s=_WITHDRAW_S, first_s=_WITHDRAW_S, between_s=_WITHDRAW_S, total_s=_WITHDRAW_S)
"""Deadlines of a withdrawal. Short: an alternative worker stays reserved during the call."""

_decode_delta = msgspec.msgpack.Decoder(Delta).decode
_decode_result = msgspec.msgpack.Decoder(WithdrawResult).decode


def with_decision(request: Request, decision: Decision) -> Request:
    """The request for the decision's worker: with KV sources, DP rank, and the right to read KV of a prefill worker."""
    reader = decision.instance.identity
    if request.handoff is not None:
        request = msgspec.structs.replace(request, handoff=request.handoff.for_reader(reader))
    if request.rendezvous is not None:
        rendezvous = msgspec.structs.replace(request.rendezvous, reader=reader)
        request = msgspec.structs.replace(request, rendezvous=rendezvous)
    if decision.kv_sources:
        request = msgspec.structs.replace(request, kv_sources=decision.kv_sources)
    if decision.dp_rank is not None:
        routing = msgspec.structs.replace(request.routing, pinned_dp_rank=decision.dp_rank)
        request = msgspec.structs.replace(request, routing=routing)
    return request


def deadlines_for(limits: Deadlines, *decisions: Decision | None) -> Deadlines:
    """Deadlines of a call whose first token waits for all of these decisions: `first_s` grows with the predicted TTFT,
    `total_s` stays."""
    predicted_ms = sum(each.predicted_ms or 0.0 for each in decisions if each is not None)
    first_s = _MARGIN * predicted_ms / 1e3
    return limits if first_s <= limits.first_s else msgspec.structs.replace(limits, first_s=first_s)


@dataclass(frozen=True, slots=True)
class RoleTarget:
    """Router and client for the workers of one role."""

    router: Router
    client: EndpointClient
    incompatible: Callable[[], frozenset[InstanceId]] = frozenset
    """Workers whose KV the decode workers cannot use; they get no prefill requests."""

    def candidates(self) -> list[Instance]:
        """Workers that can take prefill requests now."""
        candidates, excluded = self.client.candidates(), self.incompatible()
        return [each for each in candidates if each.id not in excluded] if excluded else candidates

    def predict_queue_s(self, request: Request) -> float:
        """Predicted time until a prefill worker starts the prompt; 0 if the router cannot predict it."""
        if not isinstance(self.router, SupportsForecast):
            return 0.0
        try:
            return self.router.forecast(as_prefill_request(request)).queue_s
        except KvoltError:  # `route_prompt` reports it
            return 0.0

    async def route_prompt(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        """Choose and reserve a prefill worker. Errors as of `Router.route`."""
        return await self.router.route(as_prefill_request(request), excluded | self.incompatible())


class PrefillCall:
    """One prompt at one prefill worker. Call `run` once; `cancel` at any time."""

    steps: StepSink | None = None
    """This sink takes single deltas only."""

    def __init__(self, target: RoleTarget, request: Request, task_group: TaskGroup) -> None:
        """`task_group`: runs background work that the call does not wait for."""
        self._target = target
        self._request = as_prefill_request(request)
        self._task_group = task_group
        self._result: asyncio.Future[Handoff] = asyncio.get_running_loop().create_future()
        self._call: Call | None = None
        self._is_sent = False
        self._handoff: Handoff | None = None
        self.decision: Decision | None = None
        """Chosen worker."""
        self.queue_s = 0.0
        """Time until the worker was chosen."""
        self.prefill_s = 0.0
        """Time from then to the handoff."""
        self.stages: StageTimes | None = None
        """Times that the worker reported with the handoff."""

    async def run(self, excluded: frozenset[InstanceId], deadlines: Deadlines) -> Handoff:
        """Route and compute. KvoltError if the prompt was not computed; nothing is left at the worker then."""
        await self.reserve(excluded)
        return await self.compute(deadlines)

    async def reserve(self, excluded: frozenset[InstanceId], links: LinkCosts | None = None) -> Decision:
        """Choose and reserve a worker, until `compute` ends or `release` is called. `links`: transfer costs to the
        decode worker, if that is known."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        decision = self.decision = await self._target.route_prompt(
            with_link_costs(self._request, links), excluded
        )
        self.queue_s = loop.time() - started_at
        return decision

    def release(self) -> None:
        if self.decision is not None:
            self._target.router.release(self.decision, None)

    async def compute(self, deadlines: Deadlines, rendezvous: Rendezvous | None = None) -> Handoff:
        """Compute the prompt at the reserved worker. With a rendezvous, decode pulls the KV during prefill. Errors as
        of `run`."""
        decision = self.decision
        assert decision is not None
        loop = asyncio.get_running_loop()
        request = with_decision(self._request, decision)
        if rendezvous is not None:
            request = msgspec.structs.replace(request, rendezvous=rendezvous)
        sent_at = loop.time()
        try:
            if self._result.done():  # cancelled during the await
                return self._result.result()
            limits = deadlines_for(deadlines, decision)
            self._call = await self._target.client.call(
                request, self, instance=decision.instance, deadlines=limits, decode=_decode_delta
            )
            self._is_sent = True
            return await self._result
        except (asyncio.CancelledError, Cancelled, DeadlineExceeded):
            self.cancel()
            if self._is_sent:  # the prompt may be computed already, and its KV will not be pulled
                release_prompt(
                    self._task_group, self._target.client.plane, decision.instance, request.request_id
                )
            raise
        finally:
            self.prefill_s = loop.time() - sent_at
            self._target.router.release(decision, None, self._outcome())

    def _outcome(self) -> Outcome:
        """Outcome for the worker's circuit breaker; UNKNOWN if the request did not reach it."""
        if not self._is_sent or not self._result.done() or self._result.cancelled():
            return Outcome.UNKNOWN
        error = self._result.exception()
        return outcome_of(error) if error is None or isinstance(error, KvoltError) else Outcome.UNKNOWN

    def cancel(self) -> None:
        """Stop here and at the worker; `run` raises Cancelled."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._settle(Cancelled("the caller cancelled"))

    # --- as the sink of a call

    def on_item(self, delta: Any) -> None:
        if self._handoff is not None or delta.handoff is None:
            return  # only the handoff matters
        self._handoff, self.stages = delta.handoff, delta.stages
        if self.decision is not None:
            self._target.router.mark_first_token(self.decision, delta.cached_tokens)

    def on_end(self, error: KvoltError | None) -> None:
        if error is None and self._handoff is None:
            error = ProtocolError("a prefill worker ended without a handoff", rule="handoff")
        self._settle(error)

    def _settle(self, error: KvoltError | None) -> None:
        if self._result.done():
            return
        if error is not None or self._handoff is None:
            self._result.set_exception(error or Cancelled("the caller cancelled"))
            self._result.exception()  # `run` may have ended already: mark the exception as retrieved
        else:
            self._result.set_result(self._handoff)


def as_prefill_request(request: Request) -> Request:
    """The request as a prefill router sees it: a pinned DP rank and `allowed` apply to decode workers."""
    routing = request.routing
    if routing.pinned_dp_rank is None and routing.allowed == routing.allowed_prefill:
        return request
    routing = msgspec.structs.replace(routing, pinned_dp_rank=None, allowed=routing.allowed_prefill)
    return msgspec.structs.replace(request, routing=routing)


async def withdraw_request(plane: RequestPlane, instance: Instance, request_id: RequestId) -> bool:
    """Return whether the worker gave up the request; its stream then ends as well. Without an answer it keeps it."""
    endpoint = EndpointAddress(instance.endpoint.namespace, instance.endpoint.component, CONTROL)
    to = Destination(instance.address, str(endpoint), instance.identity)
    try:
        async with await open_stream(plane, to, Withdraw(request_id), _LIMITS, _decode_result) as results:
            result: WithdrawResult | None = await anext(results, None)
    except KvoltError as error:
        log.debug("withdrawal failed: request_id=%s reason=%s", request_id, error.message)
        return False
    return result is not None and result.was_withdrawn


def release_prompt(
    task_group: TaskGroup, plane: RequestPlane, instance: Instance, request_id: RequestId
) -> None:
    """Release a prompt's KV on a prefill worker, in the background. If the message is lost the hold expires."""
    if not task_group.closed:
        task_group.start(withdraw_request(plane, instance, request_id), f"release {request_id}")
