"""Circuit breakers: workers that fail their requests get no more of them until one has been answered. Pure.

One breaker per instance that has failed a request lately; an instance without one costs nothing.

    closed      takes requests; opens when more than half of its recent requests failed
    open        takes none until its back-off is over
    half-open   takes one request at a time, each until its first token; the first that is answered closes it, the
                first that fails opens it again for twice as long

An open breaker is advice, not a gate: where every candidate is open all of them are used, so that a failure which is
everywhere (a request that no engine can compute, a dependency that all share) takes nothing out of service.

A request that was sent before a breaker opened says nothing about what comes after: its end is ignored then.

An answer whose client left shows that the worker begins answers, not that it completes them: it counts as answered
unless the worker has failed amid an answer since it completed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0

_FADING = 0.8
"""What an outcome counts after the next one: the last five weigh about as much as all before them."""
_PRIOR = 2.0
"""Answered requests that an instance without history is credited with: three failures in a row open its breaker."""
_OPENS_ABOVE = 0.5
_FORGOTTEN_BELOW = 0.05


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Outcome(StrEnum):
    """How an attempt ended, as far as that says something about the worker."""

    ANSWERED = "answered"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """Refused, never sent, lost with its connection, or at fault itself."""
    LEFT = "left"
    """Cancelled by its client. After a first token: see the module."""


def outcome_of(error: KvoltError | None) -> Outcome:
    """The outcome that the end of a stream to a worker stands for.

    A refusal is no failure: a worker that says it is full works. Neither is a lost connection: the client leaves the
    worker out for as long as it cannot be dialed.
    """
    if error is None:
        return Outcome.ANSWERED
    if isinstance(error, Overloaded | Unavailable):
        return Outcome.UNKNOWN
    if isinstance(error, ConnectFailed | ProtocolError):  # the worker says so of what is behind it
        return Outcome.FAILED
    if isinstance(error, DeadlineExceeded):
        is_silent = error.fields.get("stage") in ("first", "between")
        return Outcome.FAILED if is_silent else Outcome.UNKNOWN
    return Outcome.FAILED if error.fault is Fault.SERVER else Outcome.UNKNOWN


class Attempt:
    """A request at an instance whose breaker exists, from `Breakers.send` to `Breakers.end`."""

    __slots__ = ("is_waiting", "num_opened")

    def __init__(self, num_opened: int) -> None:
        self.num_opened = num_opened
        """How often the breaker had opened when it was sent."""
        self.is_waiting = True
        """It has no first token yet."""


class BreakerView(NamedTuple):
    """A breaker, for metrics and people."""

    state: BreakerState
    failure_rate: float
    retry_in_s: float
    """Until the next request is tried there; 0 unless it is open."""


class _Breaker:
    __slots__ = (
        "answered",
        "backoff_s",
        "failed",
        "fails_amid",
        "is_closed",
        "num_opened",
        "num_waiting",
        "retry_at",
    )

    def __init__(self) -> None:
        self.is_closed = True
        self.answered = 0.0
        self.failed = 0.0
        """Requests that ended so, fading."""
        self.fails_amid = False
        """A request failed after its first token, and none was answered to its end since."""
        self.num_opened = 0
        self.backoff_s = FIRST_BACKOFF_S
        """The next time that it opens."""
        self.retry_at = 0.0
        self.num_waiting = 0
        """Attempts since it opened that have no first token."""

    @property
    def failure_rate(self) -> float:
        return self.failed / (self.failed + self.answered + _PRIOR)

    def count(self, is_answered: bool) -> None:
        self.answered = self.answered * _FADING + is_answered
        self.failed = self.failed * _FADING + (not is_answered)

    def open(self, now: float) -> None:
        self.is_closed = False
        self.num_opened += 1
        self.num_waiting = 0
        self.retry_at = now + self.backoff_s
        self.backoff_s = min(self.backoff_s * 2.0, MAX_BACKOFF_S)

    def is_blocked(self, now: float) -> bool:
        return not self.is_closed and (now < self.retry_at or self.num_waiting > 0)

    def view(self, now: float) -> BreakerView:
        if self.is_closed:
            return BreakerView(BreakerState.CLOSED, self.failure_rate, 0.0)
        wait_s = max(self.retry_at - now, 0.0)
        state = BreakerState.OPEN if wait_s else BreakerState.HALF_OPEN
        return BreakerView(state, self.failure_rate, wait_s)


class Breakers:
    """Of the instances of one endpoint, as one router sees them."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._breakers: dict[InstanceId, _Breaker] = {}
        self._num_not_closed = 0
        self.num_opened = 0
        self.on_change: Callable[[InstanceId, BreakerView], None] = lambda instance_id, view: None
        """Called when a breaker opens and when it closes. Must not raise."""

    def __bool__(self) -> bool:
        """Whether any instance has failed lately."""
        return bool(self._breakers)

    @property
    def is_any_open(self) -> bool:
        """Or half-open: `blocked` may name it."""
        return self._num_not_closed > 0

    def blocked(self, candidates: Iterable[InstanceId]) -> frozenset[InstanceId]:
        """Those of the candidates that are to be passed over now; none where that would be all of them."""
        if not self._num_not_closed:
            return frozenset()
        now, names = self._now(), tuple(candidates)
        found = frozenset(
            each
            for each in names
            if (known := self._breakers.get(each)) is not None and known.is_blocked(now)
        )
        return found if len(found) < len(names) else frozenset()

    def failure_rates(self, instances: Sequence[InstanceId]) -> list[float] | None:
        """The share of recent requests that each has failed; None where no instance has failed any."""
        if not self._breakers:
            return None
        known = self._breakers
        return [known[each].failure_rate if each in known else 0.0 for each in instances]

    def send(self, instance_id: InstanceId) -> Attempt | None:
        """A request goes there now. None where there is nothing to keep of it."""
        known = self._breakers.get(instance_id)
        if known is None:
            return None
        if not known.is_closed:
            known.num_waiting += 1
        return Attempt(known.num_opened)

    def first_token(self, instance_id: InstanceId, attempt: Attempt | None) -> None:
        known = self._breakers.get(instance_id)
        if known is not None and attempt is not None:
            self._stop_waiting(known, attempt)

    def end(self, instance_id: InstanceId, attempt: Attempt | None, outcome: Outcome) -> None:
        """It is over. Once for each."""
        known = self._breakers.get(instance_id)
        if known is None:
            if outcome is not Outcome.FAILED:
                return
            known = self._breakers[instance_id] = _Breaker()
        num_opened = 0 if attempt is None else attempt.num_opened
        has_begun = attempt is not None and not attempt.is_waiting
        if attempt is not None:
            self._stop_waiting(known, attempt)
        if num_opened != known.num_opened:
            return
        if outcome is Outcome.LEFT and has_begun and not known.fails_amid:
            outcome = Outcome.ANSWERED
        elif outcome in (Outcome.ANSWERED, Outcome.FAILED):
            known.fails_amid = outcome is Outcome.FAILED and (known.fails_amid or has_begun)
        else:
            return
        known.count(outcome is Outcome.ANSWERED)
        if outcome is Outcome.FAILED:
            if not known.is_closed or known.failure_rate > _OPENS_ABOVE:
                self._open(instance_id, known)
        elif not known.is_closed:
            self._close(instance_id, known)
        elif known.failure_rate < _FORGOTTEN_BELOW:
            del self._breakers[instance_id]

    def keep(self, instances: Iterable[InstanceId]) -> None:
        """These are registered and no others."""
        if not self._breakers:
            return
        for gone in self._breakers.keys() - set(instances):
            self._num_not_closed -= not self._breakers.pop(gone).is_closed

    def views(self) -> dict[InstanceId, BreakerView]:
        """Of every instance that has failed lately."""
        now = self._now()
        return {instance_id: known.view(now) for instance_id, known in self._breakers.items()}

    # ---

    def _stop_waiting(self, known: _Breaker, attempt: Attempt) -> None:
        if attempt.is_waiting and not known.is_closed and attempt.num_opened == known.num_opened:
            known.num_waiting -= 1
        attempt.is_waiting = False

    def _open(self, instance_id: InstanceId, known: _Breaker) -> None:
        self._num_not_closed += known.is_closed
        self.num_opened += 1
        now = self._now()
        known.open(now)
        self.on_change(instance_id, known.view(now))

    def _close(self, instance_id: InstanceId, known: _Breaker) -> None:
        """Its failures still count: one or two more open it again, for longer than before."""
        self._num_not_closed -= 1
        known.is_closed = True
        self.on_change(instance_id, known.view(self._now()))
