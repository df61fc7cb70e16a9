"""The `mem` event plane: for a single process and for virtual clusters, with injected losses and delays."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvolt.core.errors import ConfigError
from kvolt.runtime.events.port import Event
from kvolt.runtime.events.subscriber_queue import (
    NO_COUNTERS,
    EventCounters,
    Numbering,
    Subscription,
    Subscriptions,
)

LinkDelay = Callable[[str, str], float | None]
"""Seconds from a publisher to a subscriber (their publisher ids); None loses the event on this link."""

_MAX_IN_FLIGHT_PER_LINK = 100_000


@dataclass(slots=True)
class _Link:
    """Events in flight from one publisher to one subscriber, in order.

    Has one timer, for the first event. Events never overtake each other: an event due earlier than its predecessor is
    delivered with it. Exists while events are in flight.
    """

    deliver: Callable[[Event], None]
    on_empty: Callable[[], object]
    in_flight: deque[tuple[float, Event]] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None

    def send(self, event: Event, delay_s: float) -> None:
        if len(self.in_flight) >= _MAX_IN_FLIGHT_PER_LINK:
            return  # appears as a gap
        self.in_flight.append((asyncio.get_running_loop().time() + delay_s, event))
        self._arm()

    def _arm(self) -> None:
        if self.timer is None and self.in_flight:
            self.timer = asyncio.get_running_loop().call_at(self.in_flight[0][0], self._deliver_due)

    def _deliver_due(self) -> None:
        self.timer = None
        due = self.in_flight[0][0]
        while self.in_flight and self.in_flight[0][0] <= due:
            self.deliver(self.in_flight.popleft()[1])
        if not self.in_flight:
            self.on_empty()
        self._arm()

    def discard(self) -> None:
        self.in_flight.clear()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class MemBus:
    """Connects the `MemEvents` of one process. Without `delay_s`, delivery is immediate."""

    def __init__(self, delay_s: LinkDelay | None = None) -> None:
        self._delay_s = delay_s
        self._members: dict[str, Subscriptions] = {}
        self._readers: dict[str, dict[str, Subscriptions]] = {}
        """By topic: few of many members read a topic, and an event should cost nothing at the others."""
        self._links: dict[tuple[str, str], _Link] = {}
        self._num_to_drop: dict[str, int] = {}

    def drop_next(self, publisher: str, num_events: int) -> None:
        """Lose the publisher's next events."""
        self._num_to_drop[publisher] = self._num_to_drop.get(publisher, 0) + num_events

    def join(self, publisher: str, subscriptions: Subscriptions) -> None:
        if publisher in self._members:
            raise ConfigError(f"publisher {publisher} is on the bus already", key="publisher")
        self._members[publisher] = subscriptions
        for topic in subscriptions.topics:
            self.read(publisher, topic)

    def read(self, publisher: str, topic: str) -> None:
        """Add the member's subscription to the topic."""
        subscriptions = self._members.get(publisher)
        if subscriptions is not None:
            self._readers.setdefault(topic, {})[publisher] = subscriptions

    def unread(self, publisher: str, topic: str) -> None:
        """Remove the member's subscription to the topic."""
        readers = self._readers.get(topic, {})
        readers.pop(publisher, None)
        if not readers:
            self._readers.pop(topic, None)

    def leave(self, publisher: str) -> None:
        """Remove a member. Events that it sent are still delivered; events in flight to it are not."""
        subscriptions = self._members.pop(publisher, None)
        for topic in subscriptions.topics if subscriptions is not None else ():
            self.unread(publisher, topic)
        for ends in [ends for ends in self._links if ends[1] == publisher]:
            self._links.pop(ends).discard()

    def send(self, event: Event) -> None:
        if self._num_to_drop.get(event.publisher, 0) > 0:
            self._num_to_drop[event.publisher] -= 1
            return
        if self._delay_s is None:
            for subscriptions in tuple(self._readers.get(event.topic, {}).values()):
                subscriptions.deliver(event)
            return
        readers = self._readers.get(event.topic, {})
        for subscriber, subscriptions in self._members.items():
            delay_s = self._delay_s(event.publisher, subscriber)
            if delay_s is not None and subscriber in readers:
                ends = (event.publisher, subscriber)
                link = self._links.get(ends)
                if link is None:
                    link = _Link(subscriptions.deliver, partial(self._links.pop, ends))
                    self._links[ends] = link
                link.send(event, delay_s)


class MemEvents:
    """An event plane on a `MemBus`. Events published before start or after close are dropped and counted."""

    def __init__(
        self, bus: MemBus, publisher: str, counters: EventCounters = NO_COUNTERS, identity: str = ""
    ) -> None:
        """`identity`: of the publisher, in its events."""
        self._identity = identity
        self._bus = bus
        self._publisher = publisher
        self._counters = counters
        self._numbering = Numbering()
        self._subscriptions = Subscriptions(
            counters, partial(bus.read, publisher), partial(bus.unread, publisher)
        )
        self._open = False

    @property
    def publisher(self) -> str:
        return self._publisher

    async def start(self) -> None:
        self._bus.join(self._publisher, self._subscriptions)
        self._open = True

    def publish(self, topic: str, payload: bytes) -> None:
        event = Event(topic, self._publisher, self._numbering.next(topic), payload, identity=self._identity)
        if not self._open:
            self._counters.dropped(topic, 1)
            return
        self._counters.published(topic, 1)
        self._bus.send(event)

    def subscribe(self, topic: str, queue_limit: int = 10_000) -> Subscription:
        return self._subscriptions.open(topic, queue_limit)

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._bus.leave(self._publisher)
        self._subscriptions.close()
