"""The subscriber's end of every event plane: bounded queues, gap counting, numbering, counters.

Must not know how an event travels, or what a payload means.
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
"""Adds the number to the counter of the label."""

_MAX_TRACKED_PUBLISHERS = 16_384
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
