"""The sockets of the `zmq` event plane, and the format of its messages.

A message has four parts: topic and a NUL, publisher, sequence (u64 little-endian), payload. zmq filters by prefix;
the NUL prevents `kv` from matching `kv2`.

Uses plain zmq sockets with a reader on their descriptor instead of `zmq.asyncio`: one wake-up drains all received
messages, without a future per message. The descriptor signals changes only, and any call on the socket may consume
the signal, so every call on the SUB socket outside the drain is followed by a drain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from struct import Struct as Packing

import msgspec
import zmq

from kvolt.core.endpoints import PublisherRegistration, publishers_prefix
from kvolt.core.errors import MALFORMED, ConfigError
from kvolt.runtime.discovery.port import Delete, Discovery, Put
from kvolt.runtime.events.port import MAX_PAYLOAD_BYTES, Event
from kvolt.runtime.events.subscriber_queue import (
    EventCounters,
    Subscriptions,
)
from kvolt.runtime.network import is_wildcard

log = logging.getLogger(__name__)

MESSAGE_VERSION = 1

_SEQUENCE = Packing("<Q")
_SEPARATOR = b"\0"
_MESSAGES_PER_TURN = 256
_MAX_SUBSCRIPTION_BYTES = 4096
"""Limit of messages to a publisher; a subscriber that sends a larger one is disconnected."""
_HEARTBEAT_MS = 5_000
_HEARTBEAT_TIMEOUT_MS = 15_000
_RECONNECT_MAX_MS = 5_000


class ZmqOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses and limits of an event plane."""

    namespace: str
    host: str = "127.0.0.1"
    advertise_host: str | None = None
    """Address that other processes connect to; required if `host` is a wildcard. Default: `host`."""
    lease_ttl_s: float = 10.0
    high_water_messages: int = 4_096
    """Limit of queued messages per connection on each side. Beyond it the newest are dropped: a gap."""


def encode(topic: str, publisher: str, sequence: int, payload: bytes) -> list[bytes]:
    return [topic.encode() + _SEPARATOR, publisher.encode(), _SEQUENCE.pack(sequence), payload]


def decode(parts: Sequence[bytes]) -> Event | None:
    """Decode a message; None if it is malformed."""
    if len(parts) != 4:
        return None
    topic, publisher, sequence, payload = parts
    if topic.find(_SEPARATOR) != len(topic) - 1 or len(topic) < 2 or len(sequence) != _SEQUENCE.size:
        return None
    (number,) = _SEQUENCE.unpack(sequence)
    if number == 0:
        return None
    try:
        return Event(topic[:-1].decode(), publisher.decode(), number, payload)
    except UnicodeDecodeError:
        return None


class Sender:
    """The PUB socket. A slow subscriber loses events; it never delays the publisher or other subscribers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], options: ZmqOptions) -> None:
        self._socket = context.socket(zmq.PUB)
        try:
            self._set_common_options(options)
            self.address = _bind(self._socket, options)
        except BaseException:
            self._socket.close(linger=0)
            raise
        # An idle PUB socket processes new and lost subscribers only when it is called.
        self._descriptor = self._socket.fileno()
        asyncio.get_running_loop().add_reader(self._descriptor, self._socket.getsockopt, zmq.EVENTS)

    def _set_common_options(self, options: ZmqOptions) -> None:
        _set_common_options(self._socket)
        self._socket.setsockopt(zmq.SNDHWM, options.high_water_messages)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_SUBSCRIPTION_BYTES)
        self._socket.setsockopt(zmq.IPV6, int(":" in options.host))

    def send(self, parts: list[bytes]) -> bool:
        """Send a message; False if it was dropped."""
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self._socket.close(linger=0)


class Receiver:
    """The SUB socket of all subscriptions of a plane, connected to every registered publisher."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        options: ZmqOptions,
        subscriptions: Subscriptions,
        counters: EventCounters,
    ) -> None:
        self._subscriptions = subscriptions
        self._counters = counters
        self._prefix = publishers_prefix(options.namespace)
        self._high_water_messages = options.high_water_messages
        self._addresses: dict[str, str] = {}
        self._skipped: dict[str, None] = {}
        self._loop = asyncio.get_running_loop()
        self._next_drain: asyncio.Handle | None = None
        self._socket = context.socket(zmq.SUB)
        _set_common_options(self._socket)
        self._socket.setsockopt(zmq.RCVHWM, self._high_water_messages)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self._drain)

    def subscribe_topic(self, topic: str) -> None:
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode() + _SEPARATOR)
        self._drain_soon()

    def unsubscribe_topic(self, topic: str) -> None:
        self._socket.setsockopt(zmq.UNSUBSCRIBE, topic.encode() + _SEPARATOR)
        self._drain_soon()

    async def follow_publishers(self, discovery: Discovery) -> None:
        """Connect to publishers that register and disconnect from those that leave.

        Ends when discovery is closed; existing connections stay.
        """
        async for change in discovery.watch_prefix(self._prefix):
            try:
                if isinstance(change, Put):
                    self._on_registered(change.key, change.value)
                elif isinstance(change, Delete):
                    self._remove_publisher(change.key)
            except Exception:  # one publisher's fault must not affect the others
                log.exception("event publisher not followed: change=%.200r", change)
                self._counters.rejected("registration", 1)

    def close(self) -> None:
        if self._next_drain is not None:
            self._next_drain.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)

    def _on_registered(self, key: str, value: bytes) -> None:
        publisher = key.removeprefix(self._prefix)
        try:
            registration = msgspec.msgpack.decode(value, type=PublisherRegistration)
        except MALFORMED as error:
            self._skip(key, "registration", f"malformed registration: {error}")
            return
        if registration.version != MESSAGE_VERSION:
            self._skip(key, "version", f"message version {registration.version}, expected {MESSAGE_VERSION}")
            return
        if self._addresses.get(publisher) == registration.address:
            return
        if not self._connect(registration.address):
            self._skip(key, "address", f"invalid address: {registration.address!r}")
            return
        self._remove_publisher(key)
        self._addresses[publisher] = registration.address

    def _connect(self, address: str) -> bool:
        if not address.startswith("tcp://"):
            return False
        try:
            self._socket.connect(address)
        except zmq.ZMQError:
            return False
        self._drain_soon()
        return True

    def _skip(self, key: str, label: str, reason: str) -> None:
        """Ignore a publisher until it leaves or registers correctly; logged once."""
        if key in self._skipped:
            return
        self._remove_publisher(key)
        self._skipped[key] = None
        self._counters.rejected(label, 1)
        log.warning("event publisher ignored: key=%s reason=%s", key, reason)

    def _remove_publisher(self, key: str) -> None:
        self._skipped.pop(key, None)
        publisher = key.removeprefix(self._prefix)
        address = self._addresses.get(publisher)
        if address is None:
            return
        # Disconnecting discards messages that were received and not read.
        self._read(self._high_water_messages)
        del self._addresses[publisher]
        # A restarted publisher may have its predecessor's port, and zmq keeps one connection per address.
        if address not in self._addresses.values():
            self._socket.disconnect(address)
        self._drain_soon()

    def _drain_soon(self) -> None:
        if self._next_drain is None:
            self._next_drain = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._next_drain is not None:
            self._next_drain.cancel()
            self._next_drain = None
        if not self._read(_MESSAGES_PER_TURN):
            self._drain_soon()

    def _read(self, max_messages: int) -> bool:
        """Read messages; True if none is left."""
        for _ in range(max_messages):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._accept(parts)
        return False

    def _accept(self, parts: Sequence[bytes]) -> None:
        event = decode(parts)
        if event is None:
            self._counters.rejected("malformed", 1)
        elif event.publisher not in self._addresses:
            # Another namespace, or an ignored version, on a port that one of our publishers had before.
            self._counters.rejected("unregistered", 1)
        else:
            self._subscriptions.deliver(event)


def _set_common_options(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    # A host that vanishes sends no reset: without heartbeats the connection would stay open.
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


def _bind(socket: zmq.Socket[bytes], options: ZmqOptions) -> str:
    """Bind to a free port; returns the advertised address."""
    if is_wildcard(options.host) and options.advertise_host is None:
        raise ConfigError(
            f"{options.host} is not an address that other processes can connect to",
            key="advertise_host",
            remedy="set this machine's address",
        )
    try:
        socket.bind(f"tcp://{_bracketed(options.host)}:*")
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot bind events to {options.host}: {error}",
            key="host",
            remedy="use an address of this machine",
        ) from error
    port = socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2]
    return f"tcp://{_bracketed(options.advertise_host or options.host)}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
