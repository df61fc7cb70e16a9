"""StepPace: an engine's step model, corrected by the steps it runs; and the longest step that may be planned.

Pure. The model is measured once, at start, on a machine that may be busier or quieter later. Each step moves the
correction of prompts and that of decodes towards what the step took, each by its share of the predicted time:

    log(factor) += gain * share * log(actual / predicted)

A single stall therefore changes little, and a machine that stays busy is believed after about ten steps.
"""

from __future__ import annotations

import math

import msgspec

from kvolt.core.latency import LatencyModel
from kvolt.core.load import StepStats

SHARED_STEP_S = 0.08
"""A step with prompts may always be predicted to take so long: gaps of this length are not noticed."""
SHARED_PROMPTS_S = 0.2
"""Longest that prompts are predicted to prolong a step while other sequences decode, which wait for it."""
LONGEST_STEP_S = 1.0
"""Longest predicted step where none decodes. Cancellations act between steps."""

_GAIN = 0.2
_MOST_RATIO = 8.0
"""A step counts as at most so many times slower or faster than predicted."""
_MOST_FACTOR = 64.0
_LEAST_FACTOR = 1 / 8
_MATTERS = 1.25
_DECODES, _PROMPT = (8, 4096), 512
"""A batch with its context tokens, and a prompt, that models are compared by."""
_PROMPT_PRICES = ("prefill_token_s", "prefill_context_s", "prefill_step_s")


class StepPace:
    """See the module."""

    def __init__(self, measured: LatencyModel) -> None:
        self._measured = measured
        self._log_decodes = 0.0
        self._log_prompts = 0.0
        self.model = measured
        """The corrected model."""

    def observe(self, step: StepStats) -> None:
        """A step took `step.time_s`."""
        predicted_s = self.model.step_s(step)
        if predicted_s <= 0.0 or step.time_s <= 0.0:
            return
        decodes = msgspec.structs.replace(step, prefill_tokens=0, prefill_context=0)
        decodes_s = self.model.step_s(decodes)
        share = min(decodes_s / predicted_s, 1.0)
        ratio = min(max(step.time_s / predicted_s, 1 / _MOST_RATIO), _MOST_RATIO)
        moved = _GAIN * math.log(ratio)
        self._log_decodes = _bounded(self._log_decodes + share * moved)
        self._log_prompts = _bounded(self._log_prompts + (1.0 - share) * moved)
        self.model = self._corrected()

    def limit_s(self, beside: StepStats, others_decode: bool) -> float:
        """Longest predicted time of a step with prompts, beside the decodes that are in it.

        Prompts take as long as the decodes at most, so that no gap between tokens is much above twice the usual one.
        """
        if not others_decode:
            return LONGEST_STEP_S
        decodes_s = self.model.step_s(beside) if beside.batch else 0.0
        return max(SHARED_STEP_S, decodes_s + min(decodes_s, SHARED_PROMPTS_S))

    def _corrected(self) -> LatencyModel:
        of_decodes, of_prompts = math.exp(self._log_decodes), math.exp(self._log_prompts)
        prices = {
            name: price * (of_prompts if name in _PROMPT_PRICES else of_decodes)
            for name, price in msgspec.structs.asdict(self._measured).items()
            if name.endswith("_s")
        }
        return msgspec.structs.replace(self._measured, **prices)


def differ(one: LatencyModel, other: LatencyModel) -> bool:
    """Whether two models disagree by enough to matter for routing."""
    times = ((each.decode_s(*_DECODES), each.prefill_s(_PROMPT)) for each in (one, other))
    return any(max(pair) > _MATTERS * min(pair) for pair in zip(*times, strict=True))


def _bounded(log_factor: float) -> float:
    return min(max(log_factor, math.log(_LEAST_FACTOR)), math.log(_MOST_FACTOR))
