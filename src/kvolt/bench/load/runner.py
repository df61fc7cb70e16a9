"""Load run: sends requests when they are due, counts the responses, and drains at the end.

Decides which request is next, in open and closed loop, and which requests count. Must not know HTTP or the display of
results. Runs in loop callbacks, without a task per request.

In an open loop sessions start by the schedule, regardless of the server. In a closed loop each of a fixed number of
users sends one request after another, with a pause after a failure so that a failing server is not flooded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from kvolt.bench.load.bodies import RequestMaker
from kvolt.bench.load.exchange import Exchange, RequestPlan
from kvolt.bench.load.sample import Sample
from kvolt.bench.load.tally import Tally
from kvolt.bench.load.workloads import Prompt, UserSession, Workload
from kvolt.core.errors import Cancelled, DeadlineExceeded
from kvolt.runtime.http.client import HttpClient

_EARLY_S = 0.0005
"""Timer resolution: requests due within this time are sent now."""
_MAX_SENT_PER_TICK = 64
"""Maximum requests sent before responses are processed again."""
_PAUSE_AFTER_FAILURE_S = 0.1


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """Pace of a run: a schedule for an open loop, a concurrency for a closed loop."""

    schedule: Iterator[float] | None = None
    concurrency: int | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    """The run ends after `num_requests`, or after this time since the first; if both are None, with the workload."""
    num_warmup: int = 0
    """Initial requests that are not counted."""
    drain_s: float = 5.0
    """Time for running requests after `end`."""
    first_token_s: float = 300.0
    total_s: float = 1800.0
    """Timeouts of a request."""


@dataclass(slots=True)
class _User:
    """A session and its current turn."""

    number: int
    session: UserSession
    turn: int = 0


class LoadRun:
    """One run; call `run` once."""

    def __init__(
        self,
        client: HttpClient,
        workload: Workload,
        maker: RequestMaker,
        pace: Pace,
        tally: Tally,
    ) -> None:
        self._client = client
        self._now = client.now
        self._workload = workload
        self._maker = maker
        self._pace = pace
        self._tally = tally
        self.on_sample: Callable[[Sample, bool], None] = lambda sample, counted: None
        """Called with each sample and whether it counts."""
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        """Set when no request is running or due, or after `end`."""
        self._users: dict[Exchange, _User] = {}
        """Users of running requests."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        """Timers of think times by session number; -1 is the schedule's."""
        self._origin_s = 0.0
        self._next_due_s: float | None = None
        self._num_sessions = 0
        self._num_started = 0
        self._ends_s: float | None = None
        self._is_stopping = False
        self.is_interrupted = False

    @property
    def num_started(self) -> int:
        return self._num_started

    @property
    def num_in_flight(self) -> int:
        return len(self._users)

    @property
    def elapsed_s(self) -> float:
        return self._now() - self._origin_s

    @property
    def share_done(self) -> float | None:
        """Fraction of the run that is done, if known."""
        pace, tally = self._pace, self._tally
        shares = []
        if pace.num_requests:
            shares.append(tally.num_ended / pace.num_requests)
        if pace.duration_s and tally.first_due_s is not None:
            shares.append((self.elapsed_s - tally.first_due_s) / pace.duration_s)
        elif pace.duration_s:
            shares.append(0.0)
        return min(1.0, max(shares)) if shares else None

    async def run(self) -> None:
        """Run until done or `end`, which stops sending and drains running requests."""
        self._origin_s = self._now()
        if self._pace.schedule is not None:
            self._take_due()
            self._arm()
        else:
            for _ in range(self._pace.concurrency or 1):
                self._begin_session(self.elapsed_s)
        self._check_over()
        try:
            await self._over.wait()
            if self.is_interrupted:
                await self._drain()
        finally:
            self._stop_sending()

    def end(self) -> None:
        """End the run early; `run` returns when running requests have drained."""
        if not self._over.is_set():
            self.is_interrupted = True
            self._over.set()

    async def _drain(self) -> None:
        self._over.clear()
        self._stop_sending()
        try:
            async with asyncio.timeout(self._pace.drain_s):
                await self._over.wait()
        except TimeoutError:
            for exchange in list(self._users):
                if exchange.call is not None:
                    exchange.call.fail(Cancelled("the run was ended"))

    def _stop_sending(self) -> None:
        self._is_stopping = True
        self._next_due_s = None
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._check_over()

    # -- the schedule

    def _take_due(self) -> None:
        assert self._pace.schedule is not None
        self._next_due_s = next(self._pace.schedule, None)

    def _arm(self) -> None:
        self._timers.pop(-1, None)
        if self._next_due_s is not None:
            delay_s = max(0.0, self._next_due_s - self.elapsed_s)
            self._timers[-1] = self._loop.call_later(delay_s, self._send_due)

    def _send_due(self) -> None:
        now_s = self.elapsed_s
        for _ in range(_MAX_SENT_PER_TICK):
            due_s = self._next_due_s
            if due_s is None or due_s > now_s + _EARLY_S:
                break
            self._begin_session(due_s)
            if self._next_due_s is not None:  # there was one
                self._take_due()
        self._arm()
        self._check_over()

    # -- sessions

    def _begin_session(self, due_s: float) -> None:
        session = self._workload.session(self._num_sessions) if self._may_send(due_s) else None
        prompt = session.next(None) if session is not None else None
        if session is None or prompt is None:
            self._next_due_s = None
            return
        user = _User(self._num_sessions, session)
        self._num_sessions += 1
        self._send(user, prompt, due_s)

    def _may_send(self, due_s: float) -> bool:
        pace = self._pace
        if self._is_stopping or (self._ends_s is not None and due_s > self._ends_s):
            return False
        return pace.num_requests is None or self._num_started < pace.num_warmup + pace.num_requests

    def _send(self, user: _User, prompt: Prompt, due_s: float) -> None:
        number = self._num_started
        self._num_started += 1
        counted = number >= self._pace.num_warmup
        if counted:
            if self._ends_s is None and self._pace.duration_s is not None:
                self._ends_s = due_s + self._pace.duration_s
            self._tally.started(due_s)
        plan = RequestPlan(
            number=number,
            session=user.number,
            turn=user.turn,
            due_s=due_s,
            started_s=self.elapsed_s,
            input_tokens=prompt.input_tokens,
            keep_text=user.session.wants_text,
        )
        on_gap = self._tally.on_gap if counted else _ignore
        exchange = Exchange(plan, self._origin_s, self._now, on_gap, self._ended)
        path, body = self._maker.request(prompt)
        self._users[exchange] = user
        exchange.call = self._client.send(path, body, exchange)
        exchange.timer = self._loop.call_later(
            min(self._pace.first_token_s, self._pace.total_s), self._on_first_token_timeout, exchange
        )

    def _on_first_token_timeout(self, exchange: Exchange) -> None:
        assert exchange.call is not None
        pace = self._pace
        if exchange.has_started:
            message = f"not complete within {pace.total_s:g} s"
            error = DeadlineExceeded(message, stage="total", after_s=pace.total_s)
            left_s = max(0.0, pace.total_s - pace.first_token_s)
            exchange.timer = self._loop.call_later(left_s, exchange.call.fail, error)
        else:
            message = f"no token within {pace.first_token_s:g} s"
            exchange.call.fail(DeadlineExceeded(message, stage="first", after_s=pace.first_token_s))

    def _ended(self, exchange: Exchange, sample: Sample) -> None:
        user = self._users.pop(exchange)
        counted = sample.number >= self._pace.num_warmup
        if counted:
            self._tally.add(sample)
        else:
            self._tally.num_warmup += 1
        self.on_sample(sample, counted)
        self._next_turn(user, sample, exchange.answer.text)
        self._check_over()

    def _next_turn(self, user: _User, sample: Sample, text: str) -> None:
        """Start the next turn, or in a closed loop the next session."""
        if self._is_stopping:
            return
        if sample.error is None:
            prompt = user.session.next(text)
            if prompt is not None:
                user.turn += 1
                self._later(
                    user.session.think_s,
                    sample.end_s,
                    user.number,
                    lambda due_s: self._turn(user, prompt, due_s),
                )
                return
        if self._pace.schedule is None:
            pause_s = 0.0 if sample.error is None else _PAUSE_AFTER_FAILURE_S
            self._later(pause_s, sample.end_s, user.number, self._begin_session)

    def _later(self, delay_s: float, from_s: float, key: int, begin: Callable[[float], None]) -> None:
        due_s = from_s + delay_s

        def fire() -> None:
            del self._timers[key]
            begin(due_s)
            self._check_over()

        self._timers[key] = self._loop.call_later(max(0.0, due_s - self.elapsed_s), fire)

    def _turn(self, user: _User, prompt: Prompt, due_s: float) -> None:
        if self._may_send(due_s):
            self._send(user, prompt, due_s)

    def _check_over(self) -> None:
        if not self._users and not self._timers and self._next_due_s is None:
            self._over.set()


def _ignore(gap_s: float, times: int = 1) -> None:
    """Gap callback of a warm-up request."""
