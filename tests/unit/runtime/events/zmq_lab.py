"""Event planes over zmq in one process, for tests."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter

import zmq

from kvolt.runtime.clock import SystemClock
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.events.port import EventStream
from kvolt.runtime.events.subscriber_queue import EventCounters
from kvolt.runtime.events.zmq_plane import ZmqEvents
from kvolt.runtime.events.zmq_sockets import ZmqOptions
from kvolt.testing.events_suite import probe

PREFIX = "events/ns/"


class ZmqHarness:
    def __init__(self) -> None:
        self.store = MemStore()
        self.discovery = MemDiscovery(self.store, SystemClock(), random.Random(1))
        self.totals: Counter[tuple[str, str]] = Counter()
        self._num_planes = 0

    async def plane(self, **options) -> ZmqEvents:
        self._num_planes += 1
        plane = ZmqEvents(
            ZmqOptions(namespace="ns", **options), f"p{self._num_planes}", self.discovery, self._counters()
        )
        await plane.start()
        return plane

    async def connected(self, publisher: ZmqEvents, topic: str, *streams: EventStream) -> None:
        await probe(publisher, topic, *streams)

    def lose(self, publisher: ZmqEvents, num_events: int) -> None:
        send, left = publisher._sender.send, num_events

        def lossy(parts: list[bytes]) -> bool:
            nonlocal left
            left -= 1
            return True if left >= 0 else send(parts)

        publisher._sender.send = lossy

    def _counters(self) -> EventCounters:
        def counter(name: str):
            def count(label: str, number: int) -> None:
                self.totals[name, label] += number

            return count

        return EventCounters(*(counter(name) for name in EventCounters.__slots__))


def no_sockets_left() -> bool:
    gc.collect()
    return not [x for x in gc.get_objects() if isinstance(x, zmq.Context | zmq.Socket) and not x.closed]


async def until(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come about")
