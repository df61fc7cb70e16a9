"""Promise: whether prompts are computed apart, by what was promised and under the load as it is. Pure.

Asked of the load, not of one request, whose way changes little. Two things are worked out from what comes in: the
strain on the promise if every prompt were computed apart, and if each were computed where it is answered, by all
workers alike. 1 is a promise that is just kept. Prompts are computed apart while that keeps it, or strains it no more
than the other would; lost and found again at different loads, so that it does not waver.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvolt.router.policy.forecast import Forecast

_SEEN_S = 4.0
"""After which something counts half."""
_WAITS_S = 3.0
_SEEN_SHARE = 0.75
"""Of the limit, the mean wait that is too long: some wait longer."""
_NEARLY_ALL = 3.0
"""Times the mean wait: waits fall off about as an exponential does."""
_MOST_BUSY = 0.95
"""More leaves nothing to reckon with; what is above it is counted by how a queue grows."""
_LOOKAHEAD_S = 5.0
"""For which a queue grows, where more comes in than can be done."""
_AGAIN = 0.8
"""Of the limits, from where on a promise that was lost is held to be kept again."""
_LEAVE, _RETURN = 1.3, 0.9
"""Times the strain of the other way, where neither keeps it."""
_LEAST_STEP_S = 1e-4


class Recent:
    """Values as they come, of which those longer ago count less."""

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
        """Their sum, as of the last one."""
        # Over a short time less than all of the weight is there yet; over a very short one it is none to judge by.
        age_s = max(self._at - self._since, self._half_life_s / 4)
        weight_s = self._half_life_s / math.log(2) * (1.0 - math.exp2(-age_s / self._half_life_s))
        return self._sum / weight_s


class Promise:
    """See the module."""

    def __init__(self, ttft_s: float | None, itl_s: float | None, now: Callable[[], float]) -> None:
        """Until a first token, and between two, where that was promised."""
        self._ttft_s = ttft_s
        self._itl_s = itl_s
        self._waits = Recent(now, _WAITS_S)
        self._arrivals = Recent(now, _SEEN_S)
        self._prefill_s = Recent(now, _SEEN_S)
        self._output_tokens = Recent(now, _SEEN_S)
        self._more_s = Recent(now, _SEEN_S)
        """By how much one more answer makes a step longer."""
        self._base_s = Recent(now, _SEEN_S)
        """A step, less what it takes for answers."""
        self._off = 1.0
        """By how much longer steps were than worked out, when that was last to be seen."""
        self._is_kept = True

    @property
    def is_given(self) -> bool:
        return self._ttft_s is not None or self._itl_s is not None

    def is_kept(self, handed: Forecast, there: Forecast) -> bool:
        """By computing prompts apart. Once for each request, of which this is the forecast."""
        self._waits.add(there.first_token_s)
        self._arrivals.add(1.0)
        self._prefill_s.add(there.prefill_s)
        self._output_tokens.add(handed.output_tokens)
        self._more_s.add(handed.more_s)
        self._base_s.add(max(handed.base_s, _LEAST_STEP_S))
        apart, alike = self._strain_apart(handed, there), self._strain_alike(handed, there)
        limit = max(1.0, _LEAVE * alike) if self._is_kept else max(_AGAIN, _RETURN * alike)
        self._is_kept = apart <= limit
        return self._is_kept

    def _strain_apart(self, handed: Forecast, there: Forecast) -> float:
        strain = 0.0
        if self._itl_s is not None:
            step_s = self._base_s.mean / (1.0 - min(self._answering(handed.num_places), _MOST_BUSY))
            seen = max(_step_s(handed, there) / step_s, 1.0)
            # While it is kept what is to be seen is what comes of it. Else answers take longer, and more of them are
            # being given than would be: that it has become less can be believed.
            self._off = seen if self._is_kept else min(self._off, seen)
            strain = self._off * step_s / self._itl_s
        if self._ttft_s is not None:
            waits = self._waits.mean / _SEEN_SHARE
            strain = max(strain, self._first_token_s(there.num_places) / self._ttft_s, waits / self._ttft_s)
        return strain

    def _strain_alike(self, handed: Forecast, there: Forecast) -> float:
        """Steps wait for the prompts that are computed between them."""
        places, strain = handed.num_places + there.num_places, 0.0
        if self._itl_s is not None:
            busy = self._computing_beside(places) + self._answering(places)
            strain = self._base_s.mean / (1.0 - min(busy, _MOST_BUSY)) / self._itl_s
        if self._ttft_s is not None:
            strain = max(strain, self._first_token_s(places) / self._ttft_s)
        return strain

    def _computing(self, places: int) -> float:
        """The share of their time that so many workers compute prompts."""
        return self._arrivals.per_second / places * self._prefill_s.mean

    def _computing_beside(self, places: int) -> float:
        """The same where they answer meanwhile: a step that computes a prompt is one of their answers, too."""
        own_s = max(self._prefill_s.mean - self._base_s.mean, 0.0)
        return self._arrivals.per_second / places * own_s

    def _answering(self, places: int) -> float:
        """The share of a step that is for having other answers beside one: as many as come while one is given."""
        return self._arrivals.per_second / places * self._output_tokens.mean * self._more_s.mean

    def _first_token_s(self, places: int) -> float:
        """As nearly all have it: random arrivals, one after the other, at so many workers."""
        prompt_s, busy = self._prefill_s.mean, self._computing(places)
        left = 1.0 - min(busy, _MOST_BUSY)
        wait_s = _NEARLY_ALL * busy * prompt_s / (2.0 * left * places)
        return prompt_s + self._base_s.mean / left + wait_s + max(busy - 1.0, 0.0) * _LOOKAHEAD_S


def _step_s(handed: Forecast, there: Forecast) -> float:
    """Of an answer, if all that are being given were so by the decode workers, as many by each."""
    each = (handed.all_decoding + there.all_decoding) / handed.num_places
    return handed.step_s + max(each - handed.decoding, 0.0) * handed.more_s
