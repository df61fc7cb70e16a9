"""Counters and gauges of the request plane: plain numbers, read when metrics are scraped.

A counter on the per-tick path must cost an addition, not a lock and a method call.
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
    """Deltas merged for slow readers."""
    refused_versions: int = 0
    refused_connections: int = 0
    """Refused over the limit of the process or of an address."""
    heartbeat_timeouts: int = 0
    stalls: int = 0
    """Stalls of this process longer than half a heartbeat."""
    stalled_s: float = 0.0
    last_stall_at: float = -1.0
    connects: Counter[str] = field(default_factory=Counter)
    """By outcome."""
    losses: Counter[str] = field(default_factory=Counter)
    """Connections lost without being closed by this process, by reason."""
    calls_ended: Counter[str] = field(default_factory=Counter)
    """Outgoing streams, by outcome."""
    served_ended: Counter[str] = field(default_factory=Counter)
    """Incoming streams, by outcome."""

    def record_stall(self, now: float, stalled_s: float) -> bool:
        """Count a stall that ended now. False if another connection has counted it already."""
        if now <= self.last_stall_at + stalled_s:
            return False
        self.last_stall_at = now
        self.stalls += 1
        self.stalled_s += stalled_s
        return True


@dataclass(frozen=True, slots=True)
class PlaneGauges:
    """Current values."""

    num_accepted: int = 0
    """Open connections accepted from peers."""
    num_dialed: int = 0
    """Open connections dialed by this process."""
    num_calls: int = 0
    """Open outgoing streams."""
    num_served: int = 0
    """Open incoming streams."""
    num_backlogged: int = 0
    """Incoming streams with a backlog, because of a slow reader or a full transport."""
    num_bulk: int = 0
    """Long messages queued or being sent."""
    send_buffer_bytes: int = 0
    num_opens_waiting: int = 0
    """Incoming streams that wait for a later turn of the loop."""
    num_refused_streams: int = 0
    """Incoming streams refused so far over the limit of the process or of an address."""
    unfinished_bytes: int = 0
    """Bytes buffered for incomplete messages."""
    unfinished_limit_bytes: int = 0
    num_shed: int = 0
    """Times that incomplete messages were dropped to stay within the limit."""

    @property
    def num_open(self) -> int:
        """Open connections in both directions."""
        return self.num_accepted + self.num_dialed


def outcome(error: KvoltError | None) -> str:
    return "ok" if error is None else Cancelled.code if isinstance(error, Cancelled) else error.code
