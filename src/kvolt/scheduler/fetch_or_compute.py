"""FetchOrCompute: decides whether blocks in lower tiers are onboarded, recomputed, or both concurrently.

Predicts from the engine's latency model and the measured time per block of each tier. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from kvolt.core.kv_events import Tier
from kvolt.core.latency import StepModel, prompt_s
from kvolt.core.load import StepStats
from kvolt.scheduler.step_plan import shared_prefill_tokens

_MAX_FETCH_SHARE = 0.9
"""Fetching must take less than this share of the recompute time: both are estimates, and computing cannot
fail."""
_LOOKUP_SHARE = 0.25
"""Share of the time to compute the rest of a prompt that a lookup in a remote tier may take."""
_PROBE_EVERY = 16
"""Every n-th prompt for which computing is faster is fetched nevertheless, to keep tier speeds current;
concurrently with computing if that takes several steps, which delays nothing. The very first such prompt is
then a probe, too."""
_MIN_CONCURRENT_BLOCKS = 8
"""Minimum number of blocks for fetching and computing concurrently."""


class FetchDecision(NamedTuple):
    num_blocks: int
    """Number of blocks to fetch, from the first one that the engine lacks."""
    is_concurrent: bool = False
    """Whether the engine computes the prompt from its start while the blocks are fetched."""


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
        """`model`: the engine's latency model. `step_tokens`: most prompt tokens per step. `block_s`: time to
        fetch a block from a tier. If either returns None, everything available is fetched. `can_share`:
        whether fetching and computing can overlap."""
        self._model = model
        self._block_size = block_size
        self._step_tokens = max(step_tokens, block_size)
        self._block_s = block_s
        self._can_share = can_share
        self._num_refusals = 0
        self.num_declined = 0
        """Available blocks that were recomputed because that was faster."""

    def lookup_budget_s(self, num_tokens: int, num_known: int, num_keys: int) -> float:
        """Time budget for looking up whether the blocks of a prompt from `num_known` to `num_keys` exist."""
        model = self._model()
        if model is None:
            return inf
        saved_s = self._rest_s(model, num_tokens, num_known) - self._rest_s(model, num_tokens, num_keys)
        return _LOOKUP_SHARE * saved_s

    def decide(self, num_tokens: int, num_present: int, tiers: Sequence[Tier]) -> FetchDecision:
        """Decide for a prompt with `num_present` blocks in the engine and the next blocks in these tiers."""
        model, each_s = self._model(), [self._block_s(tier) for tier in tiers]
        known_s = [block_s / _MAX_FETCH_SHARE for block_s in each_s if block_s is not None]
        if model is None or not tiers or len(known_s) < len(tiers):
            return FetchDecision(len(tiers))
        fetch_s = list(accumulate(known_s, initial=0.0))
        best_count, best_s = 0, self._rest_s(model, num_tokens, num_present)
        for count in range(1, len(tiers) + 1):
            if count == len(tiers) or tiers[count] is not tiers[count - 1]:
                # stopping can only pay off where the tier changes
                total_s = fetch_s[count] + self._rest_s(model, num_tokens, num_present + count)
                if total_s < best_s:
                    best_count, best_s = count, total_s
        if self._can_share and len(tiers) >= _MIN_CONCURRENT_BLOCKS:
            concurrent_s = self._concurrent_s(model, num_present, fetch_s)
            if (
                concurrent_s + self._rest_s(model, num_tokens, num_present + len(tiers))
                < best_s * _MAX_FETCH_SHARE
            ):
                return FetchDecision(len(tiers), is_concurrent=True)
        if best_count < len(tiers):
            self._num_refusals += 1
            takes_steps = len(tiers) * self._block_size > self._step_tokens
            is_concurrent = self._can_share and takes_steps and not best_count
            if self._num_refusals % _PROBE_EVERY == 0 or (self._num_refusals == 1 and is_concurrent):
                # Otherwise the estimate of a tier that was slow once would never be updated.
                return FetchDecision(len(tiers), is_concurrent=is_concurrent)
        self.num_declined += len(tiers) - best_count
        return FetchDecision(best_count)

    def _concurrent_s(self, model: StepModel, num_present: int, fetch_s: Sequence[float]) -> float:
        """Time until all blocks are present, if the engine computes them from the first on, step by step,
        while they are fetched from the last on. Blocks that arrived before a step started are not
        computed."""
        start = num_present * self._block_size
        end = start + (len(fetch_s) - 1) * self._block_size
        computed_s = 0.0
        while start < end:
            if fetch_s[-1] - fetch_s[start // self._block_size - num_present] <= computed_s:
                return computed_s
            num_tokens = min(self._step_tokens, end - start)
            if computed_s:  # before the first step nothing has arrived
                num_tokens = min(num_tokens, shared_prefill_tokens(end - start, self._step_tokens))
            start += num_tokens
            computed_s += model.step_s(
                StepStats(prefill_tokens=num_tokens, prefill_context=num_tokens * start)
            )
        return inf

    def _rest_s(self, model: StepModel, num_tokens: int, num_blocks: int) -> float:
        """Time to compute the prompt after its first `num_blocks` blocks."""
        return prompt_s(model, num_tokens, num_blocks * self._block_size, self._step_tokens)
