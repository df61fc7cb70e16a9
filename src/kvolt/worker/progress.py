"""Whether an engine that has work makes steps. Owns that question's timer; what follows from it is the worker's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvolt.runtime.clock import Clock
from kvolt.runtime.lazy_timer import LazyTimer

_FIRST_STEP_FACTOR = 10
"""The first step may load kernels, capture graphs and warm caches."""


class Progress:
    """Tells `on_stuck` why when work lies there and no step comes, and `on_moving` when one comes after all."""

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
        """The latest step, or when work came to an idle engine; None while there is none."""
        self.stuck = False

    @property
    def age_s(self) -> float:
        """How long work has been waiting for a step; 0 while there is none."""
        return 0.0 if self._since is None else self._clock.monotonic() - self._since

    def begin(self) -> None:
        """Work came to an engine that had none."""
        self._since = self._clock.monotonic()
        if not self.stuck:
            self._timer.arm(self._limit_s)

    def step(self, now: float, has_work: bool) -> None:
        self._limit_s = self._stuck_after_s
        if self.stuck:
            self.stuck = False
            self._on_moving()
        if has_work:
            self._since = now
            self._timer.arm(self._limit_s)
        else:
            self.rest()

    def rest(self) -> None:
        """There is nothing to do."""
        self._since = None
        self._timer.disarm()

    def close(self) -> None:
        self._timer.close()

    def _expired(self) -> None:
        self.stuck = True
        self._on_stuck(f"no step for {self.age_s:.0f} s with requests waiting")
