"""StepObserver: callback for every step of an engine in the same process, as in the twin."""

from __future__ import annotations

from typing import Protocol

from kvolt.core.load import WorkerLoad
from kvolt.scheduler.step_plan import StepPlan


class StepObserver(Protocol):
    """Called once per step, or once per run of steps that are simulated as one event. Must be fast and must
    not raise."""

    def on_step(self, plan: StepPlan, time_s: float, load: WorkerLoad) -> None:
        """`plan` was computed in `time_s`; `load` is the engine's load now."""
