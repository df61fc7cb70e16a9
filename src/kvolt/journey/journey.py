"""A request's life after preprocessing: routed, opened, streamed, tried or gone on with elsewhere, cancelled.

Performs what `machine` decides. Knows neither HTTP nor text. What a worker says goes straight to the
receiver; the journey hears only of the beginning and the end, so that a token between costs it nothing.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvolt.core.delta import Delta, StageTimes, Usage
from kvolt.core.errors import Cancelled, DeadlineExceeded, KvoltError, Unavailable, with_fields
from kvolt.core.ids import RequestId
from kvolt.core.request import Handoff, Rendezvous, Request
from kvolt.core.withdrawal import was_withdrawn
from kvolt.journey.decided import as_decided
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
from kvolt.journey.meeting import SOMEWHERE, new_meeting
from kvolt.journey.prefill import Leg, PrefillCall
from kvolt.journey.resuming import Heard, as_one, going_on, is_over, lost_ends
from kvolt.journey.stats import Elsewhere, JourneyStats, Outcome
from kvolt.journey.take_back import ask_back, let_go
from kvolt.journey.ways import OneWay, Way, Ways
from kvolt.router.port import Decision, Router
from kvolt.runtime.address import Instance
from kvolt.runtime.call import Call, Deadlines
from kvolt.runtime.client import EndpointClient
from kvolt.runtime.streams import StepSink
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_decode_delta = msgspec.msgpack.Decoder(Delta).decode


_PLACE_S = 5.0
"""For a prefill worker to have room, while a decode worker has the request already."""

_AMID = (State.STREAMING, State.RESUMING)
"""Something of the answer has been told, and a worker is at it."""


class Receiver(Protocol):
    """Who gets the answer. Called from the loop's read path: must not raise or block."""

    steps: StepSink | None
    """Takes whole steps in its place, see `StepSink`."""

    @property
    def has_begun(self) -> bool:
        """Whether any of the answer has come: from then on it cannot be begun again elsewhere, only gone on with."""
        ...

    def so_far(self) -> Heard:
        """All that has come of each choice, for who goes on with it when its worker was lost."""
        ...

    def on_item(self, delta: Any) -> None: ...

    def on_end(self, error: KvoltError | None) -> None:
        """Once, after the last delta."""
        ...


@dataclass(frozen=True, slots=True)
class Road:
    """What all journeys for one model share."""

    router: Router
    client: EndpointClient
    crew: Crew
    """For attempts after the first, which nobody waits for."""
    max_attempts: int = 3
    max_moves: int = 2
    """How often a request may be taken back that has not begun; its router may want less."""
    migration_limit: int = 3
    """How often an answer that has begun may go on at another worker."""
    eos_token_ids: tuple[int, ...] = ()
    """Of the model: by what an answer is over whose worker was lost before it said so."""
    stats: JourneyStats = field(default_factory=JourneyStats)
    ways: Ways = field(default_factory=OneWay)
    """Whether somebody else computes a prompt than answers it."""
    is_decode_first: bool = False
    """Then who answers has the request at the same time, and fetches the prompt's KV while it is computed."""


class Journey:
    """One request. `begin`, then the receiver gets everything; `cancel` at any time."""

    __slots__ = (
        "_asked",
        "_at",
        "_booked",
        "_cached_tokens",
        "_call",
        "_deadlines",
        "_failed_at",
        "_handoff",
        "_held",
        "_is_resumed",
        "_is_taken",
        "_kept_by",
        "_loop",
        "_machine",
        "_moving_to",
        "_prefill_leg",
        "_prefilling",
        "_retry",
        "_road",
        "_stages",
        "_started",
        "_to_begin",
        "_usage",
        "decision",
        "prefilled",
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
        self._prefill_leg: Leg | None = None
        """Those that are asked for its prompt, if others are than answer it."""
        self._call: Call | None = None
        self._booked: Decision | None = None
        """What the router counts as under way for us."""
        self._to_begin = False
        """Whether it waits to hear of a first token."""
        self._moving_to: Decision | None = None
        """Booked as well, while its worker is asked to give it back."""
        self._usage: Usage | None = None
        self._asked = request
        """What a worker is asked: the request, or what is left of it."""
        self._is_resumed = False
        self._is_taken = False
        """Whether a worker has gone on with the handoff: then it is of no use to another one."""
        self._prefilling: PrefillCall | None = None
        self._stages: StageTimes | None = None
        """Of a prompt that was computed elsewhere: where its time went."""
        self._handoff: Handoff | None = None
        """Of whoever computed the prompt, if that was somebody else."""
        self._kept_by: Instance | None = None
        """Who keeps the KV of the handoff, until somebody has fetched it."""
        self._cached_tokens: int | None = None
        """What the first worker said of the prompt."""
        self._failed_at: float | None = None
        """Since when another worker is looked for."""
        self._retry: asyncio.Task[Any] | None = None
        self._held = False
        self.request = request
        self.decision: Decision | None = None
        """Where the last attempt went."""
        self.prefilled: Decision | None = None
        """Where the prompt was computed, if that was elsewhere."""
        # As the sink of a call: whole steps pass us by.
        self.sink = receiver
        self.steps = receiver.steps

    @property
    def stages(self) -> StageTimes | None:
        """Where its time went, as far as that is known: of a prompt that was computed elsewhere."""
        return self._stages

    @property
    def num_attempts(self) -> int:
        return self._machine.num_attempts

    async def begin(self) -> None:
        """Until a worker has the request, or it was cancelled. When it raises, the receiver hears nothing."""
        way, leg = self._road.ways.plan(self.request)
        is_prefill_first = way is Way.SPLIT and not self._road.is_decode_first
        if way is Way.SPLIT:
            self._prefill_leg = leg
            if not is_prefill_first:
                self._asked = msgspec.structs.replace(self._asked, rendezvous=SOMEWHERE)
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
        self._found(Outcome.CANCELLED)
        self._stay()
        self._free()
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
        if self._to_begin:
            self._to_begin = False
            self._is_taken = True
            self._kept_by = None
            self._stay()
            self._found(Outcome.SUCCESS)
            if self._booked is not None:
                self._at.router.begun(self._booked, delta.cached_tokens)
            if not self._is_resumed and self._handoff is None:
                self._cached_tokens = delta.cached_tokens
        if self._is_resumed or self._handoff is not None:
            delta = as_one(delta, self._cached_tokens, is_told=self.sink.has_begun)
        if delta.stages is not None and self._stages is not None:
            self._road.ways.learn(self.request, delta.stages)
            self._stages = msgspec.structs.replace(delta.stages, **_known(self._stages))
        if delta.usage is not None:
            self._count(delta.usage)
        self.sink.on_item(delta)

    def on_end(self, error: KvoltError | None) -> None:
        """The call is over, the journey perhaps not."""
        machine = self._machine
        if machine.state is State.DONE:
            return
        if self._moving_to is not None and was_withdrawn(error):
            self._move(self._moving_to)
            return
        self._stay()
        if self._got_further():
            machine.on(Delivered())
        if error is not None and self._is_complete():
            error = None
        if self._machine.state is State.DONE:
            return  # the receiver has all that it wanted
        self._free(self._usage if error is None else None)
        action = machine.on(Finished() if error is None else Failed(error))
        if isinstance(action, End):
            self._call = None
            self.sink.on_end(self._told(action.error))
        else:
            self._retry = self._road.crew.start(self._go_on(action), f"retry {self.request.request_id}")

    # --- gone on with elsewhere

    def _got_further(self) -> bool:
        """Whether the receiver has got anything that the machine does not know of."""
        state = self._machine.state
        if state is State.RESUMING:
            asked = self._with_handoff()
            return going_on(asked, self.sink.so_far()) != self._asked
        return state is State.WAITING and self.sink.has_begun and not self._has_prefills_word_only()

    def _has_prefills_word_only(self) -> bool:
        """Whether all that was told is what came with the handoff: another worker can begin with that as well."""
        told = None if self._handoff is None else self._handoff.first_tokens
        if told is None:
            return False
        return [tuple(each or ()) for each in self.sink.so_far()] == [(token,) for token in told]

    def _with_handoff(self) -> Request:
        """The request with its prompt's KV, as long as nobody has fetched that."""
        return msgspec.structs.replace(self.request, handoff=None if self._is_taken else self._handoff)

    def _is_complete(self) -> bool:
        """Whether nothing was lost with a worker but its last word. Ends that it did not come to say are told."""
        if self._machine.state not in _AMID:
            return False
        for end in lost_ends(self.request, self.sink.so_far(), self._road.eos_token_ids):
            self.on_item(end)
        return is_over(self.sink.so_far())

    def _look_elsewhere(self) -> None:
        """Before a router is asked again."""
        if self._failed_at is None:
            self._failed_at = self._loop.time()
        if self._machine.state is State.REROUTING:
            self._is_resumed = True
            # Its KV may still lie where its prompt was computed.
            asked = self._with_handoff()
            self._asked = going_on(asked, self.sink.so_far())

    def _count_elsewhere(self, failure: KvoltError, decision: Decision) -> None:
        stats, request_id = self._road.stats, self.request.request_id
        if not self._is_resumed:
            stats.retries[failure.code] += 1
            log.info("trying request %s elsewhere: %s", request_id, failure.message)
            return
        stats.migrations[failure.code] += 1
        log.info(
            "request %s goes on at %s after %d tokens: %s",
            request_id,
            decision.instance.id,
            self._asked.num_resumed_tokens,
            failure.message,
        )

    def _found(self, outcome: Outcome) -> None:
        """Nobody is looked for any more."""
        if self._failed_at is not None:
            took_s = self._loop.time() - self._failed_at
            self._failed_at = None
            self._road.stats.elsewhere_s[Elsewhere(self._is_resumed, outcome)].observe(took_s)

    # --- taken back

    def move(self, decision: Decision) -> bool:
        """The router has booked a better place for a request that has not begun (see `Recall`)."""
        current = self.decision
        may_move = self._machine.may_move and self._moving_to is None and not self.sink.has_begun
        if current is None or not may_move or self._road.crew.closed:
            return False
        self._moving_to = decision
        self._road.crew.start(self._ask_back(current, decision), f"take back {self.request.request_id}")
        return True

    async def _ask_back(self, current: Decision, decision: Decision) -> None:
        """That it was given back is said by the end of its stream, which may come before or after the answer."""
        is_back = False
        try:
            is_back = await ask_back(self._at.client.plane, current.instance, self.request.request_id)
        finally:
            if not is_back and self._moving_to is decision:
                self._stay()

    def _move(self, decision: Decision) -> None:
        action = self._machine.on(TakenBack(decision))
        self._moving_to = self._call = None
        self._free()
        self._booked = decision
        self._road.stats.num_moves += 1
        self._retry = self._road.crew.start(self._go_on(action), f"move {self.request.request_id}")

    def _stay(self) -> None:
        """It will not be moved: it has begun, is over, or its worker keeps it."""
        decision, self._moving_to = self._moving_to, None
        if decision is not None:
            self._at.router.free(decision, None)

    # ---

    async def _go_on(self, action: Action) -> None:
        try:
            error = await self._perform(action)
        except Exception as fault:  # nobody else would tell the receiver
            log.exception("request %s could not be tried elsewhere", self.request.request_id)
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
        leg = self._prefill_leg
        if leg is None or not leg.client.candidates():  # they have gone meanwhile
            return PrefillFailed(Unavailable("no prefill worker can be reached", reason="no_workers"), None)
        asked = msgspec.structs.replace(self.request, prefill_only=True)
        prefilling = self._prefilling = PrefillCall(leg, asked, self._road.crew)
        total_s = self._deadlines.total_s
        try:
            async with asyncio.timeout_at(self._started + total_s):
                handoff = await prefilling.run(action.excluded, self._time_left())
        except TimeoutError:
            late = DeadlineExceeded(f"no prompt within {total_s:g} s", stage="route", after_s=total_s)
            return PrefillFailed(late, None)
        except KvoltError as error:
            log.info(
                "the prompt of %s was not computed elsewhere: %s", self.request.request_id, error.message
            )
            self._road.stats.prefill_failures[error.code] += 1
            decision = prefilling.decision
            return PrefillFailed(error, None if decision is None else decision.instance.id)
        finally:
            self._prefilling = None
        assert prefilling.decision is not None
        self._kept_by = prefilling.decision.instance if handoff.ticket else None
        if self._machine.state is State.DONE:  # cancelled meanwhile
            self._let_go()
        else:
            self._stages = StageTimes(queue_ms=prefilling.wait_s * 1e3, prefill_ms=prefilling.took_s * 1e3)
            self.prefilled = prefilling.decision
            self._take_over(handoff)
        return Prefilled()

    def _take_over(self, handoff: Handoff) -> None:
        """What prefill has said is told at once, and not again by who goes on."""
        self._road.stats.num_prefills += 1
        self._handoff = handoff
        self._asked = msgspec.structs.replace(self._asked, handoff=handoff)
        self._cached_tokens = handoff.cached_tokens
        for index, token in enumerate(handoff.first_tokens or ()):
            cached_tokens = None if index else handoff.cached_tokens
            self.sink.on_item(Delta(token_ids=(token,), index=index, cached_tokens=cached_tokens))

    async def _route(self, action: Route) -> Event:
        total_s = self._deadlines.total_s
        failure = self._machine.failure
        if failure is not None:
            self._at = self._road
            self._look_elsewhere()
        try:
            async with asyncio.timeout_at(self._started + total_s):
                decision = await self._at.router.route(self._asked, action.excluded)
        except TimeoutError:
            return Failed(
                DeadlineExceeded(f"no worker within {total_s:g} s (route)", stage="route", after_s=total_s)
            )
        except KvoltError as error:
            if self._at is self._road:
                return Failed(error)
            self._at = self._road  # nobody there has room: it is theirs who answer
            return await self._route(action)
        self._booked = decision
        self._to_begin = True
        if self._machine.state is State.DONE:  # cancelled meanwhile
            self._free()
        elif failure is not None:
            self._count_elsewhere(failure, decision)
        return Routed(decision)

    async def _open(self, action: Open) -> Event:
        decision = self.decision = action.decision
        request = as_decided(self._asked, decision)
        if request.rendezvous is not None:
            request = await self._meet(request)
            if self._machine.state is State.DONE:  # cancelled meanwhile
                return Opened()
        try:
            self._call = await self._at.client.call(
                request, self, instance=decision.instance, deadlines=self._time_left(), decode=_decode_delta
            )
        except BaseException as error:
            self._free()
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

    # --- decode-first

    async def _meet(self, request: Request) -> Request:
        """The request as its decode worker gets it: with where it meets who computes the prompt, who has it at the same
        time. Where nobody does, it computes the prompt itself."""
        alone = msgspec.structs.replace(request, rendezvous=None)
        leg, before = self._prefill_leg, self._prefilling
        if before is not None:  # for a decode worker that has failed
            before.cancel()
        if leg is None or request.is_resumed or not leg.client.candidates():
            return alone
        # By a name of its own: the prompt of an attempt before may still be let go of there.
        name = RequestId(f"{self.request.request_id}/{self._machine.num_attempts}")
        asked = msgspec.structs.replace(self.request, request_id=name, prefill_only=True)
        pushing = PrefillCall(leg, asked, self._road.crew)
        try:
            async with asyncio.timeout(min(_PLACE_S, self._time_left().total_s)):
                decision = await pushing.place(frozenset())
        except (KvoltError, TimeoutError) as error:
            code = error.code if isinstance(error, KvoltError) else DeadlineExceeded.code
            self._road.stats.prefill_failures[code] += 1
            return alone
        meeting = new_meeting(decision.instance)
        if meeting is None or self._machine.state is State.DONE:
            pushing.give_up()
            return alone
        self._prefilling = pushing
        self._stages = StageTimes(queue_ms=pushing.wait_s * 1e3)
        self._road.crew.start(self._push(pushing, meeting), f"prompt {self.request.request_id}")
        return msgspec.structs.replace(request, rendezvous=meeting)

    async def _push(self, pushing: PrefillCall, meeting: Rendezvous) -> None:
        """Beside the answer, which comes without it as well."""
        try:
            await pushing.compute(self._time_left(), meeting)
        except KvoltError as error:
            if not isinstance(error, Cancelled):
                self._road.stats.prefill_failures[error.code] += 1
                log.info(
                    "the prompt of %s was not computed elsewhere: %s", self.request.request_id, error.message
                )
            return
        finally:
            if self._prefilling is pushing:
                self._prefilling = None
        self._road.stats.num_prefills += 1
        self.prefilled = pushing.decision
        if self._stages is not None:
            self._stages = msgspec.structs.replace(self._stages, prefill_ms=pushing.took_s * 1e3)

    def _let_go(self) -> None:
        """It is over: nobody will fetch what was computed for it, unless somebody has."""
        if self._prefilling is not None:
            self._prefilling.cancel()
        kept_by, self._kept_by = self._kept_by, None
        if kept_by is not None:
            let_go(self._road.crew, self._road.client.plane, kept_by, self.request.request_id)

    def _told(self, error: KvoltError | None) -> KvoltError | None:
        """The end as the receiver gets it: whether trying again would be the second time that it is computed."""
        self._let_go()
        if error is None:
            return None
        self._found(Outcome.FAILURE)
        return with_fields(error, gpu_work=self._machine.gpu_work)

    def _count(self, usage: Usage) -> None:
        """Each choice has its own, at its end; the prompt is the same."""
        if self._usage is not None:
            completion_tokens = self._usage.completion_tokens + usage.completion_tokens
            usage = msgspec.structs.replace(usage, completion_tokens=completion_tokens)
        self._usage = usage

    def _free(self, usage: Usage | None = None) -> None:
        booked, self._booked = self._booked, None
        if booked is not None:
            if booked.recall is not None:
                booked.recall.move = None
            self._at.router.free(booked, usage)

    def _time_left(self) -> Deadlines:
        total_s = max(self._started + self._deadlines.total_s - self._loop.time(), 0.0)
        return msgspec.structs.replace(self._deadlines, total_s=total_s)


def _known(stages: StageTimes) -> dict[str, Any]:
    return {name: value for name in stages.__struct_fields__ if (value := getattr(stages, name)) is not None}
