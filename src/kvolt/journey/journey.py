"""A request's life after preprocessing: routed, opened, streamed, tried or gone on with elsewhere, cancelled.

Performs what `machine` decides. Knows neither HTTP nor text. What a worker says goes straight to the
receiver; the journey hears only of the beginning and the end, so that a token between costs it nothing. What workers
are asked is `asked`'s, a prompt that somebody else computes is `prompt`'s.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from kvolt.core.delta import Delta, StageTimes, Usage
from kvolt.core.errors import DeadlineExceeded, KvoltError, with_fields
from kvolt.core.request import Handoff, Request
from kvolt.core.withdrawal import was_withdrawn
from kvolt.journey.attempt_state import Asked
from kvolt.journey.context import Receiver, Road
from kvolt.journey.decode_first import meet
from kvolt.journey.dispatch import as_decided, deadlines_for
from kvolt.journey.links import with_links
from kvolt.journey.machine import (
    Action,
    Delivered,
    End,
    Event,
    Failed,
    Finished,
    JourneyMachine,
    Open,
    Opened,
    Prefill,
    Prefilled,
    PrefillFailed,
    Route,
    Routed,
    Start,
    State,
    Stopped,
    TakenBack,
)
from kvolt.journey.migration import is_over, lost_ends
from kvolt.journey.prefill import Leg
from kvolt.journey.prefill_mode import Way
from kvolt.journey.reachable import route_when_reachable
from kvolt.journey.remote_prompt import Prompt
from kvolt.journey.reservations import Booked
from kvolt.journey.stats import Outcome
from kvolt.journey.withdrawal import ask_back
from kvolt.router import breaker
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.call import Call, Deadlines

__all__ = ["Journey", "Receiver", "Road"]

log = logging.getLogger(__name__)

_decode_delta = msgspec.msgpack.Decoder(Delta).decode

_AMID = (State.STREAMING, State.RESUMING)
"""Something of the answer has been told, and a worker is at it."""


class Journey:
    """One request. `begin`, then the receiver gets everything; `cancel` at any time."""

    __slots__ = (
        "_asked",
        "_at",
        "_booked",
        "_call",
        "_deadlines",
        "_held",
        "_loop",
        "_machine",
        "_prompt",
        "_retry",
        "_road",
        "_stages",
        "_started",
        "_usage",
        "decision",
        "request",
        "sink",
        "steps",
    )

    def __init__(self, road: Road, request: Request, receiver: Receiver, deadlines: Deadlines) -> None:
        self._road = road
        self._deadlines = deadlines
        self._machine = JourneyMachine(road.max_attempts, road.max_moves, road.migration_limit)
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.time()
        self._at: Leg | Road = road
        """Those that are asked for its answer now."""
        self._prompt: Prompt | None = None
        """If others compute it than answer."""
        self._call: Call | None = None
        self._booked = Booked()
        self._usage: Usage | None = None
        self._stages: StageTimes | None = None
        self._asked = Asked(request, road.stats, self._loop.time)
        self._retry: asyncio.Task[Any] | None = None
        self._held = False
        self.request = request
        self.decision: Decision | None = None
        """Where the last attempt went."""
        # As the sink of a call: whole steps pass us by.
        self.sink = receiver
        self.steps = receiver.steps

    @property
    def stages(self) -> StageTimes | None:
        """Where its time went, as far as that is known: of a prompt that others computed, or KV that was brought."""
        return self._stages if self._prompt is None else self._prompt.stages

    @property
    def prefilled(self) -> Decision | None:
        """Where the prompt was computed, if that was elsewhere."""
        return None if self._prompt is None else self._prompt.decision

    @property
    def num_attempts(self) -> int:
        return self._machine.num_attempts

    async def begin(self) -> None:
        """Until a worker has the request, or it was cancelled. When it raises, the receiver hears nothing."""
        road = self._road
        try:
            way, leg = road.ways.plan(self.request)
        except KvoltError as refusal:  # who is to compute the prompt was said, and is not there
            raise with_fields(refusal, gpu_work=self._machine.gpu_work) from refusal
        is_prefill_first = False
        if way is Way.SPLIT and leg is not None:
            self._prompt = Prompt(leg, self.request, road.crew, road.stats)
            is_prefill_first = not road.is_decode_first
            if road.is_decode_first:
                self._asked.expect_prompt()
        elif way is Way.THERE and leg is not None:
            self._at = leg
        error = await self._perform(self._machine.on(Start(is_remote=is_prefill_first)))
        if error is not None:
            raise error

    def cancel(self) -> None:
        """Stop here and at the worker; the receiver hears nothing more."""
        if self._machine.state is State.DONE:
            return
        self._machine.on(Stopped())
        self._asked.found(Outcome.CANCELLED)
        self._booked.stay()
        self._booked.free(outcome=breaker.Outcome.LEFT)
        self._let_go()
        if self._retry is not None:
            self._retry.cancel()
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def hold(self) -> None:
        """The receiver is behind: the worker's deltas shall wait there."""
        self._held = True
        if self._call is not None and self._call.stream is not None:
            self._call.stream.hold()

    def release(self) -> None:
        self._held = False
        if self._call is not None and self._call.stream is not None:
            self._call.stream.release()

    def on_item(self, delta: Any) -> None:
        """A delta that is more than a token; the first of an answer always is."""
        prompt = self._prompt
        if self._booked.begin(delta.cached_tokens):
            self._asked.begun(delta.cached_tokens)
            if prompt is not None:
                prompt.fetched()
        delta = self._asked.told(delta, is_told=self.sink.has_begun)
        if delta.stages is not None:
            self._stages = delta.stages
            if prompt is not None and prompt.add(delta.stages):
                self._learn_link(prompt, delta.stages)
        if delta.usage is not None:
            self._count(delta.usage)
        self.sink.on_item(delta)

    def on_end(self, error: KvoltError | None) -> None:
        """The call is over, the journey perhaps not."""
        machine = self._machine
        if machine.state is State.DONE:
            return
        if self._booked.other is not None and was_withdrawn(error):
            self._move(self._booked.other)
            return
        self._booked.stay()
        if self._asked.got_further(machine.state, self.sink):
            machine.on(Delivered())
        if error is not None and self._is_complete():
            error = None
        if self._machine.state is State.DONE:
            return  # the receiver has all that it wanted
        self._booked.free(self._usage if error is None else None, breaker.outcome_of(error))
        action = machine.on(Finished() if error is None else Failed(error))
        if isinstance(action, End):
            self._call = None
            self.sink.on_end(self._told(action.error))
        else:
            self._retry = self._road.crew.start(self._go_on(action), f"retry {self.request.request_id}")

    def _is_complete(self) -> bool:
        """Whether nothing was lost with a worker but its last word. Ends that it did not come to say are told."""
        if self._machine.state not in _AMID:
            return False
        for end in lost_ends(self.request, self.sink.so_far(), self._road.eos_token_ids):
            self.on_item(end)
        return is_over(self.sink.so_far())

    # --- taken back

    def move(self, decision: Decision) -> bool:
        """The router has booked a better place for a request that has not begun (see `Recall`)."""
        current = self.decision
        may_move = self._machine.may_move and self._booked.other is None and not self.sink.has_begun
        if current is None or not may_move or self._road.crew.closed:
            return False
        self._booked.other = decision
        self._road.crew.start(self._ask_back(current, decision), f"take back {self.request.request_id}")
        return True

    async def _ask_back(self, current: Decision, decision: Decision) -> None:
        """That it was given back is said by the end of its stream, which may come before or after the answer."""
        is_back = False
        try:
            is_back = await ask_back(self._at.client.plane, current.instance, self.request.request_id)
        finally:
            if not is_back and self._booked.other is decision:
                self._booked.stay()

    def _move(self, decision: Decision) -> None:
        action = self._machine.on(TakenBack(decision))
        self._call = None
        self._booked.move()
        self._road.stats.num_moves += 1
        self._retry = self._road.crew.start(self._go_on(action), f"move {self.request.request_id}")

    # ---

    async def _go_on(self, action: Action) -> None:
        try:
            error = await self._perform(action)
        except Exception as fault:  # nobody else would tell the receiver
            log.exception("reroute failed: request=%s", self.request.request_id)
            error = KvoltError(f"internal error ({type(fault).__name__})")
            self._let_go()
        if error is not None:
            self.sink.on_end(error)

    async def _perform(self, action: Action) -> KvoltError | None:
        """Do what the machine wants until there is nothing to do but wait; why it ended, if it did."""
        while True:
            if isinstance(action, Route):
                event = await self._route(action)
            elif isinstance(action, Prefill):
                event = await self._prefill(action)
            elif isinstance(action, Open):
                event = await self._open(action)
            else:
                return self._told(action.error) if isinstance(action, End) else None
            if self._machine.state is State.DONE:
                return None  # cancelled meanwhile
            action = self._machine.on(event)

    async def _prefill(self, action: Prefill) -> Event:
        prompt, total_s = self._prompt, self._deadlines.total_s
        assert prompt is not None
        try:
            async with asyncio.timeout_at(self._started + total_s):
                handoff = await prompt.compute(action.excluded, self._time_left())
        except TimeoutError:
            late = DeadlineExceeded(f"no prompt within {total_s:g} s", stage="route", after_s=total_s)
            prompt.fail(late)
            return PrefillFailed(late, None)
        except KvoltError as error:
            return PrefillFailed(error, prompt.asked)
        if self._machine.state is State.DONE:  # cancelled meanwhile
            prompt.let_go()
        else:
            prompt.accept()
            self._take_over(handoff)
        return Prefilled()

    def _take_over(self, handoff: Handoff) -> None:
        """What prefill has said is told at once, and not again by who goes on."""
        self._asked.take_over(handoff)
        for index, token in enumerate(handoff.first_tokens or ()):
            cached_tokens = None if index else handoff.cached_tokens
            self.sink.on_item(Delta(token_ids=(token,), index=index, cached_tokens=cached_tokens))

    async def _route(self, action: Route) -> Event:
        total_s = self._deadlines.total_s
        failure = self._machine.failure
        if failure is not None:
            self._at = self._road
            self._asked.look_elsewhere(self.sink if self._machine.state is State.REROUTING else None)
        try:
            async with asyncio.timeout_at(self._started + total_s):
                decision = await self._choose(action)
        except TimeoutError:
            return Failed(
                DeadlineExceeded(f"no worker within {total_s:g} s (route)", stage="route", after_s=total_s)
            )
        except KvoltError as error:
            if self._at is self._road:
                return Failed(error)
            self._at = self._road  # nobody there has room: it is theirs who answer
            return await self._route(action)
        self._booked.book(self._at.router, decision)
        if self._machine.state is State.DONE:  # cancelled meanwhile
            self._booked.free()
        elif failure is not None:
            self._asked.count_elsewhere(failure, decision)
        return Routed(decision)

    async def _choose(self, action: Route) -> Decision:
        """Waits for workers that are out of reach, unless there are others that can answer."""
        at, request = self._at, self._asked.request
        if at is not self._road:
            return await at.router.route(request, action.excluded)
        if request.handoff is not None and self.prefilled is not None:
            request = with_links(request, self._road.ways.links_from(self.prefilled.instance.id))
        return await route_when_reachable(at.router, at.client, request, action.excluded, action.out_of_reach)

    async def _open(self, action: Open) -> Event:
        decision = self.decision = action.decision
        request = as_decided(self._asked.request, decision)
        try:
            if request.rendezvous is not None and self._prompt is not None:
                attempt = self._machine.num_attempts + self._machine.num_moves
                links = self._road.ways.links_to(decision.instance.id)
                request = await meet(self._prompt, request, attempt, links, self._time_left, self._is_over)
                if self._is_over():  # cancelled meanwhile
                    return Opened()
            beside = self._prompt.under_way if request.rendezvous is not None and self._prompt else None
            limits = deadlines_for(self._time_left(), decision, beside)
            self._call = await self._at.client.call(
                request, self, instance=decision.instance, deadlines=limits, decode=_decode_delta
            )
        except BaseException as error:
            self._booked.free()
            if isinstance(error, KvoltError):
                return Failed(error)
            raise
        if self._machine.state is State.DONE:
            self._call.cancel()  # nobody could while it was being opened
        else:
            if self._held and self._call.stream is not None:
                self._call.stream.hold()
            if decision.recall is not None:
                decision.recall.move = self.move
        return Opened()

    def _is_over(self) -> bool:
        return self._machine.state is State.DONE

    def _let_go(self) -> None:
        """It is over: nobody will fetch what was computed for it."""
        if self._prompt is not None:
            self._prompt.let_go()

    def _told(self, error: KvoltError | None) -> KvoltError | None:
        """The end as the receiver gets it: whether trying again would be the second time that it is computed."""
        self._let_go()
        if error is None:
            return None
        self._asked.found(Outcome.FAILURE)
        return with_fields(error, gpu_work=self._machine.gpu_work)

    def _learn_link(self, prompt: Prompt, stages: StageTimes) -> None:
        source = prompt.under_way or prompt.decision
        if source is not None and self.decision is not None:
            self._road.ways.learn(self.request, stages, source.instance.id, self.decision.instance.id)

    def _count(self, usage: Usage) -> None:
        """Each choice has its own, at its end; the prompt is the same."""
        if self._usage is not None:
            completion_tokens = self._usage.completion_tokens + usage.completion_tokens
            usage = msgspec.structs.replace(usage, completion_tokens=completion_tokens)
        self._usage = usage

    def _time_left(self) -> Deadlines:
        total_s = max(self._started + self._deadlines.total_s - self._loop.time(), 0.0)
        return msgspec.structs.replace(self._deadlines, total_s=total_s)
