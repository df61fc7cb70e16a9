"""What happens to one request and what is to be done next: states, events and actions, no I/O.

A prompt may be computed by another worker than its answer; where nobody can, whoever answers computes it. A request of
which nothing was delivered may be tried elsewhere from its beginning; once something was, only from where it broke off
(a migration). Both are bounded, and whatever the error is unless another worker would fail as well: never for the
request's own fault, a deadline of the whole request or a caller who has gone. One that still waits at its worker may be
taken back and sent elsewhere, which is no failure of anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

from kvolt.core.errors import (
    Cancelled,
    ConnectFailed,
    DeadlineExceeded,
    EngineDied,
    EngineFailed,
    Fault,
    KvoltError,
    Overloaded,
    Unavailable,
    WorkerLost,
    reworded,
)
from kvolt.core.ids import InstanceId
from kvolt.router.port import Decision


class State(StrEnum):
    NEW = "new"
    PREFILLING = "prefilling"
    """A worker that does nothing else computes its prompt, or one is looked for."""
    ROUTING = "routing"
    OPENING = "opening"
    WAITING = "waiting"
    """A worker has the request and has answered nothing."""
    STREAMING = "streaming"
    REROUTING = "rerouting"
    """Its worker was lost amid the answer: who can go on?"""
    REOPENING = "reopening"
    RESUMING = "resuming"
    """Another worker has it, and has not gone on yet."""
    DONE = "done"


class GpuWork(StrEnum):
    """Spent on a request that has ended badly."""

    NONE = "none"
    UNKNOWN = "unknown"
    """A worker had it, and was lost or failed before the first token."""
    SOME = "some"


# --- what happens


class Start(NamedTuple):
    is_remote: bool = False
    """Its prompt is to be computed elsewhere than its answer."""


class Prefilled(NamedTuple):
    """Its prompt is computed, and can be gone on with."""


class PrefillFailed(NamedTuple):
    error: KvoltError
    instance_id: InstanceId | None
    """Who has failed; None where nobody was asked."""


class Routed(NamedTuple):
    decision: Decision


class Opened(NamedTuple):
    pass


class Delivered(NamedTuple):
    """Something of the answer, or more of it, has reached the receiver. Told at the latest before the end."""


class Failed(NamedTuple):
    error: KvoltError


class TakenBack(NamedTuple):
    """Its worker has given it back, of which nothing was begun; there is another place for it."""

    decision: Decision


class Finished(NamedTuple):
    pass


class Stopped(NamedTuple):
    """Whoever asked has gone."""


Event = (
    Start | Prefilled | PrefillFailed | Routed | Opened | Delivered | Failed | TakenBack | Finished | Stopped
)


# --- what to do


class Prefill(NamedTuple):
    excluded: frozenset[InstanceId]
    """Workers that have failed to compute this prompt."""


class Route(NamedTuple):
    excluded: frozenset[InstanceId]
    """Instances that have failed this request."""
    out_of_reach: frozenset[InstanceId] = frozenset()
    """Those that failed it by that alone: if no other is left, they may be asked again once they answer."""


class Open(NamedTuple):
    decision: Decision


class Wait(NamedTuple):
    pass


class End(NamedTuple):
    error: KvoltError | None


Action = Prefill | Route | Open | Wait | End


_NOT_THE_WORKER = (Fault.CALLER, Fault.NOBODY)
"""Another worker would fail as well."""

_MAX_PREFILLS = 2
"""Workers that are asked for a prompt alone."""


def _is_out_of_reach(error: KvoltError) -> bool:
    """Not that it failed: no connection came about, or it was silent and may have been stalled."""
    is_silent = isinstance(error, WorkerLost) and error.fields.get("reason") == "heartbeat"
    return is_silent or isinstance(error, ConnectFailed)


class IllegalTransition(Exception):
    """A fault of the driver: the machine has not changed."""


class JourneyMachine:
    """One request's. `on` takes an event and says what to do."""

    __slots__ = (
        "_excluded",
        "_instance",
        "_loss",
        "_max_attempts",
        "_max_moves",
        "_migration_limit",
        "_num_deaths",
        "_num_prefills",
        "_num_silent",
        "_out_of_reach",
        "failure",
        "gpu_work",
        "num_attempts",
        "num_migrations",
        "num_moves",
        "state",
    )

    def __init__(self, max_attempts: int, max_moves: int = 0, migration_limit: int = 0) -> None:
        self.state = State.NEW
        self.num_attempts = 0
        """Workers that were asked for it from its beginning."""
        self.num_moves = 0
        """How often it was taken back."""
        self.num_migrations = 0
        """Workers that were asked to go on with it."""
        self._max_attempts = max_attempts
        self._max_moves = max_moves
        self._migration_limit = migration_limit
        self._num_prefills = 0
        """Workers that were asked for the prompt alone."""
        self._num_deaths = 0
        """Engines that died with it inside."""
        self._num_silent = 0
        """Workers that had it and sent no token by the deadline, the first one or the next."""
        self._instance: InstanceId | None = None
        self._excluded: frozenset[InstanceId] = frozenset()
        self._out_of_reach: frozenset[InstanceId] = frozenset()
        self._loss: KvoltError | None = None
        """What its answer was last broken off by."""
        self.failure: KvoltError | None = None
        """Why the last attempt failed."""
        self.gpu_work = GpuWork.NONE

    @property
    def may_move(self) -> bool:
        """Whether it can be taken back now."""
        return self.state is State.WAITING and self.num_moves < self._max_moves

    def on(self, event: Event) -> Action:
        step = _TRANSITIONS.get((self.state, type(event)))
        if step is None:
            raise IllegalTransition(f"{type(event).__name__} in state {self.state}")
        return step(self, event)

    def _start(self, event: Start) -> Action:
        if event.is_remote:
            self.state = State.PREFILLING
            return Prefill(self._excluded)
        return self._route_anew()

    def _go_on_after_prefill(self, event: Prefilled) -> Action:
        self.gpu_work = GpuWork.SOME
        return self._route_anew()

    def _fail_to_prefill(self, event: PrefillFailed) -> Action:
        """Another prefill worker, then whoever answers: that one can compute a prompt, too."""
        error = event.error
        if isinstance(error, DeadlineExceeded) and error.fields.get("stage") in ("total", "route"):
            return self._end(error)
        if event.instance_id is None:
            return self._route_anew()
        if not isinstance(error, Overloaded | Unavailable):
            self.gpu_work = GpuWork.UNKNOWN
        self._num_prefills += 1
        self._excluded |= {event.instance_id}
        is_slow = isinstance(error, DeadlineExceeded)
        is_final = not is_slow and self._is_final(error)
        if self._num_deaths > 1:
            return self._end(error)
        if not is_final and self._num_prefills < _MAX_PREFILLS:
            return Prefill(self._excluded)
        return self._route_anew()  # what is wrong with the request itself, whoever answers says as well

    def _route_anew(self) -> Action:
        self._excluded = frozenset()  # who failed to compute the prompt is nobody who answers
        self.state = State.ROUTING
        return Route(self._excluded)

    def _open(self, event: Routed) -> Action:
        self.state = State.OPENING
        self.num_attempts += 1
        self._instance = event.decision.instance.id
        return Open(event.decision)

    def _wait(self, event: Opened) -> Action:
        self.state = State.WAITING
        return Wait()

    def _stream(self, event: Delivered) -> Action:
        self.state = State.STREAMING
        self.gpu_work = GpuWork.SOME
        return Wait()

    def _fail_to_route(self, event: Failed) -> Action:
        # That nobody is left to try says less than why the last one failed.
        left_alone = self.failure is not None and isinstance(event.error, Unavailable)
        return self._end(self.failure if left_alone else event.error)

    def _fail_before_answer(self, event: Failed) -> Action:
        is_refusal = isinstance(event.error, Overloaded | Unavailable)
        if self.state is State.WAITING and not is_refusal:
            self.gpu_work = GpuWork.UNKNOWN
        if self._is_final(event.error) or self.num_attempts >= self._max_attempts:
            return self._end(event.error)
        return self._look_elsewhere(event.error, State.ROUTING)

    def _is_final(self, error: KvoltError) -> bool:
        """Whether no other worker is asked. Two engines that died of the same request, wherever in it: it may be the
        request, and a third would be one too many. Likewise two workers that sent no token in time, the first one or
        the next."""
        if isinstance(error, DeadlineExceeded):
            is_silent = error.fields.get("stage") in ("first", "between")
            self._num_silent += is_silent
            return not is_silent or self._num_silent > 1
        if isinstance(error, EngineDied):
            self._num_deaths += 1
        return error.fault in _NOT_THE_WORKER or self._num_deaths > 1

    def _look_elsewhere(self, error: KvoltError, state: State) -> Action:
        assert self._instance is not None
        self.failure = error
        failed = frozenset([self._instance])
        self._excluded |= failed
        if _is_out_of_reach(error):
            self._out_of_reach |= failed
        else:
            self._out_of_reach -= failed
        self.state = state
        return Route(self._excluded, self._out_of_reach & self._excluded)

    def _move(self, event: TakenBack) -> Action:
        if not self.may_move:
            raise IllegalTransition(f"{type(event).__name__} a {self.num_moves + 1}. time")
        self.state = State.OPENING
        self.num_moves += 1
        self._instance = event.decision.instance.id
        return Open(event.decision)

    # --- amid an answer

    def _break_off(self, event: Failed) -> Action:
        if self._is_final(event.error) or not self._migration_limit:
            return self._end(event.error)
        if self.num_migrations >= self._migration_limit:
            message = (
                f"{event.error.message}; the request was migrated {self.num_migrations} times already, the most that "
                "migration_limit allows: send it again"
            )
            return self._end(reworded(event.error, message))
        self._loss = event.error
        self._excluded = frozenset()  # it got further since they failed it: they may be well again
        return self._look_elsewhere(event.error, State.REROUTING)

    def _fail_to_reroute(self, event: Failed) -> Action:
        return self._end(self._unable(event.error))

    def _reopen(self, event: Routed) -> Action:
        self.state = State.REOPENING
        self.num_migrations += 1
        self._instance = event.decision.instance.id
        return Open(event.decision)

    def _resume(self, event: Opened) -> Action:
        self.state = State.RESUMING
        return Wait()

    def _go_further(self, event: Delivered) -> Action:
        self.state = State.STREAMING
        return Wait()

    def _fail_to_resume(self, event: Failed) -> Action:
        if self._is_final(event.error) or self.num_migrations >= self._migration_limit:
            return self._end(self._unable(event.error))
        return self._look_elsewhere(event.error, State.REROUTING)

    def _unable(self, error: KvoltError) -> KvoltError:
        """Nobody could go on. That is the fault of who was lost: who would not go on may even blame the request, which
        was fine until then. A deadline is its own reason."""
        if isinstance(error, DeadlineExceeded) or self._loss is None:
            return error
        message = (
            f"{self._loss.message}; the request could not be migrated to another worker: {error.message}"
        )
        return reworded(self._loss, message)

    # ---

    def _finish(self, event: Finished) -> Action:
        return self._end(None)

    def _stop(self, event: Stopped) -> Action:
        return self._end(Cancelled("the caller cancelled"))

    def _end(self, error: KvoltError | None) -> Action:
        self.state = State.DONE
        if isinstance(error, EngineDied) and self._num_deaths > 1:  # to be sent again by no client either
            died = f"{self._num_deaths} engines died with this request, the last one so: {error.message}"
            error = EngineFailed(died, **error.fields)
        return End(error)


_TRANSITIONS: dict[tuple[State, type[Any]], Callable[[JourneyMachine, Any], Action]] = {
    (State.NEW, Start): JourneyMachine._start,
    (State.NEW, Stopped): JourneyMachine._stop,
    (State.PREFILLING, Prefilled): JourneyMachine._go_on_after_prefill,
    (State.PREFILLING, PrefillFailed): JourneyMachine._fail_to_prefill,
    (State.PREFILLING, Stopped): JourneyMachine._stop,
    (State.ROUTING, Routed): JourneyMachine._open,
    (State.ROUTING, Failed): JourneyMachine._fail_to_route,
    (State.ROUTING, Stopped): JourneyMachine._stop,
    (State.OPENING, Opened): JourneyMachine._wait,
    (State.OPENING, Failed): JourneyMachine._fail_before_answer,
    (State.OPENING, Stopped): JourneyMachine._stop,
    (State.WAITING, Delivered): JourneyMachine._stream,
    (State.WAITING, Failed): JourneyMachine._fail_before_answer,
    (State.WAITING, TakenBack): JourneyMachine._move,
    (State.WAITING, Finished): JourneyMachine._finish,
    (State.WAITING, Stopped): JourneyMachine._stop,
    (State.STREAMING, Failed): JourneyMachine._break_off,
    (State.STREAMING, Finished): JourneyMachine._finish,
    (State.STREAMING, Stopped): JourneyMachine._stop,
    (State.REROUTING, Routed): JourneyMachine._reopen,
    (State.REROUTING, Failed): JourneyMachine._fail_to_reroute,
    (State.REROUTING, Stopped): JourneyMachine._stop,
    (State.REOPENING, Opened): JourneyMachine._resume,
    (State.REOPENING, Failed): JourneyMachine._fail_to_resume,
    (State.REOPENING, Stopped): JourneyMachine._stop,
    (State.RESUMING, Delivered): JourneyMachine._go_further,
    (State.RESUMING, Failed): JourneyMachine._fail_to_resume,
    (State.RESUMING, Finished): JourneyMachine._finish,
    (State.RESUMING, Stopped): JourneyMachine._stop,
}
