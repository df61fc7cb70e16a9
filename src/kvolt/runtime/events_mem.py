"""Events inside one process: the subscriber's end of every event plane, and the `mem` plane.

`Subscription`, `Subscriptions` and `Numbering` are what all event planes share: bounded queues, gap
counting, numbering. `MemBus` and `MemEvents` are the plane for one process and for virtual clusters,
with losses and delays that a test chooses.

Must not know: sockets, discovery, what a payload means.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import msgspec

from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.runtime.events import Event

Count = Callable[[str, int], None]
"""Adds the number to the counter of the label."""

LinkDelay = Callable[[str, str], float | None]
"""Seconds from a publisher to a subscriber (their publisher ids); None loses the event on this link."""

_MAX_TRACKED_PUBLISHERS = 16_384
_MAX_IN_FLIGHT_PER_LINK = 100_000
_EVENTS_PER_TURN = 128


def _ignore(_label: str, _number: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class EventCounters:
    """Where a plane counts. The label is the topic, for `rejected` the reason."""

    published: Count = _ignore
    received: Count = _ignore
    missed: Count = _ignore
    """Counted when the reader meets the gap."""
    dropped: Count = _ignore
    """Own events that went nowhere: not started, closed, or the send buffer was full."""
    rejected: Count = _ignore
    """Messages and registrations that were skipped."""


NO_COUNTERS = EventCounters()


class Numbering:
    """Sequence numbers of one publisher, per topic from 1."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def next(self, topic: str) -> int:
        last = self._last.get(topic)
        if last is None:
            check_topic(topic)
            last = 0
        self._last[topic] = last + 1
        return last + 1


def check_topic(topic: str) -> None:
    if not topic or not topic.isprintable():
        raise InvalidRequest(
            f"{topic!r} is not a topic: it is empty or has unprintable characters", param="topic"
        )


class Subscription(AsyncIterator[Event]):
    """One reader's bounded queue; when it is full the oldest event goes.

    Gaps are counted where they are read, from sequence numbers alone, so an event lost on the way and
    one dropped here look the same. A cancelled read loses nothing. After the plane's close the reader
    still gets what is queued, then the iteration ends. A reader that stops early calls `aclose()`.
    """

    def __init__(
        self, topic: str, queue_limit: int, counters: EventCounters, on_close: Callable[[Subscription], None]
    ) -> None:
        if queue_limit < 1:
            raise InvalidRequest("a subscription needs room for one event", param="queue_limit")
        self.topic = topic
        self._queue: deque[Event] = deque(maxlen=queue_limit)
        self._read_up_to: dict[str, int] = {}
        self._counters = counters
        self._on_close = on_close
        self._waiter: asyncio.Future[None] | None = None
        self._turn = 0
        self._closed = False

    def deliver(self, event: Event) -> None:
        if self._closed:
            return
        if event.publisher not in self._read_up_to:
            # Whoever joins late has missed nothing; what is dropped from here on counts.
            if len(self._read_up_to) >= _MAX_TRACKED_PUBLISHERS:
                del self._read_up_to[next(iter(self._read_up_to))]
            self._read_up_to[event.publisher] = event.sequence - 1
        self._queue.append(event)
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    async def aclose(self) -> None:
        """Stop listening and forget what is queued."""
        self._queue.clear()
        self.close()
        self._on_close(self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while True:
            if not self._queue:
                if self._closed:
                    raise StopAsyncIteration
                await self._wait()
                self._turn = 0
                continue
            if self._turn >= _EVENTS_PER_TURN:
                # A full queue would otherwise be read in one go, with the loop standing still.
                self._turn = 0
                await asyncio.sleep(0)
                continue
            self._turn += 1
            event = self._counted(self._queue.popleft())
            if event is not None:
                return event

    def _counted(self, event: Event) -> Event | None:
        # Taken out and put back: the dict's order is then least recently read first.
        before = self._read_up_to.pop(event.publisher, event.sequence - 1)
        self._read_up_to[event.publisher] = max(before, event.sequence)
        missed = event.sequence - before - 1
        if missed < 0:
            self._counters.rejected("repeated", 1)
            return None
        if missed == 0:
            return event
        self._counters.missed(event.topic, missed)
        return msgspec.structs.replace(event, missed=missed)

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError(f"two readers on one subscription of {self.topic!r}")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _nothing(_topic: str) -> None:
    pass


class Subscriptions:
    """All subscriptions of one plane, by topic.

    `on_first` and `on_last` are told when a topic gets its first and loses its last subscription.
    """

    def __init__(
        self,
        counters: EventCounters,
        on_first: Callable[[str], None] = _nothing,
        on_last: Callable[[str], None] = _nothing,
    ) -> None:
        self._counters = counters
        self._on_first = on_first
        self._on_last = on_last
        self._by_topic: dict[str, list[Subscription]] = {}
        self._closed = False

    @property
    def topics(self) -> tuple[str, ...]:
        return tuple(self._by_topic)

    def open(self, topic: str, queue_limit: int) -> Subscription:
        check_topic(topic)
        subscription = Subscription(topic, queue_limit, self._counters, self._remove)
        if self._closed:
            subscription.close()
            return subscription
        siblings = self._by_topic.setdefault(topic, [])
        siblings.append(subscription)
        if len(siblings) == 1:
            self._on_first(topic)
        return subscription

    def deliver(self, event: Event) -> None:
        subscriptions = self._by_topic.get(event.topic)
        if subscriptions is None:
            return
        self._counters.received(event.topic, 1)
        for subscription in subscriptions:
            subscription.deliver(event)

    def close(self) -> None:
        self._closed = True
        for subscriptions in self._by_topic.values():
            for subscription in subscriptions:
                subscription.close()
        self._by_topic.clear()

    def _remove(self, subscription: Subscription) -> None:
        siblings = self._by_topic.get(subscription.topic)
        if siblings is None or subscription not in siblings:
            return
        siblings.remove(subscription)
        if not siblings:
            del self._by_topic[subscription.topic]
            self._on_last(subscription.topic)


@dataclass(slots=True)
class _Link:
    """Events on their way from one publisher to one subscriber, in order.

    One timer, for the head: nothing overtakes it, and what was due before it comes with it. A link
    lives while something is on its way.
    """

    deliver: Callable[[Event], None]
    on_empty: Callable[[], object]
    in_flight: deque[tuple[float, Event]] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None

    def send(self, event: Event, delay_s: float) -> None:
        if len(self.in_flight) >= _MAX_IN_FLIGHT_PER_LINK:
            return  # shows as a gap
        self.in_flight.append((asyncio.get_running_loop().time() + delay_s, event))
        self._arm()

    def _arm(self) -> None:
        if self.timer is None and self.in_flight:
            self.timer = asyncio.get_running_loop().call_at(self.in_flight[0][0], self._arrive)

    def _arrive(self) -> None:
        self.timer = None
        due = self.in_flight[0][0]
        while self.in_flight and self.in_flight[0][0] <= due:
            self.deliver(self.in_flight.popleft()[1])
        if not self.in_flight:
            self.on_empty()
        self._arm()

    def cut(self) -> None:
        self.in_flight.clear()
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class MemBus:
    """What joins the `MemEvents` of one process. Without `delay_s` an event is there at once."""

    def __init__(self, delay_s: LinkDelay | None = None) -> None:
        self._delay_s = delay_s
        self._members: dict[str, Subscriptions] = {}
        self._links: dict[tuple[str, str], _Link] = {}
        self._to_lose: dict[str, int] = {}

    def lose(self, publisher: str, num_events: int) -> None:
        """The publisher's next events reach nobody."""
        self._to_lose[publisher] = self._to_lose.get(publisher, 0) + num_events

    def join(self, publisher: str, subscriptions: Subscriptions) -> None:
        if publisher in self._members:
            raise ConfigError(f"publisher {publisher} is on the bus already", key="publisher")
        self._members[publisher] = subscriptions

    def leave(self, publisher: str) -> None:
        """What this member had sent still arrives; what was on its way to it does not."""
        self._members.pop(publisher, None)
        for ends in [ends for ends in self._links if ends[1] == publisher]:
            self._links.pop(ends).cut()

    def send(self, event: Event) -> None:
        if self._to_lose.get(event.publisher, 0) > 0:
            self._to_lose[event.publisher] -= 1
            return
        for subscriber, subscriptions in self._members.items():
            if self._delay_s is None:
                subscriptions.deliver(event)
                continue
            delay_s = self._delay_s(event.publisher, subscriber)
            if delay_s is not None:
                ends = (event.publisher, subscriber)
                link = self._links.get(ends)
                if link is None:
                    link = _Link(subscriptions.deliver, partial(self._links.pop, ends))
                    self._links[ends] = link
                link.send(event, delay_s)


class MemEvents:
    """An event plane on a `MemBus`. What is published before start or after close is dropped and counted."""

    def __init__(self, bus: MemBus, publisher: str, counters: EventCounters = NO_COUNTERS) -> None:
        self._bus = bus
        self._publisher = publisher
        self._counters = counters
        self._numbering = Numbering()
        self._subscriptions = Subscriptions(counters)
        self._open = False

    @property
    def publisher(self) -> str:
        return self._publisher

    async def start(self) -> None:
        self._bus.join(self._publisher, self._subscriptions)
        self._open = True

    def publish(self, topic: str, payload: bytes) -> None:
        event = Event(topic, self._publisher, self._numbering.next(topic), payload)
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
