"""What became of the attempts at requests, for metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kvolt.runtime.histogram import SECONDS, Histogram


class Outcome(StrEnum):
    """Of looking for another worker."""

    SUCCESS = "success"
    FAILURE = "failure"
    CANCELLED = "cancelled"


class Elsewhere(NamedTuple):
    """What was tried on another worker, and what came of it."""

    is_amid: bool
    """Whether anything of the answer had been told before."""
    outcome: Outcome


@dataclass(slots=True)
class JourneyStats:
    retries: Counter[str] = field(default_factory=Counter)
    """By the code of the error that made another attempt necessary."""
    migrations: Counter[str] = field(default_factory=Counter)
    """Answers that another worker was asked to go on with, by the code of the error that made it necessary."""
    num_prefills: int = 0
    """Prompts that were computed by prefill workers."""
    prefill_failures: Counter[str] = field(default_factory=Counter)
    """Those that were not, by the code of the error: another one was asked, or whoever answered."""
    num_moves: int = 0
    """Requests that were taken back from a worker that had not begun them, and sent to another."""
    elsewhere_s: defaultdict[Elsewhere, Histogram] = field(
        default_factory=lambda: defaultdict(lambda: Histogram(SECONDS))
    )
    """From a failure to the next token, to giving up, or to the caller's leaving."""
