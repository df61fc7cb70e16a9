"""PromptPacer: sends the prompts of a worker one after the other.

All prompts in one step of a worker end when the step ends. Where the earlier of two prompts leaves capacity in its
last step, the later one fills it, gains nothing and delays the earlier one. So a prompt is held, reserved at its
worker, until the worker is about to compute the last step of the prompts before it: it then arrives in time for the
next step. The prediction bounds the wait; first tokens and releases of the prompts before it only shorten it.

A prompt is not held if the step that it needs for itself costs more than it would delay the one before it, or if its
worker computes it before another one, because of its priority.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from kvolt.core.ids import InstanceId
from kvolt.core.request import Request
from kvolt.router.choice import WorkerChoice
from kvolt.router.port import Decision
from kvolt.router.worker_rank import WorkerDpRank
from kvolt.runtime.histogram import Histogram

_LEAD = 0.25
"""A held prompt is sent this share of the last step of the prompt before it early: errors of the prediction and the
way to the worker take time, too, and a late prompt costs a step without prompts."""
_HOLDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class _Prompt:
    """A prompt without a first token at its worker."""

    __slots__ = ("choice", "held_since", "last_step_s", "last_step_tokens", "send_at", "sending")

    def __init__(self, choice: WorkerChoice) -> None:
        tokens = max(choice.prefill_tokens, 1)
        self.choice = choice
        self.last_step_tokens = (tokens - 1) % choice.max_step_tokens + 1
        self.last_step_s = choice.prefill_s * self.last_step_tokens / tokens
        self.held_since = self.send_at = 0.0
        self.sending: asyncio.Future[None] | None = None
        """Set while the prompt is held; done when it may be sent."""

    def delay_by(self, later: WorkerChoice) -> float:
        """Time by which a later prompt in its last step would delay this one."""
        tokens = max(later.prefill_tokens, 1)
        share = min(later.max_step_tokens - self.last_step_tokens, tokens) / tokens
        return share * max(later.prefill_s - later.step_s, 0.0)

    @property
    def is_waiting(self) -> bool:
        return self.sending is not None and not self.sending.done()

    def send(self) -> None:
        if self.sending is not None and not self.sending.done():
            self.sending.set_result(None)


class _RankPrompts:
    """Prompts of a worker rank without a first token, oldest first, with one timer for all that are held."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        """None while no prompt is held."""
        self._timer_at = 0.0
        """Time of the timer; uvloop's timers that are almost due cannot tell it."""
        self.by_reservation: dict[int, _Prompt] = {}

    def __iter__(self) -> Iterator[_Prompt]:
        return iter(self.by_reservation.values())

    @property
    def newest(self) -> _Prompt:
        return next(reversed(self.by_reservation.values()))

    def hold(self, prompt: _Prompt, hold_s: float) -> None:
        prompt.sending = self._loop.create_future()
        prompt.send_at = self._loop.time() + hold_s
        if self._timer is None or prompt.send_at < self._timer_at:
            self._set_timer()

    def remove(self, reservation_id: int) -> None:
        """Send held prompts earlier if those before them are done earlier than predicted."""
        self.by_reservation.pop(reservation_id).send()
        if self._timer is None:  # none is held
            return
        first = next(iter(self), None)
        if first is not None:
            first.send()
        wait_s, now = 0.0, self._loop.time()
        for previous, prompt in pairwise(self):
            wait_s += previous.choice.prefill_s
            if prompt.sending is not None:
                at = now + max(wait_s - _LEAD * previous.last_step_s, 0.0)
                prompt.send_at = min(prompt.send_at, at)
        self._set_timer()

    def send_all(self) -> None:
        for prompt in self:
            prompt.send()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        at = min((prompt.send_at for prompt in self if prompt.is_waiting), default=None)
        if at is None:
            self._timer = None
        else:
            self._timer, self._timer_at = self._loop.call_at(at, self._send_due, at), at

    def _send_due(self, at: float) -> None:
        for prompt in self:
            if prompt.send_at <= at:
                prompt.send()
        self._set_timer()


class PromptPacer:
    """See the module."""

    def __init__(self, now: Callable[[], float], is_enabled: bool = True) -> None:
        self._is_enabled = is_enabled
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._prompts: dict[WorkerDpRank, _RankPrompts] = {}
        """Ranks with prompts."""
        self._ranks: dict[int, WorkerDpRank] = {}
        """Worker rank of each reservation."""
        self.holds_s = Histogram(_HOLDS_S)
        """How long prompts were held."""

    def can_send(self, choice: WorkerChoice) -> bool:
        """Whether a request that is routed now would not be held."""
        return not self._hold_s(choice)

    def add(self, decision: Decision, choice: WorkerChoice | None) -> None:
        """Add a prompt to those of its worker; hold it if it has to wait. Ignored if it is not computed there."""
        if choice is None or not (self._is_enabled and _is_computed(choice.request)):
            return
        hold_s = self._hold_s(choice)
        prompt = _Prompt(choice)
        prompts = self._prompts.setdefault(choice.worker_rank, _RankPrompts(self._loop))
        prompts.by_reservation[decision.reservation_id] = prompt
        self._ranks[decision.reservation_id] = choice.worker_rank
        if hold_s > 0.0:
            prompt.held_since = self._now()
            prompts.hold(prompt, hold_s)

    def is_held(self, decision: Decision) -> bool:
        prompt = self._prompt_of(decision)
        return prompt is not None and prompt.sending is not None

    async def hold(self, decision: Decision) -> None:
        """Wait until the prompt may be sent, or is removed."""
        prompt = self._prompt_of(decision)
        if prompt is not None and prompt.sending is not None:
            await prompt.sending
            self.holds_s.observe(self._now() - prompt.held_since)
            prompt.sending = None

    def remove(self, decision: Decision) -> None:
        """Remove a prompt that is computed or given up; the next ones may be sent earlier. Unknown ones are ignored."""
        rank = self._ranks.pop(decision.reservation_id, None)
        if rank is not None:
            prompts = self._prompts[rank]
            prompts.remove(decision.reservation_id)
            if not prompts.by_reservation:
                del self._prompts[rank]

    def end_holds(self, reachable: frozenset[InstanceId] = frozenset()) -> None:
        """Hold no prompt any longer, except for these workers."""
        for (instance_id, _), prompts in self._prompts.items():
            if instance_id not in reachable:
                prompts.send_all()

    # ---

    def _prompt_of(self, decision: Decision) -> _Prompt | None:
        rank = self._ranks.get(decision.reservation_id)
        return None if rank is None else self._prompts[rank].by_reservation[decision.reservation_id]

    def _hold_s(self, choice: WorkerChoice) -> float:
        """How long to hold a prompt that is routed now; 0 if it can be sent."""
        prompts = self._prompts.get(choice.worker_rank)
        if prompts is None or not _is_computed(choice.request):
            return 0.0
        previous = prompts.newest
        if previous.delay_by(choice) <= choice.step_s or _overtakes(choice, prompts):
            return 0.0
        return max(choice.queue_s - _LEAD * previous.last_step_s, 0.0)


def _overtakes(choice: WorkerChoice, prompts: Iterable[_Prompt]) -> bool:
    priority = choice.request.routing.priority
    return any(each.choice.request.routing.priority < priority for each in prompts)


def _is_computed(request: Request) -> bool:
    """Whether the worker computes the prompt, rather than receives its KV."""
    return request.prefill_only or (request.handoff is None and request.rendezvous is None)
