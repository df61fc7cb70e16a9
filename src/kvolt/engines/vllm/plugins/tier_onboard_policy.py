"""Decides whether a prompt's blocks are loaded from vLLM's tiers or computed again. Pure.

Based on measured step times and block load times, with `FetchOrCompute`. Without measurements all available blocks are
loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from kvolt.core.kv_events import Tier
from kvolt.core.latency import LatencyModel
from kvolt.core.load import StepStats
from kvolt.latency.least_squares import independent_columns, nonnegative_fit
from kvolt.scheduler.fetch_or_compute import FetchOrCompute

_MIN_STEPS = 8
_LATEST_STEPS = 64
_REFIT_EVERY = 8
"""Steps after which the model is fitted again."""
_MIN_SPREAD = 2.0
"""Minimum ratio of largest to smallest step to fit a constant part; below it that is indistinguishable from token
costs."""


class StepTimes:
    """Latency model of vLLM's prefill, fitted to its latest steps."""

    def __init__(self) -> None:
        self._steps: deque[StepStats] = deque(maxlen=_LATEST_STEPS)
        self._num_new = 0
        self._model: LatencyModel | None = None

    def add(self, step: StepStats) -> None:
        """Add a step; ignored if it computed no prompt tokens."""
        if step.prefill_tokens and step.time_s > 0:
            self._steps.append(step)
            self._num_new += 1

    @property
    def model(self) -> LatencyModel | None:
        """None until enough steps are known."""
        if len(self._steps) >= _MIN_STEPS and (self._model is None or self._num_new >= _REFIT_EVERY):
            self._num_new = 0
            self._model = _fitted(self._steps)
        return self._model


def _fitted(steps: Sequence[StepStats]) -> LatencyModel:
    tokens = [float(step.prefill_tokens) for step in steps]
    columns = [tokens, [float(step.prefill_context) for step in steps]]
    if max(tokens) >= _MIN_SPREAD * min(tokens):
        columns.append([1.0] * len(steps))
    weights = [step.time_s**-2 for step in steps]  # the first steps of an engine are slow
    usable = independent_columns(columns)
    fitted = nonnegative_fit([columns[index] for index in usable], [step.time_s for step in steps], weights)
    coefficients = [0.0, 0.0, 0.0]
    for index, coefficient in zip(usable, fitted, strict=True):
        coefficients[index] = coefficient
    token_s, context_s, base_s = coefficients
    return LatencyModel(prefill_token_s=token_s, prefill_context_s=context_s, base_s=base_s)


class TierOnboardPolicy:
    """See the module. `chunk`: maximum prompt tokens per step."""

    def __init__(self, block_size: int, chunk: int) -> None:
        self.times = StepTimes()
        self.block_s: Mapping[Tier, float] = {}
        """Time to load a block, by tier."""
        # vLLM loads all blocks before it computes any: loading and computing cannot overlap.
        self._choice = FetchOrCompute(
            lambda: self.times.model, block_size, chunk, self._block_s, can_share=False
        )

    def _block_s(self, tier: Tier) -> float | None:
        return self.block_s.get(tier)

    @property
    def num_declined(self) -> int:
        """Available blocks that were recomputed because that was faster."""
        return self._choice.num_declined

    def num_to_onboard(self, num_tokens: int, num_present: int, tiers: Sequence[Tier]) -> int:
        """Number of blocks to load, after `num_present` blocks in vLLM, from blocks in these tiers."""
        return self._choice.decide(num_tokens, num_present, tiers).num_blocks
