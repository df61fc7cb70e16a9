"""HitWindow: recently requested prompt blocks and how many each tier provided. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from kvolt.core.kv_events import Tier

WINDOW = 1000
"""Requests in the window."""


class HitWindow:
    """See the module."""

    def __init__(self, size: int = WINDOW) -> None:
        self._recent: deque[tuple[int, Sequence[tuple[Tier, int]]]] = deque()
        self._size = size
        self._hits: Counter[Tier] = Counter()
        self.num_requested = 0

    def add(self, num_requested: int, by_tier: Sequence[tuple[Tier, int]]) -> None:
        """Record the blocks of one prompt."""
        self._recent.append((num_requested, by_tier))
        self.num_requested += num_requested
        self._hits.update(dict(by_tier))
        if len(self._recent) > self._size:
            oldest, hits = self._recent.popleft()
            self.num_requested -= oldest
            self._hits.subtract(dict(hits))

    def num_hits(self, tier: Tier) -> int:
        return self._hits[tier]
