"""Liveness and readiness of this process.

Keeps the state of named checks, one per endpoint or component that must be up. Independent of HTTP; the owner of a
check sets its state.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class HealthState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    CORDONED = "cordoned"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"


class Check(msgspec.Struct, frozen=True, omit_defaults=True):
    """Current state of one check."""

    state: HealthState
    reason: str = ""
    required: bool = True


class HealthReport(msgspec.Struct, frozen=True):
    """Health of the process, as shown by `/health`."""

    live: bool
    ready: bool
    not_ready: dict[str, str]
    """Checks that keep the process from being ready, with the reason."""
    checks: dict[str, Check]


class Health:
    """Liveness and readiness of the process.

    Live while it answers: a process that can still drain must not be killed because it is unready. Ready when all
    required checks are ready; a process without checks is starting, and so not ready.
    """

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}

    def set(self, name: str, state: HealthState, reason: str = "", required: bool = True) -> None:
        """Add a check or change its state. One that is not required is reported but does not affect readiness."""
        self._checks[name] = Check(state, reason, required)

    def remove(self, name: str) -> None:
        self._checks.pop(name, None)

    def ready(self) -> bool:
        return not self.not_ready()

    def healthy(self) -> bool:
        """Whether no check is unhealthy; starting, cordoned and draining count as healthy."""
        return all(check.state is not HealthState.UNHEALTHY for check in self._checks.values())

    def not_ready(self) -> dict[str, str]:
        required = {name: check for name, check in self._checks.items() if check.required}
        if not required:
            return {"process": HealthState.STARTING.value}
        return {
            name: f"{check.state}: {check.reason}" if check.reason else check.state.value
            for name, check in required.items()
            if check.state is not HealthState.READY
        }

    def report(self) -> HealthReport:
        not_ready = self.not_ready()
        return HealthReport(True, not not_ready, not_ready, dict(self._checks))
