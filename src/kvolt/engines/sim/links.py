"""Links that transfers share fairly: how long moving bytes takes when others move theirs over the same wire. Pure.

The rates are max-min fair: all transfers get faster together until a link of theirs is full; those that cross it stay
at that rate, the others go on. So a link that somebody waits for is never idle, transfers over the same links are
equally fast, and none gains by another's being slow.

        A ----[ out 10 ]---->                  A and B share `out`, B and C share `in`:
        B ----[ out 10 ]----[ in 4 ]---->      B and C get 2 each, A what B leaves of `out`: 8
        C ------------------[ in 4 ]---->

Rates change when a transfer starts or ends and at no other time, so the cost follows starts and ends and not the time
between. Time comes with each call and never goes back. `advance` tells who has arrived, in order; `next_arrival` says
when it would next have something to tell, if nothing else happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NewType

import msgspec

TransferId = NewType("TransferId", int)

_TOGETHER = 1e-12
"""Relative: who ends within this of each other ends at once. Without it rounding would part equal transfers."""


class Link(msgspec.Struct, frozen=True):
    """One wire, one direction."""

    name: str
    bytes_per_s: float
    latency_s: float = 0.0
    """From the last byte's leaving to its arrival; others use the link meanwhile."""

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < float("inf"):
            raise ValueError(f"link {self.name!r}: {self.bytes_per_s:g} bytes/s is no speed")
        if not 0 <= self.latency_s < float("inf"):
            raise ValueError(f"link {self.name!r}: {self.latency_s:g} s is no latency")


@dataclass(slots=True)
class LinkUse:
    """What a link has done so far."""

    moved_bytes: float = 0.0
    busy_s: float = 0.0


@dataclass(slots=True)
class _Moving:
    path: tuple[str, ...]
    left_bytes: float
    rate: float = 0.0
    """Bytes per second, until something starts or ends."""


class SharedLinks:
    """See the module."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = {link.name: link for link in links}
        if len(self._links) != len(links):
            raise ValueError("two links have one name")
        self.use = {link.name: LinkUse() for link in links}
        self._moving: dict[TransferId, _Moving] = {}
        self._arriving: dict[TransferId, float] = {}
        """All bytes are on their way: when the last one is there."""
        self._now = float("-inf")
        self._next_end: float | None = None
        self._ending: list[TransferId] = []
        """Those whose bytes are all gone then: chosen with the time, since adding it to a large one rounds."""
        self._last_id = 0

    def start(self, now: float, num_bytes: float, path: Sequence[str]) -> TransferId:
        """Bytes that cross all links of `path` at once. KeyError for a link that is not there."""
        if num_bytes < 0:
            raise ValueError(f"{num_bytes} bytes")
        links = [self._links[name] for name in dict.fromkeys(path)]
        self._pass_time(now)
        self._last_id += 1
        transfer = TransferId(self._last_id)
        if links and num_bytes:
            self._moving[transfer] = _Moving(tuple(link.name for link in links), float(num_bytes))
            self._share()
        else:
            self._arriving[transfer] = self._now + sum(link.latency_s for link in links)
        return transfer

    def cancel(self, now: float, transfer: TransferId) -> None:
        """What is left of it is not moved. One that has arrived, or is not known, is no error."""
        self._pass_time(now)
        self._arriving.pop(transfer, None)
        if self._moving.pop(transfer, None) is not None:
            self._share()

    def next_arrival(self) -> float | None:
        """When `advance` next has something to tell or to do; None while nothing is under way."""
        times = [*self._arriving.values(), *(() if self._next_end is None else (self._next_end,))]
        return min(times, default=None)

    def advance(self, now: float) -> list[TransferId]:
        """The transfers that have arrived by now and were not told yet, in the order of arrival, then of start."""
        self._pass_time(now)
        arrived = sorted((at, transfer) for transfer, at in self._arriving.items() if at <= now)
        for _, transfer in arrived:
            del self._arriving[transfer]
        return [transfer for _, transfer in arrived]

    def rate(self, transfer: TransferId) -> float:
        """In bytes per second, now; 0 for one whose bytes are all gone."""
        moving = self._moving.get(transfer)
        return 0.0 if moving is None else moving.rate

    # ---

    def _pass_time(self, now: float) -> None:
        """Move bytes up to now; each end on the way frees what it used for the rest."""
        if now < self._now:
            raise ValueError("time does not go back")
        while self._next_end is not None and self._next_end <= now:
            end = self._next_end
            self._move_for(end - self._now)
            self._now = end
            for transfer in self._ending:
                moving = self._moving.pop(transfer)
                self._count(moving, moving.left_bytes)  # what rounding has left, or took too much
                self._arriving[transfer] = end + sum(self._links[name].latency_s for name in moving.path)
            self._share()
        if self._moving:
            self._move_for(now - self._now)
        self._now = now

    def _move_for(self, duration_s: float) -> None:
        busy: dict[str, None] = {}
        for moving in self._moving.values():
            num_bytes = moving.rate * duration_s
            moving.left_bytes -= num_bytes
            self._count(moving, num_bytes)
            busy.update(dict.fromkeys(moving.path))
        for name in busy:
            self.use[name].busy_s += duration_s

    def _count(self, moving: _Moving, num_bytes: float) -> None:
        for name in moving.path:
            self.use[name].moved_bytes += num_bytes

    def _share(self) -> None:
        """Rates anew, and with them the next end."""
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
        self._ending = [transfer for transfer, end_s in ends.items() if end_s <= first_s * (1 + _TOGETHER)]

    def _fair_rates(self) -> Iterator[tuple[_Moving, float]]:
        """Fill the links from nothing: the one that is full first sets the rate of all that cross it."""
        waiting = list(self._moving.values())
        room = {name: link.bytes_per_s for name, link in self._links.items()}
        while waiting:
            crossing = dict.fromkeys(room, 0)
            for moving in waiting:
                for name in moving.path:
                    crossing[name] += 1
            share, full = min((room[name] / count, name) for name, count in crossing.items() if count)
            rest: list[_Moving] = []
            for moving in waiting:
                if full not in moving.path:
                    rest.append(moving)
                    continue
                for name in moving.path:
                    room[name] = max(room[name] - share, 0.0)
                yield moving, share
            waiting = rest
