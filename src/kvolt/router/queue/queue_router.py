"""QueueRouter: a queue in front of a router that can refuse while all workers are saturated.

A request waits until a worker has capacity and is bound as late as possible. `waiting_queue` defines the order; this
module owns deadlines and dispatch. After a first token, a release or a load report the requests at the front are
tried again, once per loop tick. Also holds prompts until their worker is done with those before them
(`prompt_pacing`), and withdraws requests that were sent too early (`withdrawals`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable

import msgspec

from kvolt.core.delta import Usage
from kvolt.core.errors import KvoltError, Overloaded
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request
from kvolt.router.breaker import Outcome
from kvolt.router.choice import WorkerChoice
from kvolt.router.kv_router import KvRouter
from kvolt.router.port import Decision, Router, WithdrawHook
from kvolt.router.queue.priority_level import QueueEntry, QueueLimits
from kvolt.router.queue.prompt_pacing import PromptPacer
from kvolt.router.queue.queued_request import QueuedRequest
from kvolt.router.queue.waiting_queue import DrainRate, Order, QueueStats, WaitingQueue
from kvolt.router.queue.withdrawals import WithdrawalOptions, WithdrawalPlanner
from kvolt.router.selection.forecast import Forecast
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.histogram import Histogram

_MAX_DISPATCHED_PER_TICK = 64
_MAX_BLOCKED_PER_TICK = 16
"""Blocked constraints tried per dispatch. The rest follows after `_RETRY_DELAY_S`, which bounds the cost of
an event."""
_RETRY_DELAY_S = 0.005
_RECHECK_S = 1.0
"""Interval between dispatches while requests wait, in case no event reports freed capacity."""
_MAX_RETRY_AFTER_S = 60.0


class QueueOptions(msgspec.Struct, frozen=True, kw_only=True):
    limits: QueueLimits = QueueLimits()
    order: Order = Order.FCFS
    max_wait_s: float | None = None
    """None: until the caller cancels or the request's deadline."""
    withdrawal: WithdrawalOptions = WithdrawalOptions()
    pace_prompts: bool = True
    """Hold prompts until their worker is about to finish those before them."""

    @classmethod
    def of(cls, settings: RouterSettings) -> QueueOptions:
        limits = QueueLimits(
            max_requests=settings.queue_requests,
            max_tokens=settings.queue_tokens,
            quantum_tokens=settings.queue_quantum_tokens,
            aging_tokens_per_s=settings.queue_aging_tokens_per_s,
            promote_s=settings.queue_promote_s,
        )
        withdrawal = WithdrawalOptions(
            max_moves=settings.withdraw_max_moves, min_gain_s=settings.withdraw_min_gain_s
        )
        return cls(
            limits=limits,
            order=Order(settings.queue_order),
            max_wait_s=settings.queue_wait_s,
            withdrawal=withdrawal,
            pace_prompts=settings.pace_prompts,
        )


class QueueRouter:
    """See the module; a Router. Owns the inner router: decides with it alone, and closes it."""

    def __init__(
        self,
        inner: KvRouter,
        now: Callable[[], float],
        options: QueueOptions | None = None,
    ) -> None:
        self.inner = inner
        self._now = now
        self._options = options or QueueOptions()
        self._queue = WaitingQueue(self._options.limits, self._options.order)
        self._withdrawals = WithdrawalPlanner(inner, now, self._options.withdrawal)
        self._pacer = PromptPacer(now, self._options.pace_prompts)
        self._drain = DrainRate()
        self._loop = asyncio.get_running_loop()
        self._dispatch_handle: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        """Time of the timer; uvloop's timers that are almost due cannot tell it."""
        self._blocked: set[Hashable] = set()
        """Constraints tried in this round without success, while others are left to try."""
        self._needs_another_round = False
        """Capacity may have changed since this round began."""
        self._is_closed = False
        self.stats = QueueStats()
        inner.on_capacity_freed = self._wake
        inner.on_workers_changed = self._on_workers_changed

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        return self._queue.num_tokens

    @property
    def num_unstarted(self) -> int:
        """Requests routed to a worker without a first token."""
        return self._withdrawals.num_unstarted

    @property
    def holds_s(self) -> Histogram:
        """How long prompts were held for those before them."""
        return self._pacer.holds_s

    # --- the port

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        if request.routing.query_only or request.has_started:
            return await self.inner.route(request, excluded)
        while True:
            decision = self._try_route(request, excluded) or await self._wait(request, excluded)
            if not self._pacer.is_held(decision):
                return decision
            decision = await self._hold(decision)
            if decision.instance.id in self.inner.reachable_ids():
                return decision
            self.release(decision, None)  # its worker was lost or cordoned

    def route_now(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision | None:
        """Route without waiting; None if the request must use `route`."""
        if request.has_started:
            return self.inner.try_route(request, excluded)
        return self._try_route(request, excluded, self._pacer.can_send)

    def forecast(self, request: Request) -> Forecast:
        """Forecast of the inner router plus the wait in this queue."""
        forecast = self.inner.forecast(request)
        if not self._queue.num_waiting:
            return forecast
        wait_s = self._drain.drain_time_s(self._queue.num_tokens, self._now())
        return msgspec.structs.replace(forecast, queue_s=forecast.queue_s + wait_s)

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None:
        self._withdrawals.remove(decision)
        self._pacer.remove(decision)
        self.inner.mark_first_token(decision, cached_tokens)
        self._wake()

    def release(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        self._withdrawals.remove(decision)
        self._pacer.remove(decision)
        self.inner.release(decision, usage, outcome)
        self._wake()

    async def close(self) -> None:
        """Route the waiting requests regardless of load: no later event would release them."""
        self._is_closed = True
        self._pacer.end_holds()
        self._stop_timers()
        if self._dispatch_handle is not None:
            self._dispatch_handle.cancel()
            self._dispatch_handle = None
        self._blocked.clear()
        while (queued := self._next_queued()) is not None:
            self._queue.remove(queued)
            if queued.decision.done():
                continue
            try:
                queued.decision.set_result(await self.inner.route(queued.request, queued.excluded))
            except KvoltError as error:
                queued.refuse(error)
        await self.inner.close()

    # --- waiting

    def _try_route(
        self,
        request: Request,
        excluded: frozenset[InstanceId],
        accepts: Callable[[WorkerChoice], bool] = lambda choice: True,
    ) -> Decision | None:
        """Route if no other request waits and a worker has capacity."""
        decision = None if self._queue.num_waiting else self.inner.try_route(request, excluded, accepts)
        if decision is None:
            return None
        self.stats.num_immediate += 1
        return self._track(decision, request, excluded)

    async def _wait(self, request: Request, excluded: frozenset[InstanceId]) -> Decision:
        queued = QueuedRequest(request, excluded, self._now(), self._options.max_wait_s)
        is_first = not self._queue.num_waiting
        for refused in self._queue.push(queued):
            if refused is queued:
                self.stats.refused["full"] += 1
                raise self._overloaded(f"the router queue is full: {self._queue.num_waiting} requests wait")
            self.stats.refused["displaced"] += 1
            _queued(refused).refuse(self._overloaded("displaced from the router queue by another request"))
        if not is_first:  # its constraints may differ from those of the requests that wait
            self._wake()
        self._set_timer()
        try:
            return await queued.decision
        except asyncio.CancelledError:
            self._on_cancelled(queued)
            raise

    def _on_cancelled(self, queued: QueuedRequest) -> None:
        """Handle cancellation: leave the queue, or release a decision that the caller will not use."""
        if self._queue.remove(queued):
            self.stats.refused["cancelled"] += 1
            self._wake()  # the next request may be unblocked
        elif (
            queued.decision.done() and not queued.decision.cancelled() and queued.decision.exception() is None
        ):
            self.release(queued.decision.result(), None)

    def _overloaded(self, message: str) -> Overloaded:
        return Overloaded(
            f"{message}; no GPU work was spent on the request, retry later",
            queue="router",
            limit=self._options.limits.max_requests,
            retry_after_s=self._retry_after_s(),
            gpu_work="none",
        )

    def _retry_after_s(self) -> float:
        """Predicted time until the requests that wait now have left, at the recent rate."""
        wait_s = self._drain.drain_time_s(self._queue.num_tokens, self._now())
        return min(max(math.ceil(wait_s), 1.0), _MAX_RETRY_AFTER_S)

    async def _hold(self, decision: Decision) -> Decision:
        """Wait until the prompt may be sent. Returns the decision for it: another one if it is withdrawn before.

        It was placed at the best of the workers there were, for itself and for others: while its worker is not late, it
        moves to new ones only.
        """
        current = decision
        known_workers = frozenset(self.inner.reachable_ids())

        def move(other: Decision) -> bool:
            nonlocal current
            previous, current = current, other
            self._pacer.add(other, self.inner.find_choice(other))
            _set_move(previous, None)
            _set_move(other, move, known_workers)
            self.release(previous, None)  # ends its hold
            return True

        held = None
        _set_move(decision, move, known_workers)
        try:
            while held is not current:
                held = current
                await self._pacer.hold(held)
        except asyncio.CancelledError:
            self.release(current, None)
            raise
        finally:
            _set_move(current, None)
        return current

    def _on_workers_changed(self) -> None:
        self._pacer.end_holds(frozenset(self.inner.reachable_ids()))

    # --- dispatch

    def _wake(self) -> None:
        if self._is_closed or not (self._queue.num_waiting or self._withdrawals.is_due(self._now())):
            return
        self._needs_another_round = True
        if self._dispatch_handle is None:
            self._dispatch_handle = self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Bind all requests that can be bound.

        If more constraints are blocked than may be tried at once, continues after a delay. Constraints tried in this
        round are skipped until all were tried.
        """
        self._dispatch_handle = None
        if not self._blocked:
            self._needs_another_round = False
        num_dispatched = num_blocked = 0
        while (queued := self._next_queued()) is not None:
            if num_dispatched == _MAX_DISPATCHED_PER_TICK:
                self._dispatch_handle = self._loop.call_soon(self._dispatch)
                return
            if num_blocked == _MAX_BLOCKED_PER_TICK:
                self._dispatch_handle = self._loop.call_later(_RETRY_DELAY_S, self._dispatch)
                return
            if self._try_dispatch(queued):
                num_dispatched += 1
            else:
                self._blocked.add(queued.constraints)
                num_blocked += 1
        self._blocked.clear()
        if self._needs_another_round:
            self._dispatch_handle = self._loop.call_later(_RETRY_DELAY_S, self._dispatch)
        elif not self._queue.num_waiting:  # withdraw only while no request waits
            self.stats.num_withdrawals += self._withdrawals.withdraw_late()
        self._set_timer()

    def _next_queued(self) -> QueuedRequest | None:
        entry = self._queue.next_entry(self._blocked, self._now())
        return None if entry is None else _queued(entry)

    def _try_dispatch(self, queued: QueuedRequest) -> bool:
        """Try to bind a request; return whether it has left the queue."""
        if queued.decision.done():  # cancelled in this tick
            return self._queue.remove(queued)
        try:
            decision = self.inner.try_route(queued.request, queued.excluded)
        except KvoltError as error:  # no worker can ever take it
            self._queue.remove(queued)
            self.stats.refused[error.code] += 1
            queued.refuse(error)
            return True
        if decision is None:
            return False
        now = self._now()
        self._queue.admit(queued)
        self._drain.record(queued.tokens, now)
        self.stats.waits_s.observe(now - queued.arrived_at)
        queued.decision.set_result(self._track(decision, queued.request, queued.excluded))
        return True

    def _track(self, decision: Decision, request: Request, excluded: frozenset[InstanceId]) -> Decision:
        decision = msgspec.structs.replace(decision, withdraw_hook=WithdrawHook())
        self._withdrawals.add(decision, request, excluded)
        self._pacer.add(decision, self.inner.find_choice(decision))
        return decision

    # --- time

    def _set_timer(self) -> None:
        """Schedule the next deadline or recheck; one timer while requests wait."""
        if self._is_closed or not self._queue.num_waiting:
            return
        deadline = self._queue.next_deadline
        after_s = _RECHECK_S if deadline is None else min(max(deadline - self._now(), 0.0), _RECHECK_S)
        at = self._loop.time() + after_s
        if self._timer is None or self._timer_at > at:
            self._stop_timers()
            self._timer, self._timer_at = self._loop.call_at(at, self._on_timer), at

    def _on_timer(self) -> None:
        self._timer = None
        for entry in self._queue.expire(self._now()):
            self.stats.refused["deadline"] += 1
            waited_s = self._now() - entry.arrived_at
            _queued(entry).refuse(self._overloaded(f"no worker had capacity within {waited_s:.1f} s"))
        self._wake()
        self._set_timer()

    def _stop_timers(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _set_move(
    decision: Decision,
    move: Callable[[Decision], bool] | None,
    known_workers: frozenset[InstanceId] | None = None,
) -> None:
    if decision.withdraw_hook is not None:
        decision.withdraw_hook.try_move = move
        decision.withdraw_hook.known_workers = known_workers


def _queued(entry: QueueEntry) -> QueuedRequest:
    assert isinstance(entry, QueuedRequest)
    return entry


def deciding_router(router: Router) -> Router:
    """The router itself, or the inner router of a QueueRouter."""
    return router.inner if isinstance(router, QueueRouter) else router
