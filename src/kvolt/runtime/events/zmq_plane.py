"""The `zmq` event plane: no broker; each publisher binds a PUB socket and registers it in discovery.

    publisher --put events/<namespace>/<publisher> = {address, version}--> discovery
    subscriber --watch events/<namespace>/--> connects its SUB socket to every address

`zmq_sockets` has both sockets and the format of messages.
"""

from __future__ import annotations

import logging

import zmq

from kvolt.core.endpoints import PublisherRegistration, publishers_prefix
from kvolt.core.errors import PayloadTooLarge, Unavailable
from kvolt.runtime.discovery.port import Discovery
from kvolt.runtime.events.port import MAX_PAYLOAD_BYTES
from kvolt.runtime.events.registration import RegisteredPublisher
from kvolt.runtime.events.subscriber_queue import (
    NO_COUNTERS,
    EventCounters,
    Numbering,
    Subscription,
    Subscriptions,
)
from kvolt.runtime.events.zmq_sockets import (
    MESSAGE_VERSION,
    Receiver,
    Sender,
    ZmqOptions,
    encode,
)
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)


class ZmqEvents:
    """An event plane over zmq. Events published before start or after close are dropped and counted.

    `publisher` is this process's id, new at each start. A plane without subscriptions has no SUB socket and no watch.
    """

    def __init__(
        self,
        options: ZmqOptions,
        publisher: str,
        discovery: Discovery,
        counters: EventCounters = NO_COUNTERS,
    ) -> None:
        self._options = options
        self._publisher = publisher
        self._discovery = discovery
        self._counters = counters
        self._numbering = Numbering()
        self._subscriptions = Subscriptions(counters, self._subscribe, self._unsubscribe)
        self._task_group = TaskGroup(f"events/{publisher}")
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        key = publishers_prefix(options.namespace) + publisher
        self._registered = RegisteredPublisher(discovery, key, options.lease_ttl_s, self._task_group)
        self._started = False

    @property
    def publisher(self) -> str:
        return self._publisher

    async def start(self) -> None:
        """Bind and register. A plane that fails to start is closed.

        Raises ConfigError for an invalid host, DiscoveryLost if discovery is unreachable.
        """
        if self._started:
            raise RuntimeError("the event plane was already started")
        self._started = True
        self._context = zmq.Context()
        try:
            self._sender = Sender(self._context, self._options)
            for topic in self._subscriptions.topics:
                self._subscribe(topic)
            await self._registered.publish(PublisherRegistration(self._sender.address, MESSAGE_VERSION))
            if self._sender is None:
                raise Unavailable("the event plane was closed while starting", reason="closed")
        except BaseException:
            await self.close()
            raise

    def publish(self, topic: str, payload: bytes) -> None:
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise PayloadTooLarge(
                f"event of {len(payload)} bytes exceeds the limit",
                limit_bytes=MAX_PAYLOAD_BYTES,
                size_bytes=len(payload),
            )
        parts = encode(topic, self._publisher, self._numbering.next(topic), payload)
        if self._sender is not None and self._sender.send(parts):
            self._counters.published(topic, 1)
        else:
            self._counters.dropped(topic, 1)

    def subscribe(self, topic: str, queue_limit: int = 10_000) -> Subscription:
        return self._subscriptions.open(topic, queue_limit)

    async def close(self) -> None:
        self._started = True
        self._subscriptions.close()
        try:
            await self._task_group.close()
            await self._registered.close()
        finally:
            self._close_sockets()

    def _close_sockets(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._context is not None:
            self._context.term()
            self._context = None

    def _subscribe(self, topic: str) -> None:
        if self._context is None:
            return
        if self._receiver is None:
            self._receiver = Receiver(self._context, self._options, self._subscriptions, self._counters)
            self._task_group.start(self._receiver.follow_publishers(self._discovery), "follow")
        self._receiver.subscribe_topic(topic)

    def _unsubscribe(self, topic: str) -> None:
        if self._receiver is not None:
            self._receiver.unsubscribe_topic(topic)
