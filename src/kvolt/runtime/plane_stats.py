"""What the request plane of one process counts: plain numbers, read when metrics are scraped.

A counter on the path of every tick must cost an addition, not a lock and a method call.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvolt.core.errors import Cancelled, KvoltError


@dataclass(slots=True)
class PlaneStats:
    bytes_in: int = 0
    bytes_out: int = 0
    frames_in: int = 0
    frames_out: int = 0
    items_in: int = 0
    items_out: int = 0
    merged: int = 0
    """Deltas that a slow reader let merge into one."""
    refused_versions: int = 0
    heartbeat_timeouts: int = 0
    connects: Counter[str] = field(default_factory=Counter)
    """By outcome."""
    losses: Counter[str] = field(default_factory=Counter)
    """Connections that ended without being closed by us, by reason."""
    calls_ended: Counter[str] = field(default_factory=Counter)
    """Streams that we opened, by outcome."""
    served_ended: Counter[str] = field(default_factory=Counter)
    """Streams that peers opened, by outcome."""


def outcome(error: KvoltError | None) -> str:
    return "ok" if error is None else Cancelled.code if isinstance(error, Cancelled) else error.code
