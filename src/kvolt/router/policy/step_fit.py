"""PaceEstimator: ratio of observed to modelled prefill time, per worker. Pure; by rows of WorkerLoads.

A worker may have registered no step model, or one fitted on another machine. The observations are first tokens: between
two first tokens a busy worker computed one prompt; an idle one started when the prompt was sent. So the prefill time is
the time since the later of the two, and

    factor = observed prefill seconds / modelled prefill seconds

over the latest prompts. A ratio of sums is also right for prompts that are computed together (the first one appears
slow, the others instant) and for prompts that wait behind decode steps, which is what a request experiences.

The factor is bounded, and one stall counts for a few prompts at most. A worker that is avoided for its factor yields no
observations, so without any the factor returns to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from kvolt.router.policy.cost_model import Floats
from kvolt.router.policy.load import Rows


class PaceOptions(msgspec.Struct, frozen=True, kw_only=True):
    max_factor: float = 256.0
    """Bound of the factor and its inverse; large, since the default model assumes a large GPU."""
    window: int = 32
    """Averaging window in prompts."""
    prior: float = 4.0
    """Weight of the model, in observed prompts."""
    max_stall_factor: float = 8.0
    """Bound of one observation, as a multiple of the expected time."""
    ignored_factor: float = 1.5
    """Factors up to this, or above its inverse, count as 1: observations vary with other work, and a right
    model must not be made worse."""
    full_factor: float = 2.0
    """Factors from this on count in full; in between they are interpolated."""
    quiet_s: float = 30.0
    """Time without observations after which a factor starts to decay."""
    half_life_s: float = 60.0
    """Half-life of that decay, of the factor's logarithm."""


_REFRESH_S = 1.0
"""Interval at which decayed factors are updated."""


@dataclass(slots=True)
class _RowPace:
    """Observations of one row."""

    measured_s: float = 0.0
    model_s: float = 0.0
    num: float = 0.0
    unattributed_s: float = 0.0
    """Observed time in excess of one prompt's bound; attributed to prompts that get their first token together."""
    log_factor: float = 0.0
    first_token_at: float = -math.inf
    """Time of the latest first token."""


class PaceEstimator:
    """See the module."""

    def __init__(self, options: PaceOptions | None = None) -> None:
        self._options = options or PaceOptions()
        self._by_row: dict[int, _RowPace] = {}
        self._factors = np.ones(16)
        self._refresh_at = -math.inf

    def factors(self, rows: Rows | slice, now: float) -> Floats:
        """Factors by which modelled times are multiplied."""
        if now >= self._refresh_at:
            self._refresh_at = now + _REFRESH_S
            for row, row_pace in self._by_row.items():
                self._factors[row] = self._factor(row_pace, now)
        factors: Floats = self._factors[rows]
        return factors

    def add_row(self, row: int) -> None:
        if row >= len(self._factors):
            more = np.ones(max(row + 1, 2 * len(self._factors)) - len(self._factors))
            self._factors = np.concatenate([self._factors, more])

    def drop_row(self, row: int) -> None:
        """Remove a worker; its row may be reused."""
        self._by_row.pop(row, None)
        self._factors[row] = 1.0

    def on_first_token(self, row: int, sent_at: float, model_s: float, now: float) -> None:
        """Record a first token whose prefill takes `model_s` by the uncorrected model."""
        options = self._options
        row_pace = self._by_row.setdefault(row, _RowPace())
        measured_s = max(now - max(sent_at, row_pace.first_token_at), 0.0)
        decay = (1.0 - 1.0 / options.window) * self._retained(row_pace, sent_at)
        row_pace.first_token_at = now
        if model_s <= 0.0:
            return
        usual_s = max(row_pace.model_s / row_pace.num if row_pace.num else model_s, model_s)
        if measured_s > 0.0:
            row_pace.unattributed_s = measured_s
        measured_s = min(
            row_pace.unattributed_s,
            options.max_stall_factor * usual_s * max(math.exp(row_pace.log_factor), 1.0),
        )
        row_pace.unattributed_s -= measured_s
        row_pace.measured_s = row_pace.measured_s * decay + measured_s
        row_pace.model_s = row_pace.model_s * decay + model_s
        row_pace.num = row_pace.num * decay + 1.0
        max_log_factor = math.log(options.max_factor)
        ratio = max(row_pace.measured_s / row_pace.model_s, 1.0 / options.max_factor)
        log_factor = math.log(ratio) * row_pace.num / (row_pace.num + options.prior)
        row_pace.log_factor = min(max(log_factor, -max_log_factor), max_log_factor)
        self._factors[row] = self._factor(row_pace, now)

    def _factor(self, row_pace: _RowPace, now: float) -> float:
        return math.exp(self._dampened(row_pace.log_factor) * self._retained(row_pace, now))

    def _dampened(self, log_factor: float) -> float:
        ignored, full = math.log(self._options.ignored_factor), math.log(self._options.full_factor)
        size = min(max(abs(log_factor) - ignored, 0.0) / (full - ignored) * full, abs(log_factor))
        return math.copysign(size, log_factor)

    def _retained(self, row_pace: _RowPace, now: float) -> float:
        """Share of the log factor that has not decayed."""
        quiet_s = now - row_pace.first_token_at - self._options.quiet_s
        return 1.0 if quiet_s <= 0.0 else 2.0 ** (-quiet_s / self._options.half_life_s)
