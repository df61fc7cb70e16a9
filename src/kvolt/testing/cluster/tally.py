"""Counts of request outcomes in a virtual cluster."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Tally:
    started: int = 0
    ok: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    """By error code."""
    cut_short: int = 0
    """Requests whose frontend crashed."""

    @property
    def ended(self) -> int:
        return self.ok + sum(self.failed.values()) + self.cut_short
