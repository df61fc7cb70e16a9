"""Counters of a router queue, and its drain rate. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from kvolt.runtime.histogram import Histogram

_WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_HALF_LIFE_S = 5.0
MAX_DRAIN_S = 60.0
"""Upper bound of a predicted drain time: a recent rate does not predict longer times."""


@dataclass(slots=True)
class QueueStats:
    """Counters of one router's queue, for metrics."""

    num_immediate: int = 0
    """Requests routed without waiting."""
    waits_s: Histogram = field(default_factory=lambda: Histogram(_WAITS_S))
    """Waiting time of requests that were routed."""
    refused: Counter[str] = field(default_factory=Counter)
    """Requests not routed, by reason: full, displaced, deadline, cancelled, or an error code."""
    num_withdrawals: int = 0
    """Requests withdrawn from a worker and sent to another."""


class DrainRate:
    """Tokens per second that leave the queue, exponentially decayed."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at: float | None = None
        self._since = 0.0

    def record(self, tokens: int, now: float) -> None:
        if self._at is None:
            self._since = now
        self._tokens = self._decayed(now) + tokens
        self._at = now

    def drain_time_s(self, tokens: int, now: float) -> float:
        """Predicted time until this many tokens have left the queue; 0 if none has left yet."""
        if self._at is None:
            return 0.0
        # Shortly after the start only part of the averaging window has passed.
        weight_s = _HALF_LIFE_S / math.log(2) * (1.0 - math.exp2(-max(now - self._since, 0.1) / _HALF_LIFE_S))
        decayed_tokens = self._decayed(now)
        return min(tokens * weight_s / decayed_tokens, MAX_DRAIN_S) if decayed_tokens > 0.0 else MAX_DRAIN_S

    def _decayed(self, now: float) -> float:
        if self._at is None:
            return 0.0
        return self._tokens * math.exp2((self._at - now) / _HALF_LIFE_S)
