"""Whether this process works and whether it may be sent work.

Owns the states of named checks, one per endpoint or component that must be up. Knows nothing of HTTP
or of how a check is made: whoever owns the endpoint says what state it is in.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    CORDONED = "cordoned"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"


class Check(msgspec.Struct, frozen=True, omit_defaults=True):
    """One check as it stands."""

    state: State
    reason: str = ""
    required: bool = True


class HealthReport(msgspec.Struct, frozen=True):
    """All of it at one moment, as `/health` shows it."""

    live: bool
    ready: bool
    not_ready: dict[str, str]
    """What keeps the process from being ready: name and why."""
    checks: dict[str, Check]


class Health:
    """Liveness and readiness.

    Live until `mark_dead`: a process that can still drain must not be killed for being unready. Ready
    when every required check is; a process with no check yet is starting, hence not ready.
    """

    def __init__(self) -> None:
        self._checks: dict[str, Check] = {}
        self._dead_reason: str | None = None

    def set(self, name: str, state: State, reason: str = "") -> None:
        """Add a check, or move it to another state."""
        before = self._checks.get(name)
        self._checks[name] = Check(state, reason, before.required if before is not None else True)

    def set_optional(self, name: str, state: State, reason: str = "") -> None:
        """As `set`, for a check that is shown and does not decide readiness."""
        self._checks[name] = Check(state, reason, required=False)

    def remove(self, name: str) -> None:
        self._checks.pop(name, None)

    def mark_dead(self, reason: str) -> None:
        """The process cannot go on, not even to stop in order: whoever watches it should kill it."""
        self._dead_reason = reason

    def live(self) -> bool:
        return self._dead_reason is None

    def ready(self) -> bool:
        return not self.not_ready()

    def healthy(self) -> bool:
        """Live, and no check has failed; starting, cordoned and draining are health."""
        return self.live() and all(check.state is not State.UNHEALTHY for check in self._checks.values())

    def not_ready(self) -> dict[str, str]:
        if self._dead_reason is not None:
            return {"process": self._dead_reason}
        required = {name: check for name, check in self._checks.items() if check.required}
        if not required:
            return {"process": State.STARTING.value}
        return {
            name: f"{check.state}: {check.reason}" if check.reason else check.state.value
            for name, check in required.items()
            if check.state is not State.READY
        }

    def report(self) -> HealthReport:
        not_ready = self.not_ready()
        return HealthReport(self.live(), not not_ready, not_ready, dict(self._checks))
