"""Event planes over request planes in one process, for tests."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

from tests.unit.runtime.security.certificates import issued_credentials

from kvolt.runtime.clock import SystemClock
from kvolt.runtime.discovery.mem import MemDiscovery, MemStore
from kvolt.runtime.endpoint.server import EndpointServer
from kvolt.runtime.events import plane_events
from kvolt.runtime.events.plane_events import PlaneEventOptions, PlaneEvents
from kvolt.runtime.events.port import EventStream
from kvolt.runtime.events.subscriber_queue import EventCounters
from kvolt.runtime.plane.connection import ConnectionOptions
from kvolt.runtime.plane.tcp_plane import TcpPlane
from kvolt.runtime.security.identity import ProcessRole
from kvolt.runtime.security.secure_network import SecureNetwork
from kvolt.testing.events_suite import probe

PREFIX = "events/ns/"
credentials_of = cache(issued_credentials)


class EventProcess(PlaneEvents):
    """An event plane with the request plane of its process, which it closes as well."""

    def __init__(self, harness: PlaneHarness, name: str, role: ProcessRole) -> None:
        credentials = credentials_of(name, role)
        self.server = EndpointServer()
        self.tcp = TcpPlane(SecureNetwork(credentials), ConnectionOptions(), name, self.server.on_open)
        super().__init__(
            PlaneEventOptions(namespace="ns", queue_events=harness.queue_events),
            f"publisher-{name}",
            credentials.identity,
            harness.discovery,
            self.tcp,
            self.server,
            harness.counters(),
        )

    async def start(self) -> None:
        await self.tcp.listen("127.0.0.1:0")
        await super().start()

    async def close(self) -> None:
        await super().close()
        await self.server.close()
        await self.tcp.close()


class PlaneHarness:
    def __init__(self, queue_events: int = 4096) -> None:
        self.store = MemStore()
        self.discovery = MemDiscovery(self.store, SystemClock(), random.Random(1))
        self.totals: Counter[tuple[str, str]] = Counter()
        self.queue_events = queue_events
        self._num_planes = 0

    async def plane(self, role: ProcessRole = ProcessRole.FRONTEND) -> EventProcess:
        self._num_planes += 1
        process = EventProcess(self, f"p{self._num_planes}", role)
        await process.start()
        return process

    async def connected(self, publisher: PlaneEvents, topic: str, *streams: EventStream) -> None:
        await probe(publisher, topic, *streams)

    def lose(self, publisher: PlaneEvents, num_events: int) -> None:
        send, left = publisher._send, num_events

        def lossy(event: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                send(event)  # type: ignore[arg-type]

        publisher._send = lossy  # type: ignore[method-assign, assignment]

    def counters(self) -> EventCounters:
        def counter(name: str):  # type: ignore[no-untyped-def]
            def count(label: str, number: int) -> None:
                self.totals[name, label] += number

            return count

        return EventCounters(*(counter(name) for name in EventCounters.__slots__))


def retry_soon(monkeypatch: object) -> None:
    monkeypatch.setattr(plane_events, "_RETRY_S", 0.05)  # type: ignore[attr-defined]
