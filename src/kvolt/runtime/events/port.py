"""Event plane: best-effort publish / subscribe with visible gaps.

Each publisher numbers its events per topic from 1. A subscriber is told how many it missed, so what
must not be lost can be fetched another way. Queues are bounded; the overflow rule is drop-oldest,
and a drop shows as a gap.
"""

from __future__ import annotations

from typing import Protocol, Self

import msgspec


class Event(msgspec.Struct, frozen=True):
    """One event as a subscriber sees it."""

    topic: str
    publisher: str
    sequence: int
    payload: bytes
    missed: int = 0
    """Events of this publisher and topic lost just before this one."""


class EventStream(Protocol):
    """One subscription's events, for one reader at a time.

    A cancelled read loses nothing: an event leaves the queue only when it is returned. When the plane is
    closed, what is queued can still be read, then the iteration ends.
    """

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Event: ...

    async def aclose(self) -> None:
        """Stop listening and forget what is queued. A reader that leaves early calls it; twice is no error."""
        ...


class EventPlane(Protocol):
    """The port."""

    @property
    def publisher(self) -> str:
        """This process's publisher id; new at each start, so a restart is never mistaken for a gap."""
        ...

    async def start(self) -> None: ...

    def publish(self, topic: str, payload: bytes) -> None:
        """Send to whoever listens now. Never blocks and never raises for lack of listeners."""
        ...

    def subscribe(self, topic: str, queue_limit: int = 10_000) -> EventStream:
        """Events of every publisher of the topic from now on. Ends when the plane is closed.

        Cancelling a read loses nothing: the next read goes on where it was.
        """
        ...

    async def close(self) -> None: ...
