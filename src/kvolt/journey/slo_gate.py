"""SLO gate: whether prompts are prefilled remotely under the current load, given TTFT and ITL targets. Pure.

Judges the load, not a single request. It estimates the strain (predicted latency over target; 1 just meets it) if all
prompts were prefilled remotely, and if all workers shared prefill and decode. Remote prefill is used while its strain
is at most 1 or not above the other's. Leaving and returning have different thresholds, to avoid oscillation.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvolt.router.selection.forecast import Forecast

_LOAD_HALF_LIFE_S = 4.0
"""Half-life of the load averages."""
_WAIT_HALF_LIFE_S = 3.0
_MAX_MEAN_SHARE = 0.75
"""Mean TTFT over target that counts as violated: some requests wait longer than the mean."""
_TAIL_FACTOR = 3.0
"""Multiple of the mean wait that covers nearly all requests (exponential tail)."""
_MAX_UTILIZATION = 0.95
"""Upper bound of utilization in queueing formulas; above it the queue's growth is counted."""
_LOOKAHEAD_S = 5.0
"""Time over which an overloaded queue is assumed to grow."""
_RECOVERED = 0.8
"""Strain below which a missed target counts as met again."""
_LEAVE, _RETURN = 1.3, 0.9
"""Multiples of the other mode's strain, where neither meets the targets."""
_MIN_STEP_S = 1e-4


class DecayingAverage:
    """Exponentially decaying sum and mean."""

    def __init__(self, now: Callable[[], float], half_life_s: float) -> None:
        self._now = now
        self._half_life_s = half_life_s
        self._sum = self._count = 0.0
        self._at = self._since = -math.inf

    def add(self, value: float) -> None:
        now = self._now()
        if self._count:
            left = math.exp2((self._at - now) / self._half_life_s)
            self._sum, self._count = self._sum * left, self._count * left
        else:
            self._since = now
        self._at = now
        self._sum += value
        self._count += 1.0

    @property
    def mean(self) -> float:
        return self._sum / self._count if self._count else 0.0

    @property
    def per_second(self) -> float:
        """Rate of the sum, as of the last value; 0 without values."""
        if not self._count:
            return 0.0
        # Before the window has filled its weight is smaller; a quarter of the half-life is the minimum.
        age_s = max(self._at - self._since, self._half_life_s / 4)
        weight_s = self._half_life_s / math.log(2) * (1.0 - math.exp2(-age_s / self._half_life_s))
        return self._sum / weight_s


class SloGate:
    """See the module."""

    def __init__(self, ttft_s: float | None, itl_s: float | None, now: Callable[[], float]) -> None:
        """Targets for TTFT and mean inter-token latency; None for no target."""
        self._ttft_s = ttft_s
        self._itl_s = itl_s
        self._waits = DecayingAverage(now, _WAIT_HALF_LIFE_S)
        self._arrivals = DecayingAverage(now, _LOAD_HALF_LIFE_S)
        self._prefill_s = DecayingAverage(now, _LOAD_HALF_LIFE_S)
        self._output_tokens = DecayingAverage(now, _LOAD_HALF_LIFE_S)
        self._more_s = DecayingAverage(now, _LOAD_HALF_LIFE_S)
        """Step time added per concurrent answer."""
        self._base_s = DecayingAverage(now, _LOAD_HALF_LIFE_S)
        """Step time without decode work."""
        self._model_error = 1.0
        """Ratio of measured to modelled step time, last time it was measurable."""
        self._is_met = True

    @property
    def is_configured(self) -> bool:
        return self._ttft_s is not None or self._itl_s is not None

    @property
    def was_met(self) -> bool:
        """The verdict for the last request."""
        return self._is_met

    def is_met(self, remote: Forecast, prefill: Forecast) -> bool:
        """Whether remote prefill meets the targets. Call once per request, with its forecasts."""
        self._waits.add(prefill.first_token_s)
        self._arrivals.add(1.0)
        self._prefill_s.add(prefill.prefill_s)
        self._output_tokens.add(remote.output_tokens)
        self._more_s.add(remote.added_step_s)
        self._base_s.add(max(remote.base_step_s, _MIN_STEP_S))
        remote_strain, shared_strain = (
            self._remote_strain(remote, prefill),
            self._shared_strain(remote, prefill),
        )
        limit = max(1.0, _LEAVE * shared_strain) if self._is_met else max(_RECOVERED, _RETURN * shared_strain)
        self._is_met = remote_strain <= limit
        return self._is_met

    def _remote_strain(self, remote: Forecast, prefill: Forecast) -> float:
        strain = 0.0
        if self._itl_s is not None:
            step_s = self._base_s.mean / (
                1.0 - min(self._decode_utilization(remote.num_worker_ranks), _MAX_UTILIZATION)
            )
            model_error = max(_step_s(remote, prefill) / step_s, 1.0)
            # Without remote prefill, steps take longer and more answers overlap than would with it: trust decreases
            # only.
            self._model_error = model_error if self._is_met else min(self._model_error, model_error)
            strain = self._model_error * step_s / self._itl_s
        if self._ttft_s is not None:
            waits = self._waits.mean / _MAX_MEAN_SHARE
            strain = max(
                strain, self._first_token_s(prefill.num_worker_ranks) / self._ttft_s, waits / self._ttft_s
            )
        return strain

    def _shared_strain(self, remote: Forecast, prefill: Forecast) -> float:
        """Strain if decode steps wait for prefill on the same workers."""
        num_workers, strain = remote.num_worker_ranks + prefill.num_worker_ranks, 0.0
        if self._itl_s is not None:
            utilization = self._shared_prefill_utilization(num_workers) + self._decode_utilization(
                num_workers
            )
            strain = self._base_s.mean / (1.0 - min(utilization, _MAX_UTILIZATION)) / self._itl_s
        if self._ttft_s is not None:
            strain = max(strain, self._first_token_s(num_workers) / self._ttft_s)
        return strain

    def _prefill_utilization(self, num_workers: int) -> float:
        """Utilization by prefill if so many workers share it."""
        return self._arrivals.per_second / num_workers * self._prefill_s.mean

    def _shared_prefill_utilization(self, num_workers: int) -> float:
        """The same on workers that also decode: a step with prefill also makes decode tokens."""
        own_s = max(self._prefill_s.mean - self._base_s.mean, 0.0)
        return self._arrivals.per_second / num_workers * own_s

    def _decode_utilization(self, num_workers: int) -> float:
        """Share of a step that concurrent answers take: as many as arrive while one is generated."""
        return self._arrivals.per_second / num_workers * self._output_tokens.mean * self._more_s.mean

    def _first_token_s(self, num_workers: int) -> float:
        """TTFT of nearly all requests: M/D/1 queue on so many workers."""
        prompt_s, utilization = self._prefill_s.mean, self._prefill_utilization(num_workers)
        left = 1.0 - min(utilization, _MAX_UTILIZATION)
        wait_s = _TAIL_FACTOR * utilization * prompt_s / (2.0 * left * num_workers)
        return prompt_s + self._base_s.mean / left + wait_s + max(utilization - 1.0, 0.0) * _LOOKAHEAD_S


def _step_s(remote: Forecast, prefill: Forecast) -> float:
    """Decode step time if decode workers had all answers in progress."""
    each = (remote.total_decoding + prefill.total_decoding) / remote.num_worker_ranks
    return remote.step_s + max(each - remote.decoding, 0.0) * remote.added_step_s
