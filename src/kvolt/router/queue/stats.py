"""What a queue of waiting requests counts, and how fast it drains. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from kvolt.runtime.histogram import Histogram

_WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_HALF_LIFE_S = 5.0
MOST_S = 60.0
"""That is said of what has not moved for long: of longer times a rate of late says nothing."""


@dataclass(slots=True)
class QueueStats:
    """Of one router, for metrics."""

    num_at_once: int = 0
    """Requests that did not have to wait."""
    waits_s: Histogram = field(default_factory=lambda: Histogram(_WAITS_S))
    """Of those that waited and got a worker."""
    refused: Counter[str] = field(default_factory=Counter)
    """Of those that waited or would have, and got none: full, displaced, deadline, cancelled, or an error's code."""
    num_moves: int = 0
    """Requests that were asked back from a worker to be sent to another."""


class DrainRate:
    """Tokens that leave in a second, of late: what was longer ago counts less."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at: float | None = None
        self._since = 0.0

    def add(self, tokens: int, now: float) -> None:
        if self._at is None:
            self._since = now
        self._tokens = self._left(now) + tokens
        self._at = now

    def time_for_s(self, tokens: int, now: float) -> float:
        """What so many tokens will take to leave, as far as that can be told; nothing where none has ever left."""
        if self._at is None:
            return 0.0
        # Over a short time less than all of the weight is there yet.
        weight_s = _HALF_LIFE_S / math.log(2) * (1.0 - math.exp2(-max(now - self._since, 0.1) / _HALF_LIFE_S))
        left = self._left(now)
        return min(tokens * weight_s / left, MOST_S) if left > 0.0 else MOST_S

    def _left(self, now: float) -> float:
        if self._at is None:
            return 0.0
        return self._tokens * math.exp2((self._at - now) / _HALF_LIFE_S)
