"""Affinity: who served a session last, and how much of that is left. Pure, and bounded.

A favour and never a pin: it decays while the session is silent, and a policy weighs it against everything else.
"""

from __future__ import annotations

from typing import NamedTuple

from kvolt.core.request import RoutingHints
from kvolt.router.place import Place


class _Served(NamedTuple):
    place: Place
    at_s: float


class Affinity:
    """By session; the one that was silent for longest makes room."""

    def __init__(self, half_life_s: float, max_sessions: int) -> None:
        self._half_life_s = half_life_s
        self._max_sessions = max_sessions
        self._served: dict[tuple[str | None, str], _Served] = {}
        """By tenant, too: another's session may have the same name."""

    @property
    def num_sessions(self) -> int:
        return len(self._served)

    def served(self, hints: RoutingHints, place: Place, now: float) -> None:
        """A place has begun to answer a request."""
        if hints.session is None:
            return
        key = (hints.tenant, hints.session)
        self._served.pop(key, None)
        if len(self._served) >= self._max_sessions:
            del self._served[next(iter(self._served))]
        self._served[key] = _Served(place, now)

    def of(self, hints: RoutingHints, now: float) -> tuple[Place, float] | None:
        """Who served this session last, and what is left of it: 1 at once, half after each half-life."""
        if hints.session is None:
            return None
        last = self._served.get((hints.tenant, hints.session))
        if last is None:
            return None
        return last.place, 0.5 ** (max(now - last.at_s, 0.0) / self._half_life_s)
