"""WithdrawalPlanner: moves requests that have not started to workers that became free. Pure.

A request is bound by what is known at its arrival. When another worker has capacity later, the last request of the
longest queue is withdrawn: its `WithdrawHook` receives a decision for the other worker and moves it if its worker
confirms that it has not started. A move costs a round trip and the position in the worker's queue, so it requires a
large gain, and the moves per request are bounded. A request that the router holds for pacing has not been sent: it
moves only to workers that joined since it was routed (`known_workers`), unless its own worker is late.

The caller decides when to check.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvolt.core.errors import KvoltError
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request
from kvolt.router.kv_router import KvRouter
from kvolt.router.port import Decision, WithdrawHook
from kvolt.router.worker_rank import WorkerDpRank

_CHECK_INTERVAL_S = 0.02
"""Minimum interval between checks: each one predicts decisions."""
_MAX_PER_CHECK = 4
_MAX_EXAMINED = 8
"""Requests examined at the end of a queue until one can be moved."""
_MIN_GAIN_SHARE = 0.5
"""Minimum gain as a share of the remaining wait at the current worker."""
_STUCK_FACTOR = 2.0
"""A request alone at its worker counts as stuck after this multiple of its predicted TTFT."""
_LATE_FACTOR = 1.25
"""Requests held for a worker may move once its first one has waited this multiple of its prediction."""
_MAX_SLOWDOWN = 3.0
"""Upper bound of a worker's slowdown, as estimated from one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WithdrawalOptions:
    max_moves: int = 2
    """Moves per request; 0 disables withdrawal."""
    min_gain_s: float = 0.25


@dataclass(slots=True, eq=False)
class _SentRequest:
    decision: Decision
    request: Request
    excluded: frozenset[InstanceId]
    sent_at: float
    num_moves: int
    is_withdrawing: bool = False
    """Withdrawal was requested. A request still here after that has started."""

    @property
    def predicted_s(self) -> float:
        return (self.decision.predicted_ms or 0.0) / 1e3


class _RankQueue:
    """Requests of one worker rank without a first token, newest last."""

    __slots__ = ("num_withdrawing", "sent")

    def __init__(self) -> None:
        self.sent: OrderedDict[int, _SentRequest] = OrderedDict()
        """By reservation id."""
        self.num_withdrawing = 0
        """Requests among these that are being withdrawn."""

    @property
    def first(self) -> _SentRequest:
        return next(iter(self.sent.values()))

    def pop(self, reservation_id: int) -> None:
        sent = self.sent.pop(reservation_id, None)
        if sent is not None:
            self.num_withdrawing -= sent.is_withdrawing

    def mark_withdrawing(self, sent: _SentRequest) -> None:
        sent.is_withdrawing = True
        self.num_withdrawing += 1


class WithdrawalPlanner:
    """See the module."""

    def __init__(self, router: KvRouter, now: Callable[[], float], options: WithdrawalOptions) -> None:
        self._router = router
        self._now = now
        self._options = options
        self._checked_at = float("-inf")
        self._queues: dict[WorkerDpRank, _RankQueue] = {}
        """Worker ranks with unstarted requests."""

    @property
    def num_unstarted(self) -> int:
        return sum(len(queue.sent) for queue in self._queues.values())

    def add(self, decision: Decision, request: Request, excluded: frozenset[InstanceId]) -> None:
        self._track(_SentRequest(decision, request, excluded, self._now(), 0))

    def remove(self, decision: Decision) -> None:
        """Forget a request that has started or ended. Unknown requests are ignored."""
        worker_rank = _worker_rank(decision)
        queue = self._queues.get(worker_rank)
        if queue is not None:
            queue.pop(decision.reservation_id)
            if not queue.sent:
                del self._queues[worker_rank]

    def is_due(self, now: float) -> bool:
        """Whether the check interval has passed and there are requests to check."""
        return (
            bool(self._queues) and self._options.max_moves > 0 and now - self._checked_at >= _CHECK_INTERVAL_S
        )

    def withdraw_late(self) -> int:
        """Withdraw requests that another worker would start much earlier; return their number."""
        now = self._now()
        if not self.is_due(now):
            return 0
        self._checked_at = now
        num_withdrawing = 0
        while num_withdrawing < _MAX_PER_CHECK and self._move_one(now):
            num_withdrawing += 1
        return num_withdrawing

    # ---

    def _track(self, sent: _SentRequest) -> None:
        if self._options.max_moves:
            queue = self._queues.setdefault(_worker_rank(sent.decision), _RankQueue())
            queue.sent[sent.decision.reservation_id] = sent

    def _move_one(self, now: float) -> bool:
        waits = [(self._stay_s(queue, now), worker_rank) for worker_rank, queue in self._queues.items()]
        stay_s, worker_rank = max(waits, default=(0.0, None))
        if worker_rank is None or stay_s < self._options.min_gain_s:
            return False
        queue = self._queues[worker_rank]
        sent = self._last_movable(queue, now)
        return sent is not None and self._move(queue, sent, stay_s, now)

    def _stay_s(self, queue: _RankQueue, now: float) -> float:
        """Predicted wait of the last request that stays at this worker rank."""
        first = queue.first
        if len(queue.sent) == 1:  # being computed, unless it is late
            late_s = now - first.sent_at
            return (
                late_s if late_s >= max(_STUCK_FACTOR * first.predicted_s, self._options.min_gain_s) else 0.0
            )
        slower = min(max(self._slowdown(queue, now), 1.0), _MAX_SLOWDOWN)
        staying = 1.0 - queue.num_withdrawing / len(queue.sent)
        return slower * staying * self._router.queue_s(first.decision)

    def _slowdown(self, queue: _RankQueue, now: float) -> float:
        """How many times its predicted TTFT the first request has waited."""
        first = queue.first
        return (now - first.sent_at) / max(first.predicted_s, self._options.min_gain_s)

    def _last_movable(self, queue: _RankQueue, now: float) -> _SentRequest | None:
        for _, sent in zip(range(_MAX_EXAMINED), reversed(queue.sent.values()), strict=False):
            is_pinned = bool(sent.request.routing.pins)
            is_movable = sent.num_moves < self._options.max_moves and not (sent.is_withdrawing or is_pinned)
            if is_movable and self._has_target(queue, sent.decision.withdraw_hook, now):
                return sent
        return None

    def _has_target(self, queue: _RankQueue, hook: WithdrawHook | None, now: float) -> bool:
        if hook is None or hook.try_move is None:
            return False
        known_workers = self._known_workers(queue, hook, now)
        return not known_workers or not known_workers.issuperset(self._router.reachable_ids())

    def _known_workers(self, queue: _RankQueue, hook: WithdrawHook, now: float) -> frozenset[InstanceId]:
        """Workers to which the request does not move: none if its own is late, as the choice relied on its speed."""
        if hook.known_workers is None or self._slowdown(queue, now) >= _LATE_FACTOR:
            return frozenset()
        return hook.known_workers

    def _move(self, queue: _RankQueue, sent: _SentRequest, stay_s: float, now: float) -> bool:
        hook = sent.decision.withdraw_hook
        assert hook is not None
        excluded = sent.excluded | {sent.decision.instance.id} | self._known_workers(queue, hook, now)
        try:
            elsewhere_s = self._router.predict_ttft_s(sent.request, excluded)
            if elsewhere_s is None or stay_s - elsewhere_s < max(
                self._options.min_gain_s, _MIN_GAIN_SHARE * stay_s
            ):
                return False
            decision = self._router.try_route(sent.request, excluded)
        except KvoltError:  # no other worker can take it
            queue.mark_withdrawing(sent)
            return False
        if decision is None or hook.try_move is None:
            return False
        decision = msgspec.structs.replace(decision, withdraw_hook=WithdrawHook())
        self._track(_SentRequest(decision, sent.request, sent.excluded, now, sent.num_moves + 1))
        queue.mark_withdrawing(sent)
        if hook.try_move(decision):
            return True
        self.remove(decision)
        self._router.release(decision, None)
        return False


def _worker_rank(decision: Decision) -> WorkerDpRank:
    return WorkerDpRank(decision.instance.id, decision.dp_rank or 0)
