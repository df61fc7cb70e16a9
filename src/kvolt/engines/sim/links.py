"""SharedLinks: transfer times over links shared by concurrent transfers. Pure.

Rates are max-min fair: all rates grow equally until a link is full; the transfers that cross it keep that rate and
the others continue. So a link with waiting transfers is never idle, and transfers over the same links are equally
fast.

        A ----[ out 10 ]---->                  A and B share `out`, B and C share `in`:
        B ----[ out 10 ]----[ in 4 ]---->      B and C get 2 each, A gets the remaining 8 of `out`
        C ------------------[ in 4 ]---->

Rates change only when a transfer starts or ends, so the cost depends on these events and not on the time
between. Every call passes the time, which must not decrease. `advance` returns the transfers that have
arrived, in order; `next_arrival` is the time of the next change if no transfer starts or is cancelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

import msgspec

TransferId = NewType("TransferId", int)

_SIMULTANEOUS = 1e-12
"""Relative time difference below which transfers end together, because equal transfers differ by rounding."""


class SimLink(msgspec.Struct, frozen=True):
    """One direction of a network link."""

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    """Time from sending the last byte to its arrival, during which other transfers use the link."""

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < float("inf"):
            raise ValueError(f"link {self.name!r}: {self.bytes_per_s:g} bytes/s is not a valid bandwidth")
        if not 0 <= self.latency_s < float("inf"):
            raise ValueError(f"link {self.name!r}: {self.latency_s:g} s is not a valid latency")


@dataclass(slots=True)
class _Moving:
    path: tuple[str, ...]
    left_bytes: float
    rate: float = 0.0
    """Bytes per second, until the next start or end of a transfer."""


class SharedLinks:
    """See the module."""

    def __init__(self, links: Sequence[SimLink]) -> None:
        self._links = {link.name: link for link in links}
        if len(self._links) != len(links):
            raise ValueError("two links have the same name")
        self._moving: dict[TransferId, _Moving] = {}
        self._arriving: dict[TransferId, float] = {}
        """Arrival times of transfers whose bytes have all been sent."""
        self._now = float("-inf")
        self._next_end: float | None = None
        self._ending: list[TransferId] = []
        """Transfers that end at `_next_end`. Stored, because adding a duration to a large time rounds."""
        self._last_id = 0

    def start(self, now: float, num_bytes: float, path: Sequence[str]) -> TransferId:
        """Start a transfer over all links of `path` at the same time. KeyError for an unknown link."""
        if num_bytes < 0:
            raise ValueError(f"{num_bytes} bytes")
        links = [self._links[name] for name in dict.fromkeys(path)]
        self._move_until(now)
        self._last_id += 1
        transfer = TransferId(self._last_id)
        if links and num_bytes:
            self._moving[transfer] = _Moving(tuple(link.name for link in links), float(num_bytes))
            self._update_rates()
        else:
            self._arriving[transfer] = self._now + sum(link.latency_s for link in links)
        return transfer

    def cancel(self, now: float, transfer: TransferId) -> None:
        """Stop a transfer. No effect if it has arrived or is unknown."""
        self._move_until(now)
        self._arriving.pop(transfer, None)
        if self._moving.pop(transfer, None) is not None:
            self._update_rates()

    def next_arrival(self) -> float | None:
        """Time at which `advance` must be called next; None if there are no transfers."""
        times = [*self._arriving.values(), *(() if self._next_end is None else (self._next_end,))]
        return min(times, default=None)

    def advance(self, now: float) -> list[TransferId]:
        """Transfers that have arrived since the last call, by arrival, then by start."""
        self._move_until(now)
        arrived = sorted((at, transfer) for transfer, at in self._arriving.items() if at <= now)
        for _, transfer in arrived:
            del self._arriving[transfer]
        return [transfer for _, transfer in arrived]

    # ---

    def _move_until(self, now: float) -> None:
        """Move bytes up to `now`; each transfer that ends before frees its share for the others."""
        if now < self._now:
            raise ValueError("time must not decrease")
        while self._next_end is not None and self._next_end <= now:
            end = self._next_end
            self._move_for(end - self._now)
            self._now = end
            for transfer in self._ending:
                path = self._moving.pop(transfer).path
                self._arriving[transfer] = end + sum(self._links[name].latency_s for name in path)
            self._update_rates()
        self._move_for(now - self._now)
        self._now = now

    def _move_for(self, duration_s: float) -> None:
        for moving in self._moving.values():
            moving.left_bytes -= moving.rate * duration_s

    def _update_rates(self) -> None:
        """Recompute the rates and the next end."""
        for moving, rate in self._fair_rates():
            moving.rate = rate
        ends = {
            transfer: max(moving.left_bytes, 0.0) / moving.rate for transfer, moving in self._moving.items()
        }
        first_s = min(ends.values(), default=None)
        if first_s is None:
            self._next_end, self._ending = None, []
            return
        self._next_end = self._now + first_s
        self._ending = [
            transfer for transfer, end_s in ends.items() if end_s <= first_s * (1 + _SIMULTANEOUS)
        ]

    def _fair_rates(self) -> Iterator[tuple[_Moving, float]]:
        """Progressive filling: the link that is full first sets the rate of all transfers that cross it."""
        waiting = list(self._moving.values())
        free = {name: link.bytes_per_s for name, link in self._links.items()}
        while waiting:
            crossing = dict.fromkeys(free, 0)
            for moving in waiting:
                for name in moving.path:
                    crossing[name] += 1
            share, full = min((free[name] / count, name) for name, count in crossing.items() if count)
            rest: list[_Moving] = []
            for moving in waiting:
                if full not in moving.path:
                    rest.append(moving)
                    continue
                for name in moving.path:
                    free[name] = max(free[name] - share, 0.0)
                yield moving, share
            waiting = rest
