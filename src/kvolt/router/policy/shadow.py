"""ShadowPolicy: a second policy evaluated for every request without deciding, to measure its effect. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvolt.router.policy.cost_model import Floats
from kvolt.router.policy.policy import RequestView, WorkersView, apply_preference

CostFunction = Callable[[RequestView, WorkersView], Floats | None]
"""A policy that may fail (None)."""


@dataclass(frozen=True, slots=True)
class ShadowVerdict:
    """Verdict of the shadow policy on one decision."""

    agrees: bool
    """The shadow policy finds no cheaper worker than the chosen one."""
    ttft_gain_s: float
    """Predicted TTFT gain at the shadow policy's choice; negative if later."""


@dataclass(slots=True)
class ShadowStats:
    """Counters over decisions that were reserved."""

    num_decisions: int = 0
    num_agreed: int = 0
    num_failed: int = 0
    """Decisions on which it failed."""
    ttft_gain_s: float = 0.0
    """Sum over all decisions: the predicted effect of switching to the shadow policy."""


class ShadowPolicy:
    """See the module."""

    def __init__(self, name: str, cost_function: CostFunction) -> None:
        self.name = name
        self.stats = ShadowStats()
        self._cost_function = cost_function

    def compare(
        self,
        request: RequestView,
        workers: WorkersView,
        preference: Floats,
        unavailable: npt.NDArray[np.bool_] | None,
        chosen: int,
    ) -> ShadowVerdict | None:
        """Evaluate the shadow policy. `unavailable` masks candidates that may not be chosen, if any; `chosen`
        is an index."""
        costs = self._cost_function(request, workers)
        if costs is None:
            return None
        if preference.any():
            costs = apply_preference(costs, preference)
        if unavailable is not None:
            costs = np.where(unavailable, np.inf, costs)
        best = int(costs.argmin())
        if costs[chosen] <= costs[best]:
            return ShadowVerdict(True, 0.0)
        expected = np.maximum(workers.queue_s, workers.room_s) + workers.prefill_s
        return ShadowVerdict(False, float(expected[chosen] - expected[best]))

    def record(self, verdict: ShadowVerdict | None) -> None:
        """Count the verdict of a reserved decision."""
        stats = self.stats
        stats.num_decisions += 1
        if verdict is None:
            stats.num_failed += 1
            return
        stats.num_agreed += verdict.agrees
        stats.ttft_gain_s += verdict.ttft_gain_s
