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
from collections.abc import Callable, Iterable
from itertools import pairwise

from kvolt.core.ids import InstanceId
from kvolt.core.request import Request
from kvolt.router.policy.choice import Choice
from kvolt.router.port import Decision
from kvolt.router.worker_rank import WorkerDpRank
from kvolt.runtime.histogram import Histogram

_LEAD = 0.25
"""A held prompt is sent this share of the last step of the prompt before it early: errors of the prediction and the
way to the worker take time, too, and a late prompt costs a step without prompts."""
_HOLDS_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class _Prompt:
    """A prompt without a first token at its worker."""

    __slots__ = ("choice", "held_since", "sending", "timer")

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self.held_since = 0.0
        self.sending: asyncio.Future[None] | None = None
        """Set while the prompt is held; done when it may be sent."""
        self.timer: asyncio.TimerHandle | None = None

    @property
    def last_step_tokens(self) -> float:
        return (max(self.choice.prefill_tokens, 1) - 1) % self.choice.max_step_tokens + 1

    @property
    def last_step_s(self) -> float:
        return self.choice.prefill_s * self.last_step_tokens / max(self.choice.prefill_tokens, 1)

    def delay_by(self, later: Choice) -> float:
        """Time by which a later prompt in its last step would delay this one."""
        tokens = max(later.prefill_tokens, 1)
        share = min(later.max_step_tokens - self.last_step_tokens, tokens) / tokens
        return share * max(later.prefill_s - later.step_s, 0.0)

    def send(self) -> None:
        if self.sending is not None and not self.sending.done():
            self.sending.set_result(None)

    def end_hold(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.sending = None


class PromptPacer:
    """See the module."""

    def __init__(self, now: Callable[[], float], is_enabled: bool = True) -> None:
        self._is_enabled = is_enabled
        self._now = now
        self._loop = asyncio.get_running_loop()
        self._prompts: dict[WorkerDpRank, dict[int, _Prompt]] = {}
        """Prompts without a first token by worker rank and reservation, oldest first."""
        self._ranks: dict[int, WorkerDpRank] = {}
        """Worker rank of each reservation."""
        self.holds_s = Histogram(_HOLDS_S)
        """How long prompts were held."""

    def can_send(self, choice: Choice) -> bool:
        """Whether a request that is routed now would not be held."""
        return not self._hold_s(choice)

    def add(self, decision: Decision, choice: Choice | None) -> None:
        """Add a prompt to those of its worker; hold it if it has to wait. Ignored if it is not computed there."""
        if choice is None or not (self._is_enabled and _is_computed(choice.request)):
            return
        hold_s = self._hold_s(choice)
        prompt = _Prompt(choice)
        self._ranks[decision.reservation_id] = choice.worker_rank
        self._prompts.setdefault(choice.worker_rank, {})[decision.reservation_id] = prompt
        if hold_s > 0.0:
            prompt.sending, prompt.held_since = self._loop.create_future(), self._now()
            prompt.timer = self._loop.call_later(hold_s, prompt.send)

    def is_held(self, decision: Decision) -> bool:
        prompt = self._prompt_of(decision)
        return prompt is not None and prompt.sending is not None

    async def hold(self, decision: Decision) -> None:
        """Wait until the prompt may be sent, or is removed."""
        prompt = self._prompt_of(decision)
        if prompt is not None and prompt.sending is not None:
            await prompt.sending
            self.holds_s.observe(self._now() - prompt.held_since)
            prompt.end_hold()

    def remove(self, decision: Decision) -> None:
        """Remove a prompt that is computed or given up; the next ones may be sent earlier. Unknown ones are ignored."""
        rank = self._ranks.pop(decision.reservation_id, None)
        if rank is None:
            return
        prompts = self._prompts[rank]
        prompt = prompts.pop(decision.reservation_id)
        prompt.send()
        prompt.end_hold()
        if prompts:
            self._reschedule(list(prompts.values()))
        else:
            del self._prompts[rank]

    def end_holds(self, reachable: frozenset[InstanceId] = frozenset()) -> None:
        """Hold no prompt any longer, except for these workers."""
        for (instance_id, _), prompts in self._prompts.items():
            if instance_id not in reachable:
                for prompt in prompts.values():
                    prompt.send()

    # ---

    def _prompt_of(self, decision: Decision) -> _Prompt | None:
        rank = self._ranks.get(decision.reservation_id)
        return None if rank is None else self._prompts[rank][decision.reservation_id]

    def _hold_s(self, choice: Choice) -> float:
        """How long to hold a prompt that is routed now; 0 if it can be sent."""
        prompts = self._prompts.get(choice.worker_rank)
        if not prompts or not _is_computed(choice.request):
            return 0.0
        previous = next(reversed(prompts.values()))
        if previous.delay_by(choice) <= choice.step_s or _overtakes(choice, prompts.values()):
            return 0.0
        return max(choice.queue_s - _LEAD * previous.last_step_s, 0.0)

    def _reschedule(self, prompts: list[_Prompt]) -> None:
        """Send held prompts earlier if those before them are done earlier than predicted."""
        prompts[0].send()
        wait_s = 0.0
        for previous, prompt in pairwise(prompts):
            wait_s += previous.choice.prefill_s
            if prompt.timer is not None and prompt.sending is not None:
                at = self._loop.time() + max(wait_s - _LEAD * previous.last_step_s, 0.0)
                if at < prompt.timer.when():
                    prompt.timer.cancel()
                    prompt.timer = self._loop.call_at(at, prompt.send)


def _overtakes(choice: Choice, prompts: Iterable[_Prompt]) -> bool:
    priority = choice.request.routing.priority
    return any(each.choice.request.routing.priority < priority for each in prompts)


def _is_computed(request: Request) -> bool:
    """Whether the worker computes the prompt, rather than receives its KV."""
    return request.prefill_only or (request.handoff is None and request.rendezvous is None)
