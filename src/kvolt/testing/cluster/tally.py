"""Counts of request outcomes in a virtual cluster, and the report of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec


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


class RunReport(msgspec.Struct, frozen=True):
    seed: int
    log: tuple[str, ...]
    started: int
    ok: int
    failed: dict[str, int]
    cut_short: int
    seen: dict[str, int]
    """Counts of events that the faults should cause."""
