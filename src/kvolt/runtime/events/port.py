"""Event plane: best-effort publish/subscribe with visible gaps.

Each publisher numbers its events per topic from 1. A subscriber learns how many events it missed, so that critical
state can be fetched another way. Queues are bounded and drop the oldest events; a drop appears as a gap.
"""

from __future__ import annotations

from typing import Protocol, Self

import msgspec

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024


class Event(msgspec.Struct, frozen=True):
    """An event as delivered to a subscriber."""

    topic: str
    publisher: str
    sequence: int
    payload: bytes
    missed: int = 0
    """Events of this publisher and topic that were lost just before this one."""
    identity: str = ""
    """URI in the certificate of the publisher's process; empty without a cluster key."""


class EventStream(Protocol):
    """Events of one subscription, for one reader at a time.

    A cancelled read loses nothing: an event leaves the queue only when it is returned. After the plane is closed,
    queued events can still be read, then the iteration ends.
    """

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Event: ...

    async def aclose(self) -> None:
        """Unsubscribe and discard queued events. For readers that leave early; idempotent."""
        ...


class EventPlane(Protocol):
    """Event plane port."""

    @property
    def publisher(self) -> str:
        """Publisher id of this process; new at each start, so that a restart is not mistaken for a gap."""
        ...

    async def start(self) -> None: ...

    def publish(self, topic: str, payload: bytes) -> None:
        """Send to the current subscribers. Never blocks; does nothing without subscribers."""
        ...

    def subscribe(self, topic: str, queue_limit: int = 10_000) -> EventStream:
        """Subscribe to the events of every publisher of the topic from now on. Ends when the plane is closed.

        A cancelled read loses nothing.
        """
        ...

    async def close(self) -> None: ...
