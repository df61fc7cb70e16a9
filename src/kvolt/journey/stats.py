"""Retry, migration and prefill counts for metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvolt.runtime.histogram import SECONDS, Histogram


class RerouteOutcome(StrEnum):
    """Result of a search for another worker."""

    SUCCESS = "success"
    FAILURE = "failure"
    CANCELLED = "cancelled"


class RerouteKey(NamedTuple):
    """Labels of a search for another worker."""

    is_migration: bool
    """Whether part of the answer was delivered."""
    outcome: RerouteOutcome


@dataclass(slots=True)
class JourneyStats:
    retries: Counter[str] = field(default_factory=Counter)
    """Retries from the start, by error code."""
    migrations: Counter[str] = field(default_factory=Counter)
    """Migrated answers, by error code."""
    num_prefills: int = 0
    """Prompts computed by prefill workers."""
    prefill_failures: Counter[str] = field(default_factory=Counter)
    """Failed remote prefills, by error code."""
    num_moves: int = 0
    """Waiting requests withdrawn from a worker and sent to another."""
    reroute_s: defaultdict[RerouteKey, Histogram] = field(
        default_factory=lambda: defaultdict(lambda: Histogram(SECONDS))
    )
    """From a failure to the next token, the final error, or cancellation."""
