"""StepWatch: who looks on while an engine works, in its own process, as a model of a cluster does."""

from __future__ import annotations

from typing import Protocol

from kvolt.core.load import WorkerLoad
from kvolt.scheduler.step_plan import StepPlan


class StepWatch(Protocol):
    """Called once for each step, or for each run of steps that are one event: must be quick and must not raise."""

    def on_step(self, plan: StepPlan, time_s: float, load: WorkerLoad) -> None:
        """What was planned has just been computed, in `time_s`; `load` is how busy the engine is now."""
        ...
