"""Faults injected into a twin: lost events, router restarts, worker churn, and slow or failing workers.

Without faults none of this code runs and no random numbers are drawn.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from kvolt.core.errors import EngineFailed
from kvolt.core.request import Request
from kvolt.engines.sim.engine import SimEngine
from kvolt.runtime.events.mem import MemBus
from kvolt.runtime.events.port import Event

_Share = Annotated[float, Meta(ge=0, le=1)]
_Every = Annotated[float, Meta(gt=0)]


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Faults to inject; none by default."""

    event_loss: _Share = 0.0
    """Fraction of worker events (KV and load) that are lost."""
    router_restart_s: _Every | None = None
    """Interval at which the router restarts with an empty state. Running requests continue."""
    churn_s: _Every | None = None
    """Interval at which a worker joins and a random other one drains and leaves with its cache."""
    slow_workers: Annotated[int, Meta(ge=0)] = 0
    """Number of workers that are `slow_by` times slower than their published latency model."""
    slow_by: Annotated[float, Meta(ge=1)] = 3.0
    failing_workers: Annotated[int, Meta(ge=0)] = 0
    """Number of workers that fail every request with EngineFailed."""


class FailingEngine(SimEngine):
    """Engine that starts, reports no load, and fails every request."""

    def submit(self, request: Request) -> None:
        raise EngineFailed("a kernel could not be launched", engine="sim")


class LossyBus(MemBus):
    """Event bus that drops a random fraction of events."""

    def __init__(self, share: float, rng: random.Random) -> None:
        super().__init__()
        self._share = share
        self._rng = rng

    def send(self, event: Event) -> None:
        if self._rng.random() >= self._share:
            super().send(event)


def new_bus(faults: Faults, seed: int) -> MemBus:
    if not faults.event_loss:
        return MemBus()
    return LossyBus(faults.event_loss, random.Random(f"{seed}/losses"))


async def every(period_s: float, act: Callable[[], Awaitable[None]]) -> None:
    """Call `act` periodically until cancelled."""
    while True:
        await asyncio.sleep(period_s)
        await act()
