"""Registration of event publishers in discovery: events/<namespace>/<publisher> = {address, version, identity}."""

from __future__ import annotations

import random
from contextlib import suppress

import msgspec

from kvolt.core.errors import DiscoveryLost
from kvolt.runtime.discovery.port import Discovery, LeaseId
from kvolt.runtime.endpoint.registration import RegisteredKey
from kvolt.runtime.tasks import TaskGroup

EVENT_PUBLISHERS = "events/"
"""Prefix of the discovery keys of event publishers."""


class Registration(msgspec.Struct, frozen=True, omit_defaults=True):
    """Registration of a publisher. Fields of newer versions are ignored."""

    address: str
    version: int
    """Of the transport: `zmq_sockets.MESSAGE_VERSION` or `plane_events.VERSION`."""
    identity: str = ""
    """URI in the certificate of the process; empty without a cluster key."""


def registrations_prefix(namespace: str) -> str:
    return f"{EVENT_PUBLISHERS}{namespace}/"


def decode_registration(value: bytes) -> Registration | None:
    """None if it is malformed."""
    try:
        return _decode(value)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


_decode = msgspec.msgpack.Decoder(Registration).decode


class RegisteredPublisher:
    """Keeps one publisher registered, under a lease of its own."""

    def __init__(self, discovery: Discovery, key: str, ttl_s: float, task_group: TaskGroup) -> None:
        self._discovery = discovery
        self._key = key
        self._ttl_s = ttl_s
        self._task_group = task_group
        self._lease: LeaseId | None = None

    async def publish(self, registration: Registration) -> None:
        """Raises DiscoveryLost if discovery is unreachable at first; later it is tried again."""
        self._lease = await self._discovery.lease(self._ttl_s)
        registered = RegisteredKey(
            self._discovery,
            self._lease,
            self._key,
            self._task_group,
            random.Random(self._key),
            lambda missing: None,
        )
        await registered.publish(msgspec.msgpack.encode(registration))

    async def close(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            # If discovery is unreachable, the lease expires by itself.
            with suppress(DiscoveryLost):
                await self._discovery.revoke(lease)
