"""FetchOrCompute: decides whether blocks in lower tiers are onboarded, computed again, or both until they meet.

Owns the guess: by the engine's step model, and the speed at which blocks came from each tier so far. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from kvolt.core.kv_events import Tier
from kvolt.core.latency import StepModel, prompt_s
from kvolt.core.load import StepStats
from kvolt.scheduler.step_plan import meeting_tokens

_SPARE = 0.9
"""Of the time to compute blocks again, that to bring them may take: both are guesses, and to compute is certain."""
_SPENT_LOOKING = 0.25
"""Of the time to compute the rest of a prompt, what a far tier may take to say whether it has it."""
_PROBE_EVERY = 16
"""Of the prompts for which it would be sooner to compute, the one for which blocks are brought all the same: meanwhile,
where the engine is at it for some steps, which costs nobody anything; the very first is such a one then, too."""
_FEWEST_BOTH = 8
"""Blocks: fewer are brought or computed, and not both."""


class Verdict(NamedTuple):
    num_blocks: int
    """To bring, from the first that the engine lacks."""
    is_meanwhile: bool = False
    """While the prompt is computed from its beginning; else before."""


class FetchOrCompute:
    """See the module."""

    def __init__(
        self,
        model: Callable[[], StepModel | None],
        block_size: int,
        step_tokens: int,
        block_s: Callable[[Tier], float | None],
        *,
        can_share: bool = True,
    ) -> None:
        """`model`: how long the engine takes for a step. `step_tokens`: of prompts that it computes in one at most.
        `block_s`: to bring a block from there. Where either is not known (None), whatever can be brought is.
        `can_share`: whether blocks may come while the engine computes those before them."""
        self._model = model
        self._block_size = block_size
        self._step_tokens = max(step_tokens, block_size)
        self._block_s = block_s
        self._can_share = can_share
        self._num_refusals = 0
        self.num_declined = 0
        """Blocks that were computed again though they could have been brought, since that was sooner."""

    def looking_s(self, num_tokens: int, num_known: int, num_keys: int) -> float:
        """How long it may take to ask whether a prompt's blocks from `num_known` to `num_keys` are there."""
        model = self._model()
        if model is None:
            return inf
        saved_s = self._rest_s(model, num_tokens, num_known) - self._rest_s(model, num_tokens, num_keys)
        return _SPENT_LOOKING * saved_s

    def judge(self, num_tokens: int, num_present: int, tiers: Sequence[Tier]) -> Verdict:
        """Of a prompt of which the engine has so many blocks, and of which the next lie in these tiers."""
        model, each_s = self._model(), [self._block_s(tier) for tier in tiers]
        known_s = [block_s / _SPARE for block_s in each_s if block_s is not None]
        if model is None or not tiers or len(known_s) < len(tiers):
            return Verdict(len(tiers))
        fetch_s = list(accumulate(known_s, initial=0.0))
        best, best_s = 0, self._rest_s(model, num_tokens, num_present)
        for count in range(1, len(tiers) + 1):
            if count == len(tiers) or tiers[count] is not tiers[count - 1]:
                # only where the tier changes can it be better to stop
                total_s = fetch_s[count] + self._rest_s(model, num_tokens, num_present + count)
                if total_s < best_s:
                    best, best_s = count, total_s
        if self._can_share and len(tiers) >= _FEWEST_BOTH:
            both_s = self._both_s(model, num_present, fetch_s)
            if both_s + self._rest_s(model, num_tokens, num_present + len(tiers)) < best_s * _SPARE:
                return Verdict(len(tiers), is_meanwhile=True)
        if best < len(tiers):
            self._num_refusals += 1
            takes_steps = len(tiers) * self._block_size > self._step_tokens
            is_beside = self._can_share and takes_steps and not best
            if self._num_refusals % _PROBE_EVERY == 0 or (self._num_refusals == 1 and is_beside):
                # A tier that was slow once, or is believed to be, would be held to be so for ever.
                return Verdict(len(tiers), is_meanwhile=is_beside)
        self.num_declined += len(tiers) - best
        return Verdict(best)

    def _both_s(self, model: StepModel, num_present: int, fetch_s: Sequence[float]) -> float:
        """Until all blocks are there: the engine computes them from the first on, a step at a time, and they come from
        the last on. What came until the step before has ended is not computed."""
        start = num_present * self._block_size
        end = start + (len(fetch_s) - 1) * self._block_size
        computed_s = 0.0
        while start < end:
            if fetch_s[-1] - fetch_s[start // self._block_size - num_present] <= computed_s:
                return computed_s
            num_tokens = min(self._step_tokens, end - start)
            if computed_s:  # else nothing has come yet
                num_tokens = min(num_tokens, meeting_tokens(end - start, self._step_tokens))
            start += num_tokens
            computed_s += model.step_s(
                StepStats(prefill_tokens=num_tokens, prefill_context=num_tokens * start)
            )
        return inf

    def _rest_s(self, model: StepModel, num_tokens: int, num_blocks: int) -> float:
        """To compute what follows so many blocks."""
        return prompt_s(model, num_tokens, num_blocks * self._block_size, self._step_tokens)
