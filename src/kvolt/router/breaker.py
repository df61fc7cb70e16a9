"""Circuit breakers: a worker that fails its requests gets no more until one succeeds. Pure.

One breaker per instance with recent failures; other instances cost nothing.

    closed      takes requests; opens when more than half of its recent requests failed
    open        takes none until its backoff is over
    half-open   takes one request at a time, each until its first token; the first success closes it, the
                first failure opens it again for twice as long

An open breaker is advice, not a gate: if all candidates are open, all are used, so that a common failure (a request
that no engine can compute, a shared dependency) takes nothing out of service. Prompts for prefill workers are the
exception, because a decode worker can compute them.

The outcome of a request sent before the breaker opened is ignored.

A request cancelled by its client after the first token shows that the worker starts answers, not that it completes
them: it counts as answered unless the worker has failed mid-stream since its last complete answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvolt.core.errors import (
    ConnectFailed,
    DeadlineExceeded,
    Fault,
    KvoltError,
    Overloaded,
    ProtocolError,
    Unavailable,
)
from kvolt.core.ids import InstanceId

BREAKER_DETAILS = "breakers"
"""Key in the process status, see `router.metrics.describe_breakers`."""
ALL_FAILING = "all_failing"
"""Reason of Unavailable: the breakers of all candidates are open, and the caller has an alternative to them."""
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0

_FADING = 0.8
"""Decay of earlier outcomes per outcome: the last five weigh about as much as all before them."""
_PRIOR = 2.0
"""Successes credited to an instance without history: three failures in a row open its breaker."""
_OPENS_ABOVE = 0.5
_FORGOTTEN_BELOW = 0.05


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Outcome(StrEnum):
    """End of an attempt as evidence about the worker."""

    ANSWERED = "answered"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """Rejected, never sent, lost with its connection, or the request's own fault."""
    LEFT = "left"
    """Cancelled by its client. After the first token: see the module."""


def outcome_of(error: KvoltError | None) -> Outcome:
    """Outcome of the stream that ended with this error.

    A rejection is no failure: a worker that reports itself full works. Neither is a lost connection: the endpoint
    client skips the worker until it can be dialed again.
    """
    if error is None:
        return Outcome.ANSWERED
    if isinstance(error, Overloaded | Unavailable):
        return Outcome.UNKNOWN
    if isinstance(error, ConnectFailed | ProtocolError):  # reported by the worker about its backend
        return Outcome.FAILED
    if isinstance(error, DeadlineExceeded):
        is_silent = error.fields.get("stage") in ("first", "between")
        return Outcome.FAILED if is_silent else Outcome.UNKNOWN
    return Outcome.FAILED if error.fault is Fault.SERVER else Outcome.UNKNOWN


@dataclass(slots=True)
class Attempt:
    """A request at an instance that has a breaker, from `Breakers.start_attempt` to `end_attempt`."""

    num_opened: int
    """Number of times the breaker had opened when the request was sent."""
    awaits_first_token: bool = True


class BreakerView(NamedTuple):
    """State of a breaker, for metrics and display."""

    state: BreakerState
    failure_rate: float
    retry_in_s: float
    """Time until the next probe; 0 unless open."""


@dataclass(slots=True)
class _Breaker:
    is_closed: bool = True
    answered: float = 0.0
    failed: float = 0.0
    """Decayed counts of requests by outcome."""
    fails_mid_stream: bool = False
    """A request failed after its first token, and none has completed since."""
    num_opened: int = 0
    backoff_s: float = FIRST_BACKOFF_S
    """Duration of the next open period."""
    retry_at: float = 0.0
    num_awaiting: int = 0
    """Attempts since it opened that have no first token."""

    @property
    def failure_rate(self) -> float:
        return self.failed / (self.failed + self.answered + _PRIOR)

    def record(self, is_answered: bool) -> None:
        self.answered = self.answered * _FADING + is_answered
        self.failed = self.failed * _FADING + (not is_answered)

    def open(self, now: float) -> None:
        self.is_closed = False
        self.num_opened += 1
        self.num_awaiting = 0
        self.retry_at = now + self.backoff_s
        self.backoff_s = min(self.backoff_s * 2.0, MAX_BACKOFF_S)

    def is_blocked(self, now: float) -> bool:
        return not self.is_closed and (now < self.retry_at or self.num_awaiting > 0)

    def view(self, now: float) -> BreakerView:
        if self.is_closed:
            return BreakerView(BreakerState.CLOSED, self.failure_rate, 0.0)
        wait_s = max(self.retry_at - now, 0.0)
        state = BreakerState.OPEN if wait_s else BreakerState.HALF_OPEN
        return BreakerView(state, self.failure_rate, wait_s)


class Breakers:
    """Breakers of one endpoint's instances, as seen by one router."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._breakers: dict[InstanceId, _Breaker] = {}
        self._num_not_closed = 0
        self.num_opened = 0
        self.on_change: Callable[[InstanceId, BreakerView], None] = lambda instance_id, view: None
        """Called when a breaker opens or closes. Must not raise."""

    def __bool__(self) -> bool:
        """Whether any instance has failed recently."""
        return bool(self._breakers)

    @property
    def is_any_open(self) -> bool:
        """Whether any breaker is open or half-open: `blocked` may be non-empty."""
        return self._num_not_closed > 0

    def blocked(
        self, candidates: Iterable[InstanceId], *, may_block_all: bool = False
    ) -> frozenset[InstanceId]:
        """Candidates to skip now; empty if that would be all of them, unless it may."""
        if not self._num_not_closed:
            return frozenset()
        now, names = self._now(), tuple(candidates)
        blocked = frozenset(
            each
            for each in names
            if (breaker := self._breakers.get(each)) is not None and breaker.is_blocked(now)
        )
        return blocked if may_block_all or len(blocked) < len(names) else frozenset()

    def failure_rates(self, instances: Sequence[InstanceId]) -> list[float] | None:
        """Recent failure rate of each instance; None if none has failed."""
        if not self._breakers:
            return None
        breaker = self._breakers
        return [breaker[each].failure_rate if each in breaker else 0.0 for each in instances]

    def start_attempt(self, instance_id: InstanceId) -> Attempt | None:
        """Register a request. None if the instance has no breaker."""
        breaker = self._breakers.get(instance_id)
        if breaker is None:
            return None
        if not breaker.is_closed:
            breaker.num_awaiting += 1
        return Attempt(breaker.num_opened)

    def mark_first_token(self, instance_id: InstanceId, attempt: Attempt | None) -> None:
        breaker = self._breakers.get(instance_id)
        if breaker is not None and attempt is not None:
            self._stop_waiting(breaker, attempt)

    def end_attempt(self, instance_id: InstanceId, attempt: Attempt | None, outcome: Outcome) -> None:
        """Report the outcome. Once per attempt."""
        breaker = self._breakers.get(instance_id)
        if breaker is None:
            if outcome is not Outcome.FAILED:
                return
            breaker = self._breakers[instance_id] = _Breaker()
        num_opened = 0 if attempt is None else attempt.num_opened
        has_started = attempt is not None and not attempt.awaits_first_token
        if attempt is not None:
            self._stop_waiting(breaker, attempt)
        if num_opened != breaker.num_opened:
            return
        if outcome is Outcome.LEFT and has_started and not breaker.fails_mid_stream:
            outcome = Outcome.ANSWERED
        elif outcome in (Outcome.ANSWERED, Outcome.FAILED):
            breaker.fails_mid_stream = outcome is Outcome.FAILED and (breaker.fails_mid_stream or has_started)
        else:
            return
        breaker.record(outcome is Outcome.ANSWERED)
        if outcome is Outcome.FAILED:
            if not breaker.is_closed or breaker.failure_rate > _OPENS_ABOVE:
                self._open(instance_id, breaker)
        elif not breaker.is_closed:
            self._close(instance_id, breaker)
        elif breaker.failure_rate < _FORGOTTEN_BELOW:
            del self._breakers[instance_id]

    def retain(self, instances: Iterable[InstanceId]) -> None:
        """Drop the breakers of all other instances."""
        if not self._breakers:
            return
        for removed_id in self._breakers.keys() - set(instances):
            self._num_not_closed -= not self._breakers.pop(removed_id).is_closed

    def views(self) -> dict[InstanceId, BreakerView]:
        """State of every instance with recent failures."""
        now = self._now()
        return {instance_id: breaker.view(now) for instance_id, breaker in self._breakers.items()}

    # ---

    def _stop_waiting(self, breaker: _Breaker, attempt: Attempt) -> None:
        if attempt.awaits_first_token and not breaker.is_closed and attempt.num_opened == breaker.num_opened:
            breaker.num_awaiting -= 1
        attempt.awaits_first_token = False

    def _open(self, instance_id: InstanceId, breaker: _Breaker) -> None:
        self._num_not_closed += breaker.is_closed
        self.num_opened += 1
        now = self._now()
        breaker.open(now)
        self.on_change(instance_id, breaker.view(now))

    def _close(self, instance_id: InstanceId, breaker: _Breaker) -> None:
        """Keeps the failure counts: one or two more failures open it again, for longer."""
        self._num_not_closed -= 1
        breaker.is_closed = True
        self.on_change(instance_id, breaker.view(self._now()))
