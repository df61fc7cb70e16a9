"""What goes wrong in a twin, on purpose: events that are lost, routers that start anew, workers that come and go, or
are slower than they say.

Owns when; how is the cluster's matter. Without trouble nothing of this is there, and nothing is drawn.
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


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """None of it unless it is said."""

    event_loss: _Share = 0.0
    """Of all events of workers, KV and load, so many reach nobody."""
    router_restart_s: _Every | None = None
    """So often the router begins anew and knows nothing. Requests under way go on."""
    churn_s: _Every | None = None
    """So often a worker comes, and then one of the others finishes what it has and goes, with all that it holds."""
    slow_workers: Annotated[int, Meta(ge=0)] = 0
    """The first so many take `slow_by` times as long for everything as they say of themselves."""
    slow_by: Annotated[float, Meta(ge=1)] = 3.0
    failing_workers: Annotated[int, Meta(ge=0)] = 0
    """The first so many refuse every request with EngineFailed, at once."""


class FailingEngine(SimEngine):
    """An engine that is broken: it starts, reports no load, and fails whatever it gets."""

    def submit(self, request: Request) -> None:
        raise EngineFailed("a kernel could not be launched", engine="sim")


class LossyBus(MemBus):
    """Loses a share of all events, each by chance."""

    def __init__(self, share: float, rng: random.Random) -> None:
        super().__init__()
        self._share = share
        self._rng = rng
        self.num_lost = 0

    def send(self, event: Event) -> None:
        if self._rng.random() < self._share:
            self.num_lost += 1
            return
        super().send(event)

    def stop_losing(self) -> None:
        self._share = 0.0


def new_bus(trouble: Trouble, seed: int) -> MemBus:
    if not trouble.event_loss:
        return MemBus()
    return LossyBus(trouble.event_loss, random.Random(f"{seed}/losses"))


async def every(period_s: float, act: Callable[[], Awaitable[None]]) -> None:
    """Until it is cancelled."""
    while True:
        await asyncio.sleep(period_s)
        await act()
