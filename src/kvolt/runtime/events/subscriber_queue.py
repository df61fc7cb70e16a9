"""Subscriber side shared by all event planes: bounded queues, gap detection, numbering, counters.

Independent of transport and payload.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Self

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.runtime.events.port import Event

Count = Callable[[str, int], None]
"""Adds a number to the counter of a label."""

_MAX_TRACKED_PUBLISHERS = 16_384
_EVENTS_PER_TURN = 128


def _ignore(_label: str, _number: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class EventCounters:
    """Counters of an event plane. The label is the topic; for `rejected`, the reason."""

    published: Count = _ignore
    received: Count = _ignore
    missed: Count = _ignore
    """Events missed, counted when the reader reaches the gap."""
    dropped: Count = _ignore
    """Own events that were not sent: not started, closed, or send buffer full."""
    rejected: Count = _ignore
    """Ignored messages and registrations."""


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
            f"{topic!r} is not a valid topic: it must be non-empty and printable", param="topic"
        )


class Subscription(AsyncIterator[Event]):
    """Bounded queue of one reader; drops the oldest event when full.

    Gaps are computed on reading from the sequence numbers alone, so an event lost in transit and one dropped here are
    equal. A cancelled read loses nothing. After the plane is closed, queued events can still be read, then the
    iteration ends. A reader that leaves early calls `aclose()`.
    """

    def __init__(
        self, topic: str, queue_limit: int, counters: EventCounters, on_close: Callable[[Subscription], None]
    ) -> None:
        if queue_limit < 1:
            raise InvalidRequest("queue_limit must be at least 1", param="queue_limit")
        self.topic = topic
        self._queue: deque[Event] = deque(maxlen=queue_limit)
        self._last_read: dict[str, int] = {}
        self._counters = counters
        self._on_close = on_close
        self._waiter: asyncio.Future[None] | None = None
        self._turn = 0
        self._closed = False

    def deliver(self, event: Event) -> None:
        if self._closed:
            return
        if event.publisher not in self._last_read:
            # A new subscriber has missed nothing so far; drops from here on count.
            if len(self._last_read) >= _MAX_TRACKED_PUBLISHERS:
                del self._last_read[next(iter(self._last_read))]
            self._last_read[event.publisher] = event.sequence - 1
        self._queue.append(event)
        self._wake()

    def close(self) -> None:
        self._closed = True
        self._wake()

    async def aclose(self) -> None:
        """Unsubscribe and discard queued events."""
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
                # Yield: reading a full queue without a pause would block the loop.
                self._turn = 0
                await asyncio.sleep(0)
                continue
            self._turn += 1
            event = self._check_gap(self._queue.popleft())
            if event is not None:
                return event

    def _check_gap(self, event: Event) -> Event | None:
        # Removed and inserted again, so that the dict is in order of the last read.
        last_read = self._last_read.pop(event.publisher, event.sequence - 1)
        self._last_read[event.publisher] = max(last_read, event.sequence)
        missed = event.sequence - last_read - 1
        if missed < 0:
            self._counters.rejected("repeated", 1)
            return None
        if missed == 0:
            return event
        self._counters.missed(event.topic, missed)
        return msgspec.structs.replace(event, missed=missed)

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError(f"two concurrent readers on one subscription of {self.topic!r}")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _ignore_topic(_topic: str) -> None:
    pass


class Subscriptions:
    """All subscriptions of one plane, by topic.

    `on_first` and `on_last` are called when a topic gets its first subscription and loses its last.
    """

    def __init__(
        self,
        counters: EventCounters,
        on_first: Callable[[str], None] = _ignore_topic,
        on_last: Callable[[str], None] = _ignore_topic,
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
        same_topic = self._by_topic.setdefault(topic, [])
        same_topic.append(subscription)
        if len(same_topic) == 1:
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
        same_topic = self._by_topic.get(subscription.topic)
        if same_topic is None or subscription not in same_topic:
            return
        same_topic.remove(subscription)
        if not same_topic:
            del self._by_topic[subscription.topic]
            self._on_last(subscription.topic)
