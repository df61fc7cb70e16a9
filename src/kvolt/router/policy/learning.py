"""Learning: what a router sees of what came of its decisions, handed to all who learn from it. Pure.

Puts together how long answers get (`output_lengths`), how long prompts really take (`step_fit`), the counts (`stats`)
and whoever looks on (`Watch`: what workers hold by our own decisions, and whether the index is right about them).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvolt.core.card import EngineInfo
from kvolt.core.delta import Usage
from kvolt.core.ids import InstanceId
from kvolt.core.latency import Floats
from kvolt.core.request import Request
from kvolt.router.policy.load import Rows
from kvolt.router.policy.output_lengths import OutputLengths
from kvolt.router.policy.step_fit import StepFit
from kvolt.router.stats import RouterStats

if TYPE_CHECKING:
    from kvolt.router.policy.selector import Choice


class Watch(Protocol):
    """Who is told what becomes of requests. Every ticket that was booked is freed."""

    def workers(self, infos: Mapping[InstanceId, EngineInfo | None]) -> None: ...

    def booked(self, ticket: int, choice: Choice) -> None: ...

    def begun(self, ticket: int, choice: Choice, cached_tokens: int | None, now: float) -> None:
        """How much of the prompt was not computed, if the worker says."""
        ...

    def freed(self, ticket: int) -> None: ...


class Nobody:
    """A Watch."""

    def workers(self, infos: Mapping[InstanceId, EngineInfo | None]) -> None: ...

    def booked(self, ticket: int, choice: Choice) -> None: ...

    def begun(self, ticket: int, choice: Choice, cached_tokens: int | None, now: float) -> None: ...

    def freed(self, ticket: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Sent:
    choice: Choice
    row: int
    at: float
    others_share: float
    """Of the prompts of others that are computed in between: seconds of theirs for each of ours."""


class Learning:
    """See the module."""

    def __init__(self, watch: Watch | None = None, corrects_times: bool = True) -> None:
        self.watch = watch or Nobody()
        self.lengths = OutputLengths()
        self.stats = RouterStats()
        self._fit = StepFit()
        self._corrects_times = corrects_times
        self._sent: dict[int, _Sent] = {}

    def add_row(self, row: int) -> None:
        self._fit.add_row(row)

    def drop_row(self, row: int) -> None:
        self._fit.drop_row(row)

    def output_tokens(self, request: Request) -> float:
        """As many as are expected."""
        return self.lengths.expected(request)

    def tokens_beside_others(self, output_tokens: float) -> float:
        """For how many steps an answer is computed beside those that decode there now: they are over, too, some day."""
        return min(output_tokens, self.lengths.typical)

    def pace(self, rows: Rows | slice, now: float) -> Floats:
        """How many times as long as they say workers take; 1 where that is not corrected."""
        return self._fit.factors(rows, now)

    def booked(self, ticket: int, choice: Choice, row: int, own_s: float, now: float) -> None:
        """`own_s`: until the worker would have computed what this router has sent it before."""
        others_s = max(choice.queue_s - own_s, 0.0)
        ahead_s = own_s + choice.prefill_s
        self._sent[ticket] = _Sent(choice, row, now, others_s / ahead_s if ahead_s > 0.0 else 0.0)
        request = choice.request
        num_blocks = -(-request.num_prompt_tokens // request.block_size) if request.block_size else 0
        self.stats.num_saturated += choice.is_saturated
        self.stats.decided(num_blocks, choice.overlap_blocks, choice.most_overlap, request.num_prompt_tokens)
        self.watch.booked(ticket, choice)

    def begun(self, ticket: int, cached_tokens: int | None, now: float) -> None:
        """The first token of one that is booked and had not begun."""
        sent = self._sent[ticket]
        choice, request = sent.choice, sent.choice.request
        self.stats.begun(now - sent.at, choice.predicted_s)
        if cached_tokens is not None and request.num_prompt_tokens:
            self.stats.real_hit_rate.observe(min(cached_tokens / request.num_prompt_tokens, 1.0))
        # Of a prompt that came from elsewhere the time is its way here, and says nothing of the worker's steps.
        num_cached = (cached_tokens or 0) // (request.block_size or 1)
        was_brought = choice.is_tiered and num_cached > choice.held_blocks
        is_elsewhere = request.handoff is not None or request.rendezvous is not None or request.is_resumed
        is_own = not is_elsewhere and not was_brought
        if self._corrects_times and is_own:
            told_s = choice.told_s * (1.0 + sent.others_share)
            if cached_tokens is not None:  # more or less was computed than was thought
                told_s *= max(request.num_given_tokens - cached_tokens, 1) / max(choice.prefill_tokens, 1)
            self._fit.begun(sent.row, sent.at, told_s, now)
        self.watch.begun(ticket, choice, cached_tokens, now)

    def freed(self, ticket: int, usage: Usage | None) -> None:
        """Not an error for one that is not booked."""
        sent = self._sent.pop(ticket, None)
        if sent is None:
            return
        self.stats.num_ended += 1
        if usage is not None:
            self.lengths.learn(sent.choice.request, usage.completion_tokens)
            self.stats.output_tokens.observe(usage.completion_tokens)
        self.watch.freed(ticket)
