"""The event plane of a cluster with a key: over the request plane, whose peers have certificates.

    publisher --put events/<namespace>/<publisher> = {address, version, identity}--> discovery
    subscriber --watch events/<namespace>/--> opens a stream for each publisher and topic

A subscriber opens a stream only to the process whose identity is registered, so events are in the name of their
publisher: nothing in an event says who sent it. Who may subscribe and publish which topic is in `security.access`.
There is no port besides the request plane's, and no connection besides those of its calls.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvolt.core.endpoints import PublisherRegistration, decode_publisher, publishers_prefix
from kvolt.core.errors import KvoltError, NotFound, Overloaded, PayloadTooLarge
from kvolt.core.ids import InstanceId
from kvolt.runtime.discovery.port import Delete, Discovery, Put
from kvolt.runtime.endpoint.server import EndpointServer, msgpack_decoder
from kvolt.runtime.events.port import MAX_PAYLOAD_BYTES, Event
from kvolt.runtime.events.registration import RegisteredPublisher
from kvolt.runtime.events.subscriber_queue import (
    NO_COUNTERS,
    EventCounters,
    Numbering,
    Subscription,
    Subscriptions,
)
from kvolt.runtime.plane.port import Destination, IncomingStream, OutgoingStream, RequestPlane
from kvolt.runtime.plane.streams import StepSink
from kvolt.runtime.process_control import EVENTS_ENDPOINT
from kvolt.runtime.security.access import may_publish
from kvolt.runtime.security.identity import Identity, parse_identity
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

VERSION = 2
MAX_STREAMS = 4096
"""Streams of subscribers to one publisher."""
MAX_PUBLISHERS = 4096
"""Publishers that one process follows: each has a task and streams."""
_CONNECT_S = 5.0
_RETRY_S = 1.0
"""Pause before a stream that ended or could not be opened is opened again; half to one and a half of it."""


class Subscribe(msgspec.Struct, frozen=True, array_like=True):
    """Request of a stream of events."""

    publisher: str
    topic: str


class Published(msgspec.Struct, frozen=True, array_like=True):
    """One event of the stream's publisher and topic."""

    sequence: Annotated[int, Meta(ge=1)]
    payload: Annotated[bytes, Meta(max_length=MAX_PAYLOAD_BYTES)]


_decode_subscribe = msgpack_decoder(Subscribe)
_decode_published = msgpack_decoder(Published)


class PlaneEventOptions(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str
    lease_ttl_s: float = 10.0
    queue_events: int = 4096
    """Events that wait for a slow subscriber; beyond it the oldest are dropped: a gap."""
    queue_bytes: int = 64 << 20
    """The same in bytes of their payloads; at least one event of the largest size."""


class PlaneEvents:
    """See the module. Events published before start or after close are dropped and counted."""

    def __init__(
        self,
        options: PlaneEventOptions,
        publisher: str,
        identity: Identity,
        discovery: Discovery,
        plane: RequestPlane,
        server: EndpointServer,
        counters: EventCounters = NO_COUNTERS,
    ) -> None:
        """`identity`: of this process. `plane` listens before `start`; `server` dispatches its streams."""
        self._options = options
        self._publisher = publisher
        self._identity = identity
        self._discovery = discovery
        self._plane = plane
        self._server = server
        self._counters = counters
        self._numbering = Numbering()
        self._subscriptions = Subscriptions(counters, self._subscribe, self._unsubscribe)
        self._subscribers: dict[str, dict[_Subscriber, None]] = {}
        """Streams of other processes, by topic."""
        self._task_group = TaskGroup(f"events/{publisher}")
        key = publishers_prefix(options.namespace) + publisher
        self._registered = RegisteredPublisher(discovery, key, options.lease_ttl_s, self._task_group)
        self._sources: dict[str, _Source] = {}
        """Other publishers, by discovery key."""
        self._num_dropped = 0
        self._was_started = False
        self._is_open = False
        self._is_following = False

    @property
    def publisher(self) -> str:
        return self._publisher

    async def start(self) -> None:
        """Serve and register. A plane that fails to start is closed. Raises DiscoveryLost if it is unreachable."""
        if self._was_started:
            raise RuntimeError("the event plane was already started")
        assert self._plane.address is not None, "listen first"
        self._was_started = self._is_open = True
        self._server.register(EVENTS_ENDPOINT, InstanceId(""), self._on_stream)
        try:
            for topic in self._subscriptions.topics:
                self._subscribe(topic)
            await self._registered.publish(
                PublisherRegistration(self._plane.address, VERSION, self._identity.uri)
            )
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._was_started = True
        was_open, self._is_open = self._is_open, False
        self._subscriptions.close()
        for source in self._sources.values():
            source.close()
        await self._task_group.close()
        if was_open:
            self._server.unregister(EVENTS_ENDPOINT)
            for subscriber in [each for streams in self._subscribers.values() for each in streams]:
                subscriber.stream.end()
            await self._registered.close()

    # --- publishing

    def publish(self, topic: str, payload: bytes) -> None:
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise PayloadTooLarge(
                f"event of {len(payload)} bytes exceeds the limit",
                limit_bytes=MAX_PAYLOAD_BYTES,
                size_bytes=len(payload),
            )
        sequence = self._numbering.next(topic)
        if not self._is_open:
            self._counters.dropped(topic, 1)
            return
        self._counters.published(topic, 1)
        self._send(Event(topic, self._publisher, sequence, payload, identity=self._identity.uri))

    def _send(self, event: Event) -> None:
        self._subscriptions.deliver(event)
        subscribers = self._subscribers.get(event.topic)
        if subscribers:
            item = Published(event.sequence, event.payload)
            for subscriber in list(subscribers):
                subscriber.send(item)

    def _on_stream(self, stream: IncomingStream) -> None:
        request: Subscribe = stream.decode_body(_decode_subscribe)
        if request.publisher != self._publisher:
            raise NotFound("this process has another publisher", kind="publisher", name=request.publisher)
        if sum(map(len, self._subscribers.values())) >= MAX_STREAMS:
            raise Overloaded("too many subscribers", queue="subscribers", limit=MAX_STREAMS)
        subscriber = _Subscriber(stream, self._options.queue_events, self._options.queue_bytes)
        self._subscribers.setdefault(request.topic, {})[subscriber] = None
        stream.on_cancel = lambda error: self._remove_subscriber(request.topic, subscriber)

    def _remove_subscriber(self, topic: str, subscriber: _Subscriber) -> None:
        streams = self._subscribers.get(topic, {})
        streams.pop(subscriber, None)
        if not streams:
            self._subscribers.pop(topic, None)

    # --- subscribing

    def subscribe(self, topic: str, queue_limit: int = 10_000) -> Subscription:
        return self._subscriptions.open(topic, queue_limit)

    def _subscribe(self, topic: str) -> None:
        if not self._is_open:
            return
        if not self._is_following:
            self._is_following = True
            self._task_group.start(self._follow_publishers(), "follow")
        for source in self._sources.values():
            source.wake()

    def _unsubscribe(self, topic: str) -> None:
        for source in self._sources.values():
            source.cancel(topic)

    async def _follow_publishers(self) -> None:
        """Follow publishers that register until they leave. Ends when discovery is closed."""
        prefix = publishers_prefix(self._options.namespace)
        async for change in self._discovery.watch_prefix(prefix):
            if isinstance(change, Put):
                self._on_registered(change.key, change.key.removeprefix(prefix), change.value)
            elif isinstance(change, Delete) and change.key in self._sources:
                self._sources.pop(change.key).close()

    def _on_registered(self, key: str, publisher: str, value: bytes) -> None:
        known, registration = self._sources.get(key), decode_publisher(value)
        if publisher == self._publisher or (known is not None and known.registration == registration):
            return
        if known is not None:
            self._sources.pop(key).close()
        identity = None if registration is None else parse_identity(registration.identity)
        if registration is None or identity is None or registration.version != VERSION:
            self._counters.rejected("registration", 1)
            reason = "it has no cluster key" if identity is None else "it has another version of kvolt"
            log.warning("event publisher ignored: key=%s reason=%s", key, reason)
            return
        source = _Source(self._plane, publisher, registration, identity, self._subscriptions)
        self._sources[key] = source
        source.start(self._task_group)
        if len(self._sources) > MAX_PUBLISHERS:
            self._drop_source()

    def _drop_source(self) -> None:
        """Drop the newest publisher of the identity with the most: one that registers many displaces no others."""
        counts = Counter(source.registration.identity for source in self._sources.values())
        [(identity, _)] = counts.most_common(1)
        key = next(
            key for key in reversed(self._sources) if self._sources[key].registration.identity == identity
        )
        self._sources.pop(key).close()
        self._counters.rejected("registration", 1)
        log.warning(
            "event publisher ignored: key=%s reason=too many publishers limit=%d", key, MAX_PUBLISHERS
        )


class _Subscriber:
    """A stream of another process. Events wait while it is slow, so that the publisher never does."""

    def __init__(self, stream: IncomingStream, max_events: int, max_bytes: int) -> None:
        self.stream = stream
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._waiting: deque[Published] = deque()
        self._num_bytes = 0
        """Of the waiting events."""
        self._is_blocked = False
        stream.on_writable = self._drain

    def send(self, item: Published) -> None:
        if not self._is_blocked:
            self._pass_on(item)
            return
        self._waiting.append(item)
        self._num_bytes += len(item.payload)
        while len(self._waiting) > self._max_events or self._num_bytes > self._max_bytes:
            self._pop()

    def _pass_on(self, item: Published) -> None:
        # Also when the stream is not writable: it calls `on_writable` for what it holds back, and only then.
        self.stream.send(item)
        self._is_blocked = not self.stream.writable

    def _drain(self) -> None:
        self._is_blocked = False
        while self._waiting and not self._is_blocked:
            self._pass_on(self._pop())

    def _pop(self) -> Published:
        item = self._waiting.popleft()
        self._num_bytes -= len(item.payload)
        return item


class _Source:
    """The streams from one publisher, one for each subscribed topic, which are opened again when they end."""

    def __init__(
        self,
        plane: RequestPlane,
        publisher: str,
        registration: PublisherRegistration,
        identity: Identity,
        subscriptions: Subscriptions,
    ) -> None:
        self.registration = registration
        self.publisher = publisher
        self._plane = plane
        self._to = Destination(registration.address, EVENTS_ENDPOINT, registration.identity)
        self._identity = identity
        self._subscriptions = subscriptions
        self._streams: dict[str, OutgoingStream] = {}
        self._wakeup = asyncio.Event()
        self._wakeup.set()
        self._has_failed = False
        """A stream ended since the last pause."""
        self._is_reported = False
        self._task: asyncio.Task[Any] | None = None

    def start(self, task_group: TaskGroup) -> None:
        self._task = task_group.start(self._run(), self.publisher)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for topic in list(self._streams):
            self.cancel(topic)

    def wake(self) -> None:
        """Open the streams of new topics."""
        self._wakeup.set()

    def cancel(self, topic: str) -> None:
        stream = self._streams.pop(topic, None)
        if stream is not None:
            stream.cancel()

    async def _run(self) -> None:
        rng = random.Random(self.publisher)
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            if self._has_failed:
                self._has_failed = False
                await asyncio.sleep(_RETRY_S * rng.uniform(0.5, 1.5))
            for topic in self._subscriptions.topics:
                if topic not in self._streams and may_publish(self._identity, topic):
                    await self._open(topic)

    async def _open(self, topic: str) -> None:
        sink = _TopicSink(self, topic)
        body = msgspec.msgpack.encode(Subscribe(self.publisher, topic))
        try:
            stream = await self._plane.open(
                self._to, body, sink, _decode_published, connect_s=_CONNECT_S, automatic_credit=True
            )
        except KvoltError as error:
            sink.on_end(error)
            return
        if topic not in self._subscriptions.topics:  # unsubscribed while it connected
            stream.cancel()
        elif not sink.has_ended:
            self._streams[topic] = stream

    def deliver(self, topic: str, item: Published) -> None:
        self._is_reported = False
        self._subscriptions.deliver(
            Event(topic, self.publisher, item.sequence, item.payload, identity=self.registration.identity)
        )

    def on_end(self, topic: str, error: KvoltError | None) -> None:
        self._streams.pop(topic, None)
        self._has_failed = True
        self._wakeup.set()
        if not self._is_reported:
            self._is_reported = True
            reason = "the publisher stops" if error is None else error.message
            log.info("event stream ended: publisher=%s topic=%s reason=%s", self.publisher, topic, reason)


class _TopicSink:
    """Passes on the events of one stream."""

    steps: StepSink | None = None
    """This sink takes single items only."""

    def __init__(self, source: _Source, topic: str) -> None:
        self._source = source
        self._topic = topic
        self.has_ended = False

    def on_item(self, item: Published) -> None:
        self._source.deliver(self._topic, item)

    def on_end(self, error: KvoltError | None) -> None:
        self.has_ended = True
        self._source.on_end(self._topic, error)
