"""The `zmq` event plane: no broker; each publisher binds a PUB socket and registers it in discovery.

    publisher --put events/<namespace>/<publisher> = {address, version, public key}--> discovery
    subscriber --watch events/<namespace>/--> connects its SUB socket to every address

`zmq_sockets` has both sockets and the format of messages, `curve` the keys that encrypt them.
"""

from __future__ import annotations

import logging
import random
from contextlib import suppress

import msgspec
import zmq

from kvolt.core.errors import DiscoveryLost, PayloadTooLarge, Unavailable
from kvolt.runtime.discovery.port import Discovery, LeaseId
from kvolt.runtime.endpoint.registration import RegisteredKey
from kvolt.runtime.events.curve import Authenticator, EventSecrets, KeyPair
from kvolt.runtime.events.subscriber_queue import (
    NO_COUNTERS,
    EventCounters,
    Numbering,
    Subscription,
    Subscriptions,
)
from kvolt.runtime.events.zmq_sockets import (
    MAX_PAYLOAD_BYTES,
    Receiver,
    Registration,
    Sender,
    ZmqOptions,
    encode,
    registrations_prefix,
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
        secrets: EventSecrets | None = None,
    ) -> None:
        """`secrets`: encrypts events, and admits processes of the cluster only."""
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
        self._lease: LeaseId | None = None
        self._secrets = secrets
        self._authenticator: Authenticator | None = None
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
            self._sender = self._open_sender(self._context)
            for topic in self._subscriptions.topics:
                self._subscribe(topic)
            await self._register(self._sender.registration)
        except BaseException:
            await self.close()
            raise

    def _open_sender(self, context: zmq.Context[zmq.Socket[bytes]]) -> Sender:
        if self._secrets is None:
            return Sender(context, self._options)
        self._authenticator = Authenticator(
            context, self._secrets.event_secrets, lambda: self._counters.rejected("subscriber", 1)
        )
        self._secrets.on_renewed(self._on_renewed)
        return Sender(context, self._options, KeyPair.create())

    def _on_renewed(self) -> None:
        if self._secrets is None:
            return
        secrets = self._secrets.event_secrets
        if self._authenticator is not None:
            self._authenticator.accept(secrets)
        if self._receiver is not None:
            self._receiver.use_keys(KeyPair.of_secret(secrets[0]))

    async def _register(self, registration: Registration) -> None:
        self._lease = await self._discovery.lease(self._options.lease_ttl_s)
        key = registrations_prefix(self._options.namespace) + self._publisher
        registered = RegisteredKey(
            self._discovery,
            self._lease,
            key,
            self._task_group,
            random.Random(self._publisher),
            lambda missing: None,
        )
        await registered.publish(msgspec.msgpack.encode(registration))
        if self._sender is None:
            raise Unavailable("the event plane was closed while starting", reason="closed")

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
            await self._unregister()
        finally:
            self._close_sockets()

    async def _unregister(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            # If discovery is unreachable, the lease expires by itself.
            with suppress(DiscoveryLost):
                await self._discovery.revoke(lease)

    def _close_sockets(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._authenticator is not None:
            self._authenticator.close()
            self._authenticator = None
        if self._context is not None:
            self._context.term()
            self._context = None

    def _subscribe(self, topic: str) -> None:
        if self._context is None:
            return
        if self._receiver is None:
            keys = None if self._secrets is None else KeyPair.of_secret(self._secrets.event_secrets[0])
            self._receiver = Receiver(self._context, self._options, self._subscriptions, self._counters, keys)
            self._task_group.start(self._receiver.follow_publishers(self._discovery), "follow")
        self._receiver.subscribe_topic(topic)

    def _unsubscribe(self, topic: str) -> None:
        if self._receiver is not None:
            self._receiver.unsubscribe_topic(topic)
