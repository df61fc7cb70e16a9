"""Holds: blocks kept for readers, with their expiry times. Pure except for a lock.

A hold ends by its release, by its expiry or at the request's deadline. Readers renew it while they wait, and ask after
the read whether it is intact: a hold that is intact after the read was intact during the read. The scheduler of the
owner decides, the thread that serves the side channel answers; both run in vLLM's engine process.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Hold:
    hold_s: float
    expires_at: float
    deadline_at: float


class Holds:
    """See the module. `now`: seconds of a monotonic clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._holds: dict[str, _Hold] = {}

    def __len__(self) -> int:
        return len(self._holds)

    def begin(self, name: str, hold_s: float, deadline_s: float | None = None) -> None:
        """Hold the blocks of request `name`. `deadline_s`: no renewal extends the hold beyond."""
        now = self._now()
        deadline_at = math.inf if deadline_s is None else now + deadline_s
        with self._lock:
            self._holds[name] = _Hold(hold_s, min(now + hold_s, deadline_at), deadline_at)

    def renew(self, names: Iterable[str]) -> None:
        """A reader waits for these. An ended hold stays ended."""
        now = self._now()
        with self._lock:
            for name in names:
                if (hold := self._holds.get(name)) is not None:
                    hold.expires_at = max(hold.expires_at, min(now + hold.hold_s, hold.deadline_at))

    def is_intact(self, name: str) -> bool:
        """Whether the blocks of request `name` have been held without interruption until now."""
        with self._lock:
            return name in self._holds

    def end(self, name: str) -> bool:
        """End a hold before its blocks are released. Returns whether it existed."""
        with self._lock:
            return self._holds.pop(name, None) is not None

    def end_expired(self) -> list[str]:
        """End expired holds and return their names."""
        now = self._now()
        with self._lock:
            expired = [name for name, hold in self._holds.items() if now >= hold.expires_at]
            for name in expired:
                del self._holds[name]
        return expired
