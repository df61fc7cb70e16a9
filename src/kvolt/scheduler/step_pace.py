"""StepPace: an engine's step model, corrected by the steps it runs; and the longest step that may be planned.

Pure. The model is measured once, at start, on a machine that may be busier or quieter later, or too busy to measure
anything. Steps without prompts correct the price of decodes; steps with prompts, what is left of their time:

    log(factor) += gain * log(actual / predicted)

The gain is small, so that what varies from step to step changes little, and large where a prediction is off by more
than a factor of two: then the model is wrong (or the machine stood still, and the next steps undo it).

No step has more than twice the prompt tokens of the largest one that was timed: beyond that a model that was fitted to
small steps says nothing, and a step cannot be interrupted.
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

_GAIN, _GAIN_IF_WRONG = 0.2, 0.6
_WRONG = 2.0
_MOST_RATIO = 32.0
"""A step counts as at most so many times slower or faster than predicted."""
_MOST_FACTOR = 1024.0
_LEAST_SHARE = 0.05
"""Of a step's time, what its prompts have taken at least."""
_LEAST_TOKEN = 1 / 256
"""Of a step that decodes, what a prompt token takes at least: a fit to a few steps of a busy machine may say next to
nothing, and no factor could correct that."""
_GROWTH = 2
_MATTERS = 1.25
_DECODES, _PROMPT = (8, 4096), 512
"""A batch with its context tokens, and a prompt, that models are compared by."""
_PROMPT_PRICES = ("prefill_token_s", "prefill_context_s", "prefill_step_s")


class StepPace:
    """See the module."""

    def __init__(self, measured: LatencyModel, most_timed: int | None = None) -> None:
        """`most_timed`: prompt tokens of the largest step that the model was fitted to; None for no limit."""
        token_s = max(measured.prefill_token_s, _LEAST_TOKEN * measured.base_s)
        self._measured = msgspec.structs.replace(measured, prefill_token_s=token_s)
        self._most_timed = most_timed
        self._decodes = self._prompts = 1.0
        """Factors of their prices."""
        self.model = self._measured
        """The corrected model."""

    def observe(self, step: StepStats) -> None:
        """A step took `step.time_s`."""
        if self._most_timed is not None:
            self._most_timed = max(self._most_timed, step.prefill_tokens)
        decodes_s = self.model.step_s(msgspec.structs.replace(step, prefill_tokens=0, prefill_context=0))
        if step.prefill_tokens:
            actual_s = max(step.time_s - decodes_s, _LEAST_SHARE * step.time_s)
            self._prompts = _moved(self._prompts, actual_s, self.model.step_s(step) - decodes_s)
        if not step.prefill_tokens or step.time_s < decodes_s:
            self._decodes = _moved(self._decodes, step.time_s, decodes_s)
        self.model = self._corrected()

    @property
    def most_prompt_tokens(self) -> int | None:
        """Prompt tokens that a step may have; None for no limit."""
        return None if self._most_timed is None else _GROWTH * self._most_timed

    def limit_s(self, beside: StepStats, others_decode: bool) -> float:
        """Longest predicted time of a step with prompts, beside the decodes that are in it.

        Prompts take as long as the decodes at most, so that no gap between tokens is much above twice the usual one.
        """
        if not others_decode:
            return LONGEST_STEP_S
        decodes_s = self.model.step_s(beside) if beside.batch else 0.0
        return max(SHARED_STEP_S, decodes_s + min(decodes_s, SHARED_PROMPTS_S))

    def _corrected(self) -> LatencyModel:
        prices = {
            name: price * (self._prompts if name in _PROMPT_PRICES else self._decodes)
            for name, price in msgspec.structs.asdict(self._measured).items()
            if name.endswith("_s")
        }
        return msgspec.structs.replace(self._measured, **prices)


def differ(one: LatencyModel, other: LatencyModel) -> bool:
    """Whether two models disagree by enough to matter for routing."""
    times = ((each.decode_s(*_DECODES), each.prefill_s(_PROMPT)) for each in (one, other))
    return any(max(pair) > _MATTERS * min(pair) for pair in zip(*times, strict=True))


def _moved(factor: float, actual_s: float, predicted_s: float) -> float:
    """A factor after a step."""
    if actual_s <= 0.0 or predicted_s <= 0.0:
        return factor
    ratio = min(max(actual_s / predicted_s, 1 / _MOST_RATIO), _MOST_RATIO)
    gain = _GAIN if 1 / _WRONG <= ratio <= _WRONG else _GAIN_IF_WRONG
    return min(max(factor * math.pow(ratio, gain), 1 / _MOST_FACTOR), _MOST_FACTOR)
