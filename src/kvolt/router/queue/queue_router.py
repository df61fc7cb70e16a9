"""QueueRouter: over a router that can say "not now". While every worker that could take a request has enough to do it
waits here, and is bound to one as late as possible.

Owns who waits and for how long; in which order is `queue`'s affair. Whenever something was freed, begun or reported the
requests whose turn it is are tried again, those of one loop tick together: never by a timer for each. It also takes
requests back that were sent too early (`take_back`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable
from typing import Protocol

import msgspec

from kvolt.core.delta import Usage
from kvolt.core.errors import KvoltError, Overloaded
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request
from kvolt.router.breaker import Outcome
from kvolt.router.policy.forecast import Forecast
from kvolt.router.port import Decision, Recall, Router
from kvolt.router.queue.stats import DrainRate, QueueStats
from kvolt.router.queue.waiting_queue import Order, QueueLimits, Waiting, WaitingQueue
from kvolt.router.queue.withdrawals import TakeBack, TakeBackOptions
from kvolt.runtime.config.router_settings import RouterSettings

_MAX_BOUND_PER_TICK = 64
_MAX_KINDS_PER_TICK = 16
"""That turn out to be blocked. More are tried a moment later, so that an event costs no more than that."""
_MOMENT_S = 0.005
_RECHECK_S = 1.0
"""While anything waits: should a worker have got room without anybody noticing."""
_GUESSED_OUTPUT_TOKENS = 256
_MAX_RETRY_AFTER_S = 60.0


class LateRouter(Router, Protocol):
    """A router that knows when it is too early to decide, and what a decision has come to."""

    on_relief: Callable[[], None]
    """To be called when a worker may have got room without `begun` or `free`."""

    def try_route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision | None:
        """As `route`; None when every instance that could take it has enough to do already."""
        ...

    def foresee_s(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> float | None:
        """Until its first token, if it were routed now; None where `try_route` would give nothing. Books nothing."""
        ...

    def forecast(self, request: Request) -> Forecast:
        """What it would come to if it were routed now, however busy all are."""
        ...

    def queue_s(self, decision: Decision) -> float:
        """Until the prompts are computed that were sent to its place, this and later ones included; once that time is
        over, what they were to take."""
        ...


class QueueOptions(msgspec.Struct, frozen=True, kw_only=True):
    limits: QueueLimits = QueueLimits()
    order: Order = Order.FCFS
    max_wait_s: float | None = None
    """None: as long as who asked waits."""
    take_back: TakeBackOptions = TakeBackOptions()

    @classmethod
    def of(cls, settings: RouterSettings) -> QueueOptions:
        limits = QueueLimits(
            max_requests=settings.queue_requests,
            max_tokens=settings.queue_tokens,
            quantum_tokens=settings.queue_quantum_tokens,
            aging_tokens_per_s=settings.queue_aging_tokens_per_s,
            promote_s=settings.queue_promote_s,
        )
        take_back = TakeBackOptions(max_moves=settings.take_back_moves, min_gain_s=settings.take_back_gain_s)
        return cls(
            limits=limits,
            order=Order(settings.queue_order),
            max_wait_s=settings.queue_wait_s,
            take_back=take_back,
        )


class _Waiter(Waiting):
    """A request that waits, and who waits for its place."""

    __slots__ = ("excluded", "place", "request")

    def __init__(
        self, request: Request, excluded: frozenset[InstanceId], now: float, max_wait_s: float | None
    ) -> None:
        routing = request.routing
        patience_s = min(
            (each for each in (max_wait_s, request.deadline_s) if each is not None), default=math.inf
        )
        super().__init__(
            tokens_of(request),
            now,
            routing.tenant,
            routing.priority,
            kind_of(request, excluded),
            now + patience_s,
        )
        self.request = request
        self.excluded = excluded
        self.place: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()


class QueueRouter:
    """See the module; a Router. The inner one is its own: closed with it, and asked by nobody else to decide."""

    def __init__(
        self,
        inner: LateRouter,
        now: Callable[[], float],
        options: QueueOptions | None = None,
    ) -> None:
        self.inner = inner
        self._now = now
        self._options = options or QueueOptions()
        self._queue = WaitingQueue(self._options.limits, self._options.order)
        self._take_back = TakeBack(inner, now, self._options.take_back)
        self._drain = DrainRate()
        self._loop = asyncio.get_running_loop()
        self._pumping: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._blocked: set[Hashable] = set()
        """Kinds that were tried in this round, while there are others left to try."""
        self._is_again = False
        """Something happened since this round began."""
        self._is_closed = False
        self.stats = QueueStats()
        inner.on_relief = self._wake

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        return self._queue.num_tokens

    @property
    def num_unstarted(self) -> int:
        """That were sent and have not begun."""
        return self._take_back.num_unstarted

    # --- the port

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        if request.routing.query_only or request.has_begun:
            return await self.inner.route(request, excluded)
        decision = self.route_now(request, excluded)
        return decision if decision is not None else await self._wait(request, excluded)

    def route_now(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision | None:
        """As `route`; None where there is more to it than to look who has room."""
        if request.has_begun:
            return self.inner.try_route(request, excluded)
        decision = None if self._queue.num_waiting else self.inner.try_route(request, excluded)
        if decision is None:
            return None
        self.stats.num_at_once += 1
        return self._sent(decision, request, excluded)

    def forecast(self, request: Request) -> Forecast:
        """Behind all that wait here."""
        forecast = self.inner.forecast(request)
        if not self._queue.num_waiting:
            return forecast
        wait_s = self._drain.time_for_s(self._queue.num_tokens, self._now())
        return msgspec.structs.replace(forecast, queue_s=forecast.queue_s + wait_s)

    def begun(self, decision: Decision, cached_tokens: int | None) -> None:
        self._take_back.forget(decision)
        self.inner.begun(decision, cached_tokens)
        self._wake()

    def free(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        self._take_back.forget(decision)
        self.inner.free(decision, usage, outcome)
        self._wake()

    async def close(self) -> None:
        """Who waits is sent all the same: it is not their fault, and nobody will tell us when there is room."""
        self._is_closed = True
        self._stop_timers()
        self._stop_pumping()
        self._blocked.clear()
        while (waiter := self._next()) is not None:
            self._queue.remove(waiter)
            if waiter.place.done():
                continue
            try:
                waiter.place.set_result(await self.inner.route(waiter.request, waiter.excluded))
            except KvoltError as error:
                _refuse(waiter, error)
        await self.inner.close()

    # --- waiting

    async def _wait(self, request: Request, excluded: frozenset[InstanceId]) -> Decision:
        waiter = _Waiter(request, excluded, self._now(), self._options.max_wait_s)
        is_first = not self._queue.num_waiting
        for refused in self._queue.push(waiter):
            if refused is waiter:
                self.stats.refused["full"] += 1
                raise self._overloaded(f"{self._queue.num_waiting} requests wait for a worker already")
            self.stats.refused["displaced"] += 1
            _refuse(refused, self._overloaded("it had to make room for another request"))
        if not is_first:  # it may be of a kind that somebody can take
            self._wake()
        self._set_timer()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            self._give_up(waiter)
            raise

    def _give_up(self, waiter: _Waiter) -> None:
        """Cancelled: either it waits still, or it has got a place that nobody will ever use."""
        if self._queue.remove(waiter):
            self.stats.refused["cancelled"] += 1
            self._wake()  # its turn is another's
        elif waiter.place.done() and not waiter.place.cancelled() and waiter.place.exception() is None:
            self.free(waiter.place.result(), None)

    def _overloaded(self, why: str) -> Overloaded:
        return Overloaded(
            f"{why}; no GPU work was spent on it, try again later",
            queue="router",
            limit=self._options.limits.max_requests,
            retry_after_s=self._retry_after_s(),
            gpu_work="none",
        )

    def _retry_after_s(self) -> float:
        """When what waits now will have gone, at the rate at which others did."""
        wait_s = self._drain.time_for_s(self._queue.num_tokens, self._now())
        return min(max(math.ceil(wait_s), 1.0), _MAX_RETRY_AFTER_S)

    # --- binding

    def _wake(self) -> None:
        if self._is_closed or not (self._queue.num_waiting or self._take_back.is_due(self._now())):
            return
        self._is_again = True
        if self._pumping is None:
            self._pumping = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Bind whoever can be bound. Goes on a moment later where more kinds are blocked than may be tried at once:
        then those that were tried are left out until all were, so that none is forgotten."""
        self._pumping = None
        if not self._blocked:
            self._is_again = False
        num_bound = num_blocked = 0
        while (waiter := self._next()) is not None:
            if num_bound == _MAX_BOUND_PER_TICK:
                self._pumping = self._loop.call_soon(self._pump)
                return
            if num_blocked == _MAX_KINDS_PER_TICK:
                self._pumping = self._loop.call_later(_MOMENT_S, self._pump)
                return
            if self._bind(waiter):
                num_bound += 1
            else:
                self._blocked.add(waiter.kind)
                num_blocked += 1
        self._blocked.clear()
        if self._is_again:
            self._pumping = self._loop.call_later(_MOMENT_S, self._pump)
        elif not self._queue.num_waiting:  # who waits comes before who could wait elsewhere
            self.stats.num_moves += self._take_back.check()
        self._set_timer()

    def _next(self) -> _Waiter | None:
        entry = self._queue.next(self._blocked, self._now())
        assert entry is None or isinstance(entry, _Waiter)
        return entry

    def _bind(self, waiter: _Waiter) -> bool:
        """Whether it waits no longer."""
        if waiter.place.done():  # cancelled in this very tick, and not told yet
            return self._queue.remove(waiter)
        try:
            decision = self.inner.try_route(waiter.request, waiter.excluded)
        except KvoltError as error:  # nobody is left who could ever take it
            self._queue.remove(waiter)
            self.stats.refused[error.code] += 1
            _refuse(waiter, error)
            return True
        if decision is None:
            return False
        now = self._now()
        self._queue.take(waiter)
        self._drain.add(waiter.tokens, now)
        self.stats.waits_s.observe(now - waiter.arrived_at)
        waiter.place.set_result(self._sent(decision, waiter.request, waiter.excluded))
        return True

    def _sent(self, decision: Decision, request: Request, excluded: frozenset[InstanceId]) -> Decision:
        decision = msgspec.structs.replace(decision, recall=Recall())
        self._take_back.sent(decision, request, excluded)
        return decision

    # --- time

    def _set_timer(self) -> None:
        """For the next deadline, and to look again; there is one while anything waits."""
        if self._is_closed or not self._queue.num_waiting:
            return
        deadline = self._queue.next_deadline
        after_s = _RECHECK_S if deadline is None else min(max(deadline - self._now(), 0.0), _RECHECK_S)
        at = self._loop.time() + after_s
        if self._timer is None or self._timer.when() > at:
            self._stop_timers()
            self._timer = self._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        for entry in self._queue.expire(self._now()):
            self.stats.refused["deadline"] += 1
            waited_s = self._now() - entry.arrived_at
            _refuse(entry, self._overloaded(f"no worker had room for it within {waited_s:.1f} s"))
        self._wake()
        self._set_timer()

    def _stop_timers(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_pumping(self) -> None:
        if self._pumping is not None:
            self._pumping.cancel()
            self._pumping = None


def tokens_of(request: Request) -> int:
    """What it is counted as between tenants: its prompt, and about what will come of it."""
    asked = request.routing.expected_output_tokens or _GUESSED_OUTPUT_TOKENS
    return request.num_prompt_tokens + min(asked, request.stop.max_tokens) * request.sampling.num_choices


def kind_of(request: Request, excluded: frozenset[InstanceId]) -> Hashable:
    """All that says who may take it; None for one that anybody may take."""
    routing = request.routing
    kind = (
        excluded,
        request.lora,
        tuple(routing.pins.items()),
        routing.pinned_dp_rank,
        routing.allowed,
        routing.required_taints,
    )
    return kind if any(each is not None and each != () for each in kind if each != frozenset()) else None


def _refuse(entry: Waiting, error: KvoltError) -> None:
    assert isinstance(entry, _Waiter)
    if not entry.place.done():
        entry.place.set_exception(error)


def who_decides(router: Router) -> Router:
    """The router itself, or the one behind it if it only lets requests wait."""
    return router.inner if isinstance(router, QueueRouter) else router
