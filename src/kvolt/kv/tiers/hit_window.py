"""HitWindow: of the prompt blocks asked for lately, how many came from which tier. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from kvolt.core.kv_events import Tier

WINDOW = 1000
"""Requests."""


class HitWindow:
    """See the module."""

    def __init__(self, size: int = WINDOW) -> None:
        self._recent: deque[tuple[int, Sequence[tuple[Tier, int]]]] = deque()
        self._size = size
        self._hits: Counter[Tier] = Counter()
        self.num_asked = 0

    def add(self, num_asked: int, by_tier: Sequence[tuple[Tier, int]]) -> None:
        """One prompt's blocks."""
        self._recent.append((num_asked, by_tier))
        self.num_asked += num_asked
        self._hits.update(dict(by_tier))
        if len(self._recent) > self._size:
            asked, hits = self._recent.popleft()
            self.num_asked -= asked
            self._hits.subtract(dict(hits))

    def num_hits(self, tier: Tier) -> int:
        return self._hits[tier]
