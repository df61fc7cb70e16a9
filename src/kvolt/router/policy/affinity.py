"""SessionAffinity: the worker rank that served a session last, with a decaying weight. Pure, bounded.

A bonus, never a pin: policies weigh it against other costs.
"""

from __future__ import annotations

from typing import NamedTuple

from kvolt.core.request import RoutingHints
from kvolt.router.worker_rank import WorkerDpRank


class _Served(NamedTuple):
    worker_rank: WorkerDpRank
    at_s: float


class SessionAffinity:
    """Affinity by session; the least recently served session is evicted."""

    def __init__(self, half_life_s: float, max_sessions: int) -> None:
        self._half_life_s = half_life_s
        self._max_sessions = max_sessions
        self._served: dict[tuple[str | None, str], _Served] = {}
        """By tenant and session name."""

    @property
    def num_sessions(self) -> int:
        return len(self._served)

    def record(self, hints: RoutingHints, worker_rank: WorkerDpRank, now: float) -> None:
        """Record the worker rank that started to answer a request."""
        if hints.session is None:
            return
        key = (hints.tenant, hints.session)
        self._served.pop(key, None)
        if len(self._served) >= self._max_sessions:
            del self._served[next(iter(self._served))]
        self._served[key] = _Served(worker_rank, now)

    def last_served(self, hints: RoutingHints, now: float) -> tuple[WorkerDpRank, float] | None:
        """The worker rank that served the session last and its weight: 1 at once, halved per half-life."""
        if hints.session is None:
            return None
        last = self._served.get((hints.tenant, hints.session))
        if last is None:
            return None
        return last.worker_rank, 0.5 ** (max(now - last.at_s, 0.0) / self._half_life_s)
