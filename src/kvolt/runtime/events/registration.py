"""Keeps event publishers registered in discovery: events/<namespace>/<publisher> = PublisherRegistration."""

from __future__ import annotations

import random
from contextlib import suppress

import msgspec

from kvolt.core.endpoints import PublisherRegistration
from kvolt.core.errors import DiscoveryLost
from kvolt.runtime.discovery.port import Discovery, LeaseId
from kvolt.runtime.endpoint.registration import RegisteredKey
from kvolt.runtime.tasks import TaskGroup


class RegisteredPublisher:
    """Keeps one publisher registered, under a lease of its own."""

    def __init__(self, discovery: Discovery, key: str, ttl_s: float, task_group: TaskGroup) -> None:
        self._discovery = discovery
        self._key = key
        self._ttl_s = ttl_s
        self._task_group = task_group
        self._lease: LeaseId | None = None

    async def publish(self, registration: PublisherRegistration) -> None:
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
