"""The step model: how long an engine step takes, from what is in it.

One model serves the router, the planner, the simulated engine and the twin, so that they cannot
disagree about time.
"""

from __future__ import annotations

import msgspec

from kvolt.core.load import StepStats


class LatencyModel(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step: `base + prefill*p + prefill_context*px + batch*b + context*c`."""

    base_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_context_s: float = 0.0
    batch_s: float = 0.0
    context_token_s: float = 0.0

    def step_s(self, step: StepStats) -> float:
        return (
            self.base_s
            + self.prefill_token_s * step.prefill_tokens
            + self.prefill_context_s * step.prefill_context
            + self.batch_s * step.batch
            + self.context_token_s * step.context_tokens
        )

    def prefill_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """A prompt alone in one step, its first `num_cached` tokens already held."""
        new = max(num_tokens - num_cached, 0)
        return self.step_s(StepStats(prefill_tokens=new, prefill_context=new * num_tokens))

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """One token for each of `batch` sequences."""
        return self.step_s(StepStats(batch=batch, context_tokens=context_tokens))


def features(step: StepStats) -> tuple[float, float, float, float, float]:
    """The row of a step in the linear fit, in the order of LatencyModel's fields."""
    return (1.0, step.prefill_tokens, step.prefill_context, step.batch, step.context_tokens)
