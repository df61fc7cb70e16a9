"""StepPace: an engine's latency model, corrected by observed steps, and the step length limits derived from it.

Pure. The model is measured once at start, on a machine that may be busier or quieter later. Steps without
prompts correct the cost of decodes; steps with prompts correct the cost of the remaining time:

    log(factor) += gain * log(actual / predicted)

The gain is small to smooth variation, and large if a prediction is off by more than a factor of two: then the
model is wrong (or the machine stalled, and the next steps undo it).

No step has more than twice the prompt tokens of the largest timed one: a model fitted to small steps does not
extrapolate further, and a step cannot be interrupted.
"""

from __future__ import annotations

import math

import msgspec

from kvolt.core.latency import LatencyModel
from kvolt.core.load import StepStats

SHARED_STEP_S = 0.08
"""A step with prompts may always be predicted to take this long: gaps of this length are not noticeable."""
SHARED_PROMPTS_S = 0.2
"""Most predicted time that prompts may add to a step while other sequences decode."""
LONGEST_STEP_S = 1.0
"""Longest predicted step if no sequence decodes. Cancellations act between steps."""

_GAIN, _GAIN_IF_WRONG = 0.2, 0.6
_WRONG_RATIO = 2.0
_MAX_RATIO = 32.0
"""Bound on the ratio of actual to predicted time of one step."""
_MAX_FACTOR = 1024.0
_MIN_SHARE = 0.05
"""Minimum share of a step's time attributed to its prompts."""
_MIN_TOKEN = 1 / 256
"""Minimum cost of a prompt token, relative to a decode step: a fit on a busy machine may be close to zero,
which no factor could correct."""
_GROWTH = 2
_DIFFERENCE = 1.25
_DECODES, _PROMPT = (8, 4096), 512
"""A decode batch with its context tokens, and a prompt length, used to compare models."""
_PROMPT_COSTS = ("prefill_token_s", "prefill_context_s", "prefill_step_s")


class StepPace:
    """See the module."""

    def __init__(self, measured: LatencyModel, most_timed: int | None = None) -> None:
        """`most_timed`: prompt tokens of the largest step that the model was fitted to; None for no limit."""
        token_s = max(measured.prefill_token_s, _MIN_TOKEN * measured.base_s)
        self._measured = msgspec.structs.replace(measured, prefill_token_s=token_s)
        self._most_timed = most_timed
        self._decodes = self._prompts = 1.0
        """Correction factors of the costs."""
        self.model = self._measured
        """The corrected model."""

    def observe(self, step: StepStats) -> None:
        """Correct the model by a step that took `step.time_s`."""
        if self._most_timed is not None:
            self._most_timed = max(self._most_timed, step.prefill_tokens)
        decodes_s = self.model.step_s(msgspec.structs.replace(step, prefill_tokens=0, prefill_context=0))
        if step.prefill_tokens:
            actual_s = max(step.time_s - decodes_s, _MIN_SHARE * step.time_s)
            self._prompts = _update_factor(self._prompts, actual_s, self.model.step_s(step) - decodes_s)
        if not step.prefill_tokens or step.time_s < decodes_s:
            self._decodes = _update_factor(self._decodes, step.time_s, decodes_s)
        self.model = self._corrected()

    @property
    def most_prompt_tokens(self) -> int | None:
        """Most prompt tokens per step; None for no limit."""
        return None if self._most_timed is None else _GROWTH * self._most_timed

    def limit_s(self, beside: StepStats, others_decode: bool) -> float:
        """Longest predicted time of a step with prompts next to the decodes `beside`.

        Prompts take at most as long as the decodes, so that inter-token gaps stay below about twice the usual
        one.
        """
        if not others_decode:
            return LONGEST_STEP_S
        decodes_s = self.model.step_s(beside) if beside.batch else 0.0
        return max(SHARED_STEP_S, decodes_s + min(decodes_s, SHARED_PROMPTS_S))

    def _corrected(self) -> LatencyModel:
        corrected = {
            name: cost * (self._prompts if name in _PROMPT_COSTS else self._decodes)
            for name, cost in msgspec.structs.asdict(self._measured).items()
            if name.endswith("_s")
        }
        return msgspec.structs.replace(self._measured, **corrected)


def models_differ(one: LatencyModel, other: LatencyModel) -> bool:
    """Whether two models disagree enough to matter for routing."""
    times = ((each.decode_s(*_DECODES), each.prefill_s(_PROMPT)) for each in (one, other))
    return any(max(pair) > _DIFFERENCE * min(pair) for pair in zip(*times, strict=True))


def _update_factor(factor: float, actual_s: float, predicted_s: float) -> float:
    """The factor corrected by one step."""
    if actual_s <= 0.0 or predicted_s <= 0.0:
        return factor
    ratio = min(max(actual_s / predicted_s, 1 / _MAX_RATIO), _MAX_RATIO)
    gain = _GAIN if 1 / _WRONG_RATIO <= ratio <= _WRONG_RATIO else _GAIN_IF_WRONG
    return min(max(factor * math.pow(ratio, gain), 1 / _MAX_FACTOR), _MAX_FACTOR)
