"""Life of one request after preprocessing: route, open, stream, retry or migrate, cancel.

Executes the actions of `machine`. Knows neither HTTP nor text. Deltas go straight to the receiver; the journey sees
only the first and last of them, so plain tokens cost it nothing. `attempt_state` owns what is sent to workers,
`remote_prompt` a prompt that another worker computes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from kvolt.core.delta import Delta, StageTimes, Usage
from kvolt.core.endpoints import Instance, was_withdrawn
from kvolt.core.errors import DeadlineExceeded, KvoltError, with_fields
from kvolt.core.request import Handoff, Request
from kvolt.journey import events
from kvolt.journey.attempt_state import AttemptState, Reservations
from kvolt.journey.context import JourneyContext, Receiver, RerouteOutcome
from kvolt.journey.events import Action, Event, JourneyState
from kvolt.journey.links import with_link_costs
from kvolt.journey.machine import JourneyMachine
from kvolt.journey.migration import are_choices_finished, missing_finishes
from kvolt.journey.prefill import RoleTarget, deadlines_for, with_decision, withdraw_request
from kvolt.journey.prefill_mode import PrefillMode
from kvolt.journey.reachable import route_when_reachable
from kvolt.journey.remote_prompt import RemotePrompt, open_rendezvous
from kvolt.router import breaker
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.call import Call, Deadlines

__all__ = ["Journey", "JourneyContext", "Receiver"]

log = logging.getLogger(__name__)

_decode_delta = msgspec.msgpack.Decoder(Delta).decode

_MID_ANSWER = (JourneyState.STREAMING, JourneyState.MIGRATING)
"""Part of the answer was delivered, and a worker has the request."""


class Journey:
    """One request. Call `start`; the receiver then gets everything. `cancel` at any time."""

    def __init__(
        self, context: JourneyContext, request: Request, receiver: Receiver, deadlines: Deadlines
    ) -> None:
        self._context = context
        self._deadlines = deadlines
        self._machine = JourneyMachine(context.max_attempts, context.max_moves, context.migration_limit)
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._target: RoleTarget | JourneyContext = context
        """Where the answer is computed."""
        self._remote_prompt: RemotePrompt | None = None
        """With remote prefill."""
        self._call: Call | None = None
        self._reservations = Reservations()
        self._usage: Usage | None = None
        self._stages: StageTimes | None = None
        self._attempt = AttemptState(request, context.stats, self._loop.time)
        self._retry: asyncio.Task[Any] | None = None
        self._is_held = False
        self._queue_s = 0.0
        self._num_retries = 0
        self.instances: list[Instance] = []
        """Workers that the request was sent to, in order."""
        self.request = request
        self.decision: Decision | None = None
        """Routing decision of the last attempt."""
        # As a call's sink: whole steps bypass the journey.
        self.sink = receiver
        self.steps = receiver.steps

    @property
    def stages(self) -> StageTimes:
        """Stage times known so far: the wait for a worker, of a remote prefill, of onboarded KV."""
        stages = self._stages if self._remote_prompt is None else self._remote_prompt.stages
        if stages is not None and stages.queue_ms is not None:
            return stages
        return msgspec.structs.replace(stages or StageTimes(), queue_ms=self._queue_s * 1e3)

    @property
    def prefill_decision(self) -> Decision | None:
        """Where the prompt was computed, with remote prefill."""
        return None if self._remote_prompt is None else self._remote_prompt.decision

    @property
    def decode_wait_s(self) -> float | None:
        """Wait for a decode worker, with remote prefill; without, `stages` has the wait for the worker."""
        return self._queue_s if self.prefill_decision is not None else None

    @property
    def num_retries(self) -> int:
        """Workers that failed the request, prefill workers included."""
        return self._num_retries + (0 if self._remote_prompt is None else self._remote_prompt.num_failures)

    @property
    def num_attempts(self) -> int:
        return self._machine.num_attempts

    async def start(self) -> None:
        """Return once a worker has the request or it was cancelled. If this raises, the receiver is not called."""
        context = self._context
        try:
            mode, target = context.prefill_modes.plan(self.request)
        except KvoltError as refusal:  # the pinned prefill worker is not available
            raise with_fields(refusal, gpu_work=self._machine.gpu_work) from refusal
        is_prefill_first = False
        if mode is PrefillMode.REMOTE and target is not None:
            self._remote_prompt = RemotePrompt(target, self.request, context.task_group, context.stats)
            is_prefill_first = not context.is_decode_first
            if context.is_decode_first:
                self._attempt.expect_remote_prefill()
        elif mode is PrefillMode.PREFILL_WORKER and target is not None:
            self._target = target
        error = await self._perform(self._machine.handle(events.Start(is_remote_prefill=is_prefill_first)))
        if error is not None:
            raise error

    def cancel(self) -> None:
        """Stop here and at the worker; the receiver gets no further call."""
        if self._machine.state is JourneyState.DONE:
            return
        self._machine.handle(events.Stopped())
        self._attempt.end_reroute(RerouteOutcome.CANCELLED)
        self._reservations.release_alternative()
        self._reservations.release(outcome=breaker.Outcome.LEFT)
        self._release_prompt()
        if self._retry is not None:
            self._retry.cancel()
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def hold(self) -> None:
        """Backpressure: the receiver is slow, deltas wait at the worker."""
        self._is_held = True
        if self._call is not None and self._call.stream is not None:
            self._call.stream.pause_reading()

    def release(self) -> None:
        self._is_held = False
        if self._call is not None and self._call.stream is not None:
            self._call.stream.resume_reading()

    def on_item(self, delta: Any) -> None:
        """Handle a delta that is more than a token; the first of an answer always is."""
        prompt = self._remote_prompt
        if self._reservations.on_first_delta(delta.cached_tokens):
            self._attempt.on_first_delta(delta.cached_tokens)
            if prompt is not None:
                prompt.on_fetched()
        delta = self._attempt.splice(delta, has_started=self.sink.has_started)
        if delta.stages is not None:
            self._stages = delta.stages
            if prompt is not None and prompt.merge_stages(delta.stages):
                self._observe_transfer(prompt, delta.stages)
        if delta.usage is not None:
            self._add_usage(delta.usage)
        self.sink.on_item(delta)

    def on_end(self, error: KvoltError | None) -> None:
        """The call ended; the journey may continue with another worker."""
        machine = self._machine
        if machine.state is JourneyState.DONE:
            return
        if self._reservations.alternative is not None and was_withdrawn(error):
            self._on_withdrawn(self._reservations.alternative)
            return
        self._reservations.release_alternative()
        if self._attempt.has_progress(machine.state, self.sink):
            machine.handle(events.Delivered())
        if error is not None and self._finish_if_complete():
            error = None
        if self._machine.state is JourneyState.DONE:
            return  # a delivered finish has cancelled the journey
        self._reservations.release(self._usage if error is None else None, breaker.outcome_of(error))
        action = machine.handle(events.Finished() if error is None else events.Failed(error))
        if isinstance(action, events.End):
            self._call = None
            self.sink.on_end(self._end_error(action.error))
        else:
            self._retry = self._context.task_group.start(
                self._run_actions(action), f"retry {self.request.request_id}"
            )

    def _finish_if_complete(self) -> bool:
        """Deliver finish reasons lost with a worker; True if the answer is then complete."""
        if self._machine.state not in _MID_ANSWER:
            return False
        for finish in missing_finishes(
            self.request, self.sink.received_tokens(), self._context.eos_token_ids
        ):
            self.on_item(finish)
        return are_choices_finished(self.sink.received_tokens())

    # --- withdrawal before the first token

    def move(self, decision: Decision) -> bool:
        """Router callback: a better worker is reserved for this waiting request (see `Withdrawal`)."""
        current = self.decision
        can_move = (
            self._machine.can_move and self._reservations.alternative is None and not self.sink.has_started
        )
        if current is None or not can_move or self._context.task_group.closed:
            return False
        self._reservations.alternative = decision
        self._context.task_group.start(
            self._withdraw(current, decision), f"withdraw {self.request.request_id}"
        )
        return True

    async def _withdraw(self, current: Decision, decision: Decision) -> None:
        """The end of the withdrawn stream confirms it, before or after this reply arrives."""
        is_back = False
        try:
            is_back = await withdraw_request(
                self._target.client.plane, current.instance, self.request.request_id
            )
        finally:
            if not is_back and self._reservations.alternative is decision:
                self._reservations.release_alternative()

    def _on_withdrawn(self, decision: Decision) -> None:
        action = self._machine.handle(events.WithdrawalConfirmed(decision))
        self._call = None
        self._reservations.switch_to_alternative()
        self._context.stats.num_moves += 1
        self._retry = self._context.task_group.start(
            self._run_actions(action), f"move {self.request.request_id}"
        )

    # ---

    async def _run_actions(self, action: Action) -> None:
        """Perform actions in a task of their own; errors go to the receiver."""
        try:
            error = await self._perform(action)
        except Exception as fault:  # the receiver would otherwise wait forever
            log.exception("reroute failed: request_id=%s", self.request.request_id)
            error = KvoltError(f"internal error ({type(fault).__name__})")
            self._release_prompt()
        if error is not None:
            self.sink.on_end(error)

    async def _perform(self, action: Action) -> KvoltError | None:
        """Perform actions until one waits or ends the journey. Returns the error of a failed end."""
        while True:
            if isinstance(action, events.Route):
                event = await self._route(action)
            elif isinstance(action, events.Prefill):
                event = await self._prefill(action)
            elif isinstance(action, events.Open):
                event = await self._open(action)
            else:
                return self._end_error(action.error) if isinstance(action, events.End) else None
            if self._machine.state is JourneyState.DONE:
                return None  # cancelled during the await
            action = self._machine.handle(event)

    async def _prefill(self, action: events.Prefill) -> Event:
        prompt, total_s = self._remote_prompt, self._deadlines.total_s
        assert prompt is not None
        try:
            async with asyncio.timeout_at(self._started + total_s):
                handoff = await prompt.compute(action.excluded, self._time_left())
        except TimeoutError:
            late = DeadlineExceeded(f"no prompt within {total_s:g} s", stage="route", after_s=total_s)
            prompt.count_failure(late)
            return events.PrefillFailed(late, None)
        except KvoltError as error:
            return events.PrefillFailed(error, prompt.last_instance_id)
        if self._machine.state is JourneyState.DONE:  # cancelled during the await
            prompt.release()
        else:
            prompt.accept()
            self._apply_handoff(handoff)
        return events.Prefilled()

    def _apply_handoff(self, handoff: Handoff) -> None:
        """Deliver the first tokens that prefill sampled; the decode worker does not send them again."""
        self._attempt.set_handoff(handoff)
        for index, token in enumerate(handoff.first_tokens or ()):
            cached_tokens = None if index else handoff.cached_tokens
            self.sink.on_item(Delta(token_ids=(token,), index=index, cached_tokens=cached_tokens))

    async def _route(self, action: events.Route) -> Event:
        total_s = self._deadlines.total_s
        failure = self._machine.failure
        if failure is not None:
            self._target = self._context
            self._attempt.prepare_retry(self.sink if self._machine.state is JourneyState.REROUTING else None)
        try:
            async with asyncio.timeout_at(self._started + total_s):
                asked_at = self._loop.time()
                try:
                    decision = await self._choose_worker(action)
                finally:
                    self._queue_s += self._loop.time() - asked_at
        except TimeoutError:
            return events.Failed(
                DeadlineExceeded(f"no worker within {total_s:g} s (route)", stage="route", after_s=total_s)
            )
        except KvoltError as error:
            if self._target is self._context:
                return events.Failed(error)
            self._target = self._context  # no prefill worker has room: route to the decode workers
            return await self._route(action)
        self._reservations.set_current(self._target.router, decision)
        if self._machine.state is JourneyState.DONE:  # cancelled during the await
            self._reservations.release()
        elif failure is not None:
            self._num_retries += 1
            self._attempt.count_retry(failure, decision)
        return events.Routed(decision)

    async def _choose_worker(self, action: events.Route) -> Decision:
        """Route; waits for unreachable workers if no other worker can take the request."""
        target, request = self._target, self._attempt.request
        if target is not self._context:
            return await target.router.route(request, action.excluded)
        if request.handoff is not None and self.prefill_decision is not None:
            costs = self._context.prefill_modes.link_costs_from(self.prefill_decision.instance.id)
            request = with_link_costs(request, costs)
        return await route_when_reachable(
            target.router, target.client, request, action.excluded, action.unreachable
        )

    async def _open(self, action: events.Open) -> Event:
        decision = self.decision = action.decision
        request = with_decision(self._attempt.request, decision)
        try:
            if request.rendezvous is not None and self._remote_prompt is not None:
                attempt = self._machine.num_attempts + self._machine.num_moves
                links = self._context.prefill_modes.link_costs_to(decision.instance.id)
                request = await open_rendezvous(
                    self._remote_prompt, request, attempt, links, self._time_left, self._is_done
                )
                if self._is_done():  # cancelled during the await
                    return events.Opened()
            prefill = (
                self._remote_prompt.pending_decision if request.rendezvous and self._remote_prompt else None
            )
            limits = deadlines_for(self._time_left(), decision, prefill)
            self.instances.append(decision.instance)  # before the call: a short answer ends within it
            self._call = await self._target.client.call(
                request, self, instance=decision.instance, deadlines=limits, decode=_decode_delta
            )
        except BaseException as error:
            self._reservations.release()
            if isinstance(error, KvoltError):
                return events.Failed(error)
            raise
        if self._machine.state is JourneyState.DONE:
            self._call.cancel()  # `cancel` had no call to cancel yet
        else:
            if self._is_held and self._call.stream is not None:
                self._call.stream.pause_reading()
            if decision.withdraw_hook is not None:
                decision.withdraw_hook.try_move = self.move
        return events.Opened()

    def _is_done(self) -> bool:
        return self._machine.state is JourneyState.DONE

    def _release_prompt(self) -> None:
        """The journey is over: release KV that was computed for it."""
        if self._remote_prompt is not None:
            self._remote_prompt.release()

    def _end_error(self, error: KvoltError | None) -> KvoltError | None:
        """Finish the journey. The returned error says how much GPU work a client's retry would repeat."""
        self._release_prompt()
        if error is None:
            return None
        self._attempt.end_reroute(RerouteOutcome.FAILURE)
        return with_fields(error, gpu_work=self._machine.gpu_work)

    def _observe_transfer(self, prompt: RemotePrompt, stages: StageTimes) -> None:
        source = prompt.pending_decision or prompt.decision
        if source is not None and self.decision is not None:
            target_id = self.decision.instance.id
            self._context.prefill_modes.observe_transfer(self.request, stages, source.instance.id, target_id)

    def _add_usage(self, usage: Usage) -> None:
        """Sum usage over choices; the prompt counts once."""
        if self._usage is not None:
            completion_tokens = self._usage.completion_tokens + usage.completion_tokens
            usage = msgspec.structs.replace(usage, completion_tokens=completion_tokens)
        self._usage = usage

    def _time_left(self) -> Deadlines:
        total_s = max(self._started + self._deadlines.total_s - self._loop.time(), 0.0)
        return msgspec.structs.replace(self._deadlines, total_s=total_s)
