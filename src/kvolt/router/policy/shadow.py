"""Shadow: a second policy that is asked about every request and decides none, to see what it would change. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvolt.core.latency import Floats
from kvolt.router.policy.policy import RequestView, WorkersView, prefer

Opinion = Callable[[RequestView, WorkersView], Floats | None]
"""A policy that may have none."""


@dataclass(frozen=True, slots=True)
class Shadowed:
    """What the second policy says of one decision."""

    agrees: bool
    """None would cost less by its own count than the one that was taken."""
    sooner_s: float
    """By how much earlier the first token is expected where it would have sent the request; below 0: later."""


@dataclass(slots=True)
class ShadowStats:
    """Of decisions that were acted on."""

    num_decisions: int = 0
    num_agreed: int = 0
    num_silent: int = 0
    """It failed and had no opinion."""
    sooner_s: float = 0.0
    """Summed up over all decisions: what is expected to be gained by changing over."""


class Shadow:
    """See the module."""

    def __init__(self, name: str, opinion: Opinion) -> None:
        self.name = name
        self.stats = ShadowStats()
        self._opinion = opinion

    def look(
        self,
        asked: RequestView,
        workers: WorkersView,
        preference: Floats,
        closed: npt.NDArray[np.bool_] | None,
        chosen: int,
    ) -> Shadowed | None:
        """`closed` are those that could not be taken, if there are any; `chosen` is the index of who was."""
        costs = self._opinion(asked, workers)
        if costs is None:
            return None
        if preference.any():
            costs = prefer(costs, preference)
        if closed is not None:
            costs = np.where(closed, np.inf, costs)
        best = int(costs.argmin())
        if costs[chosen] <= costs[best]:
            return Shadowed(True, 0.0)
        expected = np.maximum(workers.queue_s, workers.room_s) + workers.prefill_s
        return Shadowed(False, float(expected[chosen] - expected[best]))

    def count(self, seen: Shadowed | None) -> None:
        """It was acted on."""
        stats = self.stats
        stats.num_decisions += 1
        if seen is None:
            stats.num_silent += 1
            return
        stats.num_agreed += seen.agrees
        stats.sooner_s += seen.sooner_s
