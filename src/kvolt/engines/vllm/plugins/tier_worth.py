"""TierWorth: whether a prompt's blocks are brought from a vLLM's tiers, or computed again. Pure.

By how long its own steps took, which the workers measure, and how long blocks took to come. Nothing is known at first,
and whatever can be brought is. The weighing is `FetchOrCompute`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from kvolt.core.kv_events import Tier
from kvolt.core.latency import LatencyModel
from kvolt.core.load import StepStats
from kvolt.latency.least_squares import independent_columns, nonnegative_fit
from kvolt.scheduler.fetch_or_compute import FetchOrCompute

_ENOUGH_STEPS = 8
_LATEST_STEPS = 64
_REFIT_EVERY = 8
"""Steps, before the model is made anew."""
_VARIETY = 2.0
"""Times the smallest step, that the largest must be: else what any step costs and what a token costs look alike."""


class StepTimes:
    """How long vLLM takes for the tokens of prompts, by its latest steps."""

    def __init__(self) -> None:
        self._steps: deque[StepStats] = deque(maxlen=_LATEST_STEPS)
        self._num_new = 0
        self._model: LatencyModel | None = None

    def add(self, step: StepStats) -> None:
        """One that computed some."""
        if step.prefill_tokens and step.time_s > 0:
            self._steps.append(step)
            self._num_new += 1

    @property
    def model(self) -> LatencyModel | None:
        """None as long as too little is known."""
        if len(self._steps) >= _ENOUGH_STEPS and (self._model is None or self._num_new >= _REFIT_EVERY):
            self._num_new = 0
            self._model = _fitted(self._steps)
        return self._model


def _fitted(steps: Sequence[StepStats]) -> LatencyModel:
    tokens = [float(step.prefill_tokens) for step in steps]
    columns = [tokens, [float(step.prefill_context) for step in steps]]
    if max(tokens) >= _VARIETY * min(tokens):
        columns.append([1.0] * len(steps))
    weights = [step.time_s**-2 for step in steps]  # the first ones of an engine are slow
    usable = independent_columns(columns)
    found = nonnegative_fit([columns[at] for at in usable], [step.time_s for step in steps], weights)
    prices = [0.0, 0.0, 0.0]
    for at, price in zip(usable, found, strict=True):
        prices[at] = price
    return LatencyModel(prefill_token_s=prices[0], prefill_context_s=prices[1], base_s=prices[2])


class TierWorth:
    """See the module. `chunk`: tokens that vLLM computes in a step, at most."""

    def __init__(self, block_size: int, chunk: int) -> None:
        self.times = StepTimes()
        self.block_s: Mapping[Tier, float] = {}
        """To bring a block from there."""
        # vLLM waits for a prompt's blocks before it computes any: it cannot share the work.
        self._choice = FetchOrCompute(
            lambda: self.times.model, block_size, chunk, self._bring_s, can_share=False
        )

    def _bring_s(self, tier: Tier) -> float | None:
        return self.block_s.get(tier)

    @property
    def num_declined(self) -> int:
        """Blocks that were computed again though they could have been brought, since that was sooner."""
        return self._choice.num_declined

    def judge(self, num_tokens: int, num_present: int, tiers: Sequence[Tier]) -> int:
        """Of a prompt of which vLLM has so many blocks and the next lie in these tiers, how many to bring."""
        return self._choice.judge(num_tokens, num_present, tiers).num_blocks
