"""Watchdog for an engine that has work and makes no steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvolt.runtime.clock import Clock
from kvolt.runtime.lazy_timer import LazyTimer

_FIRST_STEP_FACTOR = 10
"""The first step may load kernels, capture graphs and warm caches."""


class Progress:
    """Calls `on_stuck` with a reason if no step comes while there is work, and `on_moving` at the next step."""

    def __init__(
        self,
        clock: Clock,
        stuck_after_s: float,
        on_stuck: Callable[[str], None],
        on_moving: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._limit_s = stuck_after_s * _FIRST_STEP_FACTOR
        self._stuck_after_s = stuck_after_s
        self._on_stuck = on_stuck
        self._on_moving = on_moving
        self._timer = LazyTimer(asyncio.get_running_loop(), self._expired)
        self._since: float | None = None
        """Time of the latest step, or of the first work of an idle engine; None without work."""
        self.stuck = False

    @property
    def age_s(self) -> float:
        """Time that work has waited for a step; 0 without work."""
        return 0.0 if self._since is None else self._clock.monotonic() - self._since

    def on_work(self) -> None:
        """An idle engine got work."""
        self._since = self._clock.monotonic()
        if not self.stuck:
            self._timer.arm(self._limit_s)

    def on_step(self, now: float, has_work: bool) -> None:
        self._limit_s = self._stuck_after_s
        if self.stuck:
            self.stuck = False
            self._on_moving()
        if has_work:
            self._since = now
            self._timer.arm(self._limit_s)
        else:
            self.on_idle()

    def on_idle(self) -> None:
        self._since = None
        self._timer.disarm()

    def close(self) -> None:
        self._timer.close()

    def _expired(self) -> None:
        self.stuck = True
        self._on_stuck(f"no step for {self.age_s:.0f} s with requests waiting")
