"""What happens to one request and what is to be done next: states, events and actions, no I/O.

A request of which nothing was delivered may be tried elsewhere; once something was, it is never sent a
second time. Nor is one whose worker has begun it: but one that still waits there may be taken back and sent elsewhere,
which is no failure of anybody. Handoff and migration will be further states of this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

from kvolt.core.errors import Cancelled, EngineDied, KvoltError, Overloaded, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.router.port import Decision


class State(StrEnum):
    NEW = "new"
    ROUTING = "routing"
    OPENING = "opening"
    WAITING = "waiting"
    """A worker has the request and has answered nothing."""
    STREAMING = "streaming"
    DONE = "done"


class GpuWork(StrEnum):
    """Spent on a request that has ended badly."""

    NONE = "none"
    UNKNOWN = "unknown"
    """A worker had it, and was lost or failed before the first token."""
    SOME = "some"


# --- what happens


class Start(NamedTuple):
    pass


class Routed(NamedTuple):
    decision: Decision


class Opened(NamedTuple):
    pass


class Delivered(NamedTuple):
    """Something of the answer has reached the receiver. Told at the latest before the end."""


class Failed(NamedTuple):
    error: KvoltError


class TakenBack(NamedTuple):
    """Its worker has given it back, of which nothing was begun; there is another place for it."""

    decision: Decision


class Finished(NamedTuple):
    pass


class Stopped(NamedTuple):
    """Whoever asked has gone."""


Event = Start | Routed | Opened | Delivered | Failed | TakenBack | Finished | Stopped


# --- what to do


class Route(NamedTuple):
    excluded: frozenset[InstanceId]
    """Instances that have failed this request."""


class Open(NamedTuple):
    decision: Decision


class Wait(NamedTuple):
    pass


class End(NamedTuple):
    error: KvoltError | None


Action = Route | Open | Wait | End


class IllegalTransition(Exception):
    """A fault of the driver: the machine has not changed."""


class JourneyMachine:
    """One request's. `on` takes an event and says what to do."""

    __slots__ = (
        "_excluded",
        "_instance",
        "_max_attempts",
        "_max_moves",
        "failure",
        "gpu_work",
        "num_attempts",
        "num_moves",
        "state",
    )

    def __init__(self, max_attempts: int, max_moves: int = 0) -> None:
        self.state = State.NEW
        self.num_attempts = 0
        self.num_moves = 0
        """How often it was taken back."""
        self._max_attempts = max_attempts
        self._max_moves = max_moves
        self._instance: InstanceId | None = None
        self._excluded: frozenset[InstanceId] = frozenset()
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
        # Two engines that died of the same request: it may be the request, and a third would be one too many.
        is_deadly = isinstance(event.error, EngineDied) and isinstance(self.failure, EngineDied)
        if is_deadly or not event.error.retryable or self.num_attempts >= self._max_attempts:
            return self._end(event.error)
        assert self._instance is not None
        self.failure = event.error
        self._excluded |= {self._instance}
        self.state = State.ROUTING
        return Route(self._excluded)

    def _move(self, event: TakenBack) -> Action:
        if not self.may_move:
            raise IllegalTransition(f"{type(event).__name__} a {self.num_moves + 1}. time")
        self.state = State.OPENING
        self.num_moves += 1
        self._instance = event.decision.instance.id
        return Open(event.decision)

    def _fail(self, event: Failed) -> Action:
        return self._end(event.error)

    def _finish(self, event: Finished) -> Action:
        return self._end(None)

    def _stop(self, event: Stopped) -> Action:
        return self._end(Cancelled("the caller cancelled"))

    def _end(self, error: KvoltError | None) -> Action:
        self.state = State.DONE
        return End(error)


_TRANSITIONS: dict[tuple[State, type[Any]], Callable[[JourneyMachine, Any], Action]] = {
    (State.NEW, Start): JourneyMachine._start,
    (State.NEW, Stopped): JourneyMachine._stop,
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
    (State.STREAMING, Failed): JourneyMachine._fail,
    (State.STREAMING, Finished): JourneyMachine._finish,
    (State.STREAMING, Stopped): JourneyMachine._stop,
}
