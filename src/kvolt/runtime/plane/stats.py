"""What the request plane of one process counts and holds: plain numbers, read when metrics are scraped.

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
    refused_connections: int = 0
    """Over the limit of the process or of an address."""
    heartbeat_timeouts: int = 0
    stalls: int = 0
    """Times that this process itself stood still for longer than half a heartbeat."""
    stalled_s: float = 0.0
    last_stall_at: float = -1.0
    connects: Counter[str] = field(default_factory=Counter)
    """By outcome."""
    losses: Counter[str] = field(default_factory=Counter)
    """Connections that ended without being closed by us, by reason."""
    calls_ended: Counter[str] = field(default_factory=Counter)
    """Streams that we opened, by outcome."""
    served_ended: Counter[str] = field(default_factory=Counter)
    """Streams that peers opened, by outcome."""

    def add_stall(self, now: float, stalled_s: float) -> bool:
        """Count a stall that ended now; False where another connection has counted it."""
        if now <= self.last_stall_at + stalled_s:
            return False
        self.last_stall_at = now
        self.stalls += 1
        self.stalled_s += stalled_s
        return True


@dataclass(frozen=True, slots=True)
class PlaneGauges:
    """How things stand at one moment."""

    num_accepted: int = 0
    """Open connections that peers made."""
    num_dialed: int = 0
    """Open connections that we made."""
    num_calls: int = 0
    """Streams that we opened."""
    num_served: int = 0
    """Streams that peers opened."""
    num_held: int = 0
    """Served streams that keep something back for a slow reader or a full transport."""
    num_bulk: int = 0
    """Long messages that wait or are on their way."""
    send_buffer_bytes: int = 0
    num_opens_waiting: int = 0
    """Streams that peers opened and that a later turn of the loop starts."""
    num_refused_streams: int = 0
    """Streams of peers over the limit of the process or of an address, so far."""
    unfinished_bytes: int = 0
    """Kept for messages that peers have not finished."""
    unfinished_limit_bytes: int = 0
    num_shed: int = 0
    """Times that unfinished messages were dropped because of that limit."""

    @property
    def num_open(self) -> int:
        """Connections, whoever made them."""
        return self.num_accepted + self.num_dialed


def outcome(error: KvoltError | None) -> str:
    return "ok" if error is None else Cancelled.code if isinstance(error, Cancelled) else error.code
