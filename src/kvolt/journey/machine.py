"""State machine of one request. No I/O: `handle` maps an event to an action.

A prompt may be computed by a prefill worker; if none can, the decode worker computes it. Before the first token a
request is retried from the start; afterwards it migrates and continues after its last token. Both are bounded and
happen only for errors that another worker may not have: never for a fault of the request, its total deadline or a
caller that has gone. A request that waits at its worker may be withdrawn and sent to another one; that is not a
failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    Unsupported,
    WorkerLost,
    with_message,
)
from kvolt.core.ids import InstanceId
from kvolt.journey import events
from kvolt.journey.events import Action, Event, GpuWork, JourneyState
from kvolt.router.port import Decision

_NOT_WORKER_FAULTS = (Fault.CALLER, Fault.NONE)
"""Faults that another worker would have as well."""

_REFUSALS = (Overloaded, Unavailable, Unsupported)
"""Errors of workers that have computed nothing for the request."""

_MAX_PREFILLS = 2
"""Prefill workers tried per request."""


def _is_unreachable(error: KvoltError) -> bool:
    """Whether no connection could be opened, or the worker was silent and may only be stalled."""
    is_silent = isinstance(error, WorkerLost) and error.fields.get("reason") == "heartbeat"
    return is_silent or isinstance(error, ConnectFailed)


class IllegalTransition(Exception):
    """A driver bug; the state has not changed."""


@dataclass(slots=True, eq=False)
class JourneyMachine:
    """See the module."""

    max_attempts: int
    max_moves: int = 0
    migration_limit: int = 0
    state: JourneyState = JourneyState.NEW
    num_attempts: int = 0
    """Workers that got the request from the start."""
    num_moves: int = 0
    """Confirmed withdrawals."""
    num_migrations: int = 0
    """Workers that got the request after its first token."""
    _num_prefills: int = 0
    """Prefill workers that failed."""
    _num_deaths: int = 0
    """Engines that died with this request in flight."""
    _num_silent: int = 0
    """Workers that missed the deadline of the first or the next token."""
    _instance: InstanceId | None = None
    _excluded: frozenset[InstanceId] = frozenset()
    _unreachable: frozenset[InstanceId] = frozenset()
    _loss: KvoltError | None = None
    """Error that interrupted the answer last."""
    failure: KvoltError | None = None
    """Error of the last attempt."""
    gpu_work: GpuWork = GpuWork.NONE

    @property
    def can_move(self) -> bool:
        """Whether the request can be withdrawn now."""
        return self.state is JourneyState.WAITING and self.num_moves < self.max_moves

    def handle(self, event: Event) -> Action:
        step = _TRANSITIONS.get((self.state, type(event)))
        if step is None:
            raise IllegalTransition(f"{type(event).__name__} in state {self.state}")
        return step(self, event)

    def _start(self, event: events.Start) -> Action:
        if event.is_remote_prefill:
            self.state = JourneyState.PREFILLING
            return events.Prefill(self._excluded)
        return self._route()

    def _route_after_prefill(self, event: events.Prefilled) -> Action:
        self.gpu_work = GpuWork.SOME
        return self._route()

    def _on_prefill_failed(self, event: events.PrefillFailed) -> Action:
        """Try another prefill worker, then let the decode worker compute the prompt."""
        error = event.error
        if isinstance(error, DeadlineExceeded) and error.fields.get("stage") in ("total", "route"):
            return self._end(error)
        if event.instance_id is None:
            return self._route()
        if not isinstance(error, _REFUSALS):
            self.gpu_work = GpuWork.UNKNOWN
        self._num_prefills += 1
        self._excluded |= {event.instance_id}
        is_slow = isinstance(error, DeadlineExceeded)
        is_final = not is_slow and self._is_final(error)
        if self._num_deaths > 1:
            return self._end(error)
        if not is_final and self._num_prefills < _MAX_PREFILLS:
            return events.Prefill(self._excluded)
        return self._route()  # the decode worker reports a fault of the request as well

    def _route(self) -> Action:
        self._excluded = frozenset()  # failed prefill workers are no decode workers
        self.state = JourneyState.ROUTING
        return events.Route(self._excluded)

    def _open(self, event: events.Routed) -> Action:
        self.num_attempts += 1
        return self._open_at(event.decision, JourneyState.OPENING)

    def _open_at(self, decision: Decision, state: JourneyState) -> Action:
        self.state = state
        self._instance = decision.instance.id
        return events.Open(decision)

    def _wait(self, event: events.Opened) -> Action:
        self.state = JourneyState.WAITING if self.state is JourneyState.OPENING else JourneyState.MIGRATING
        return events.Wait()

    def _stream(self, event: events.Delivered) -> Action:
        self.state = JourneyState.STREAMING
        self.gpu_work = GpuWork.SOME
        return events.Wait()

    def _on_route_failed(self, event: events.Failed) -> Action:
        # The last attempt's error says more than "no worker left".
        none_left = self.failure is not None and isinstance(event.error, Unavailable)
        return self._end(self.failure if none_left else event.error)

    def _retry(self, event: events.Failed) -> Action:
        if self.state is JourneyState.WAITING and not isinstance(event.error, _REFUSALS):
            self.gpu_work = GpuWork.UNKNOWN
        if self._is_final(event.error) or self.num_attempts >= self.max_attempts:
            return self._end(event.error)
        return self._reroute(event.error, JourneyState.ROUTING)

    def _is_final(self, error: KvoltError) -> bool:
        """Whether no other worker is tried: the fault is not the worker's, or two engines died with this request, or
        two workers missed the deadline of a token. The request itself may be the cause then."""
        if isinstance(error, DeadlineExceeded):
            is_silent = error.fields.get("stage") in ("first", "between")
            self._num_silent += is_silent
            return not is_silent or self._num_silent > 1
        if isinstance(error, EngineDied):
            self._num_deaths += 1
        return error.fault in _NOT_WORKER_FAULTS or self._num_deaths > 1

    def _reroute(self, error: KvoltError, state: JourneyState) -> Action:
        assert self._instance is not None
        self.failure = error
        failed = frozenset([self._instance])
        self._excluded |= failed
        if _is_unreachable(error):
            self._unreachable |= failed
        else:
            self._unreachable -= failed
        self.state = state
        return events.Route(self._excluded, self._unreachable & self._excluded)

    def _move(self, event: events.WithdrawalConfirmed) -> Action:
        if not self.can_move:
            raise IllegalTransition(f"{type(event).__name__} after {self.num_moves} moves")
        self.num_moves += 1
        return self._open_at(event.decision, JourneyState.OPENING)

    # --- mid-answer

    def _migrate(self, event: events.Failed) -> Action:
        if self._is_final(event.error) or not self.migration_limit:
            return self._end(event.error)
        if self.num_migrations >= self.migration_limit:
            message = (
                f"{event.error.message}; the request was migrated {self.num_migrations} times, the maximum set by "
                "migration_limit: send it again"
            )
            return self._end(with_message(event.error, message))
        self._loss = event.error
        self._excluded = frozenset()  # the answer progressed since they failed; they may have recovered
        return self._reroute(event.error, JourneyState.REROUTING)

    def _on_reroute_failed(self, event: events.Failed) -> Action:
        return self._end(self._migration_error(event.error))

    def _reopen(self, event: events.Routed) -> Action:
        self.num_migrations += 1
        return self._open_at(event.decision, JourneyState.REOPENING)

    def _retry_migration(self, event: events.Failed) -> Action:
        if self._is_final(event.error) or self.num_migrations >= self.migration_limit:
            return self._end(self._migration_error(event.error))
        return self._reroute(event.error, JourneyState.REROUTING)

    def _migration_error(self, error: KvoltError) -> KvoltError:
        """Error of a failed migration: that of the lost worker, since others may blame a request that was fine until
        then. A deadline is reported as such."""
        if isinstance(error, DeadlineExceeded) or self._loss is None:
            return error
        message = (
            f"{self._loss.message}; the request could not be migrated to another worker: {error.message}"
        )
        return with_message(self._loss, message)

    # ---

    def _finish(self, event: events.Finished) -> Action:
        return self._end(None)

    def _stop(self, event: events.Stopped) -> Action:
        return self._end(Cancelled("the caller cancelled"))

    def _end(self, error: KvoltError | None) -> Action:
        self.state = JourneyState.DONE
        if isinstance(error, EngineDied) and self._num_deaths > 1:  # not retryable by clients either
            died = f"{self._num_deaths} engines died with this request, last error: {error.message}"
            error = EngineFailed(died, **error.fields)
        return events.End(error)


_TRANSITIONS: dict[tuple[JourneyState, type[Any]], Callable[[JourneyMachine, Any], Action]] = {
    (JourneyState.NEW, events.Start): JourneyMachine._start,
    (JourneyState.PREFILLING, events.Prefilled): JourneyMachine._route_after_prefill,
    (JourneyState.PREFILLING, events.PrefillFailed): JourneyMachine._on_prefill_failed,
    (JourneyState.ROUTING, events.Routed): JourneyMachine._open,
    (JourneyState.ROUTING, events.Failed): JourneyMachine._on_route_failed,
    (JourneyState.OPENING, events.Opened): JourneyMachine._wait,
    (JourneyState.OPENING, events.Failed): JourneyMachine._retry,
    (JourneyState.WAITING, events.Delivered): JourneyMachine._stream,
    (JourneyState.WAITING, events.Failed): JourneyMachine._retry,
    (JourneyState.WAITING, events.WithdrawalConfirmed): JourneyMachine._move,
    (JourneyState.WAITING, events.Finished): JourneyMachine._finish,
    (JourneyState.STREAMING, events.Failed): JourneyMachine._migrate,
    (JourneyState.STREAMING, events.Finished): JourneyMachine._finish,
    (JourneyState.REROUTING, events.Routed): JourneyMachine._reopen,
    (JourneyState.REROUTING, events.Failed): JourneyMachine._on_reroute_failed,
    (JourneyState.REOPENING, events.Opened): JourneyMachine._wait,
    (JourneyState.REOPENING, events.Failed): JourneyMachine._retry_migration,
    (JourneyState.MIGRATING, events.Delivered): JourneyMachine._stream,
    (JourneyState.MIGRATING, events.Failed): JourneyMachine._retry_migration,
    (JourneyState.MIGRATING, events.Finished): JourneyMachine._finish,
    **{
        (state, events.Stopped): JourneyMachine._stop
        for state in JourneyState
        if state is not JourneyState.DONE
    },
}
