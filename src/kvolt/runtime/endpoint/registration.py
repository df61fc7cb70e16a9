"""A discovery key that this process keeps registered.

Owns the retries: a put that discovery does not answer, refuses (another live lease owns the key) or loses
later is repeated with back-off until it succeeds. Reports a refusal or a loss once, and its end once.
An unreachable store is not a loss: readers keep the last known state.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from kvolt.core.errors import DiscoveryLost, KeyConflict
from kvolt.runtime.discovery.port import Discovery, LeaseId
from kvolt.runtime.discovery.store_state import Backoff
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_RETRY_MAX_S = 2.0


class RegisteredKey:
    """One key. `on_state` gets the reason while the key is missing, and None when it is registered again."""

    def __init__(
        self,
        discovery: Discovery,
        lease: LeaseId,
        key: str,
        task_group: TaskGroup,
        rng: random.Random,
        on_state: Callable[[str | None], None],
    ) -> None:
        self._discovery = discovery
        self._lease = lease
        self._key = key
        self._task_group = task_group
        self._rng = rng
        self._on_state = on_state
        self._value: bytes | None = None
        self._missing: str | None = None
        self._retries: asyncio.Task[Any] | None = None

    async def publish(self, value: bytes) -> None:
        """Register this value. On failure, retry in the background."""
        self._value = value
        try:
            await self._put(value)
        except DiscoveryLost as error:
            log.warning("registration not written: key=%s reason=%s; retrying", self._key, error.message)
            self._retry()
        except KeyConflict as error:
            self._set_missing(error.message)
            self._retry()

    async def unregister(self) -> None:
        """Stop retrying and delete the key. After DiscoveryLost the key is deleted once the store is back."""
        self._value = None
        if self._retries is not None:
            self._retries.cancel()
        if self._missing is not None:
            self._missing = None
            self._on_state(None)
        await self._discovery.delete(self._key)

    async def _put(self, value: bytes) -> None:
        await self._discovery.put(self._key, value, self._lease, self._on_lost)
        if self._missing is not None:
            log.warning("registration restored: key=%s", self._key)
            self._missing = None
            self._on_state(None)

    def _on_lost(self) -> None:
        self._set_missing("another lease acquired the key after this process's lease had expired")
        self._retry()

    def _set_missing(self, reason: str) -> None:
        if self._value is not None and self._missing is None:
            log.warning("registration lost: key=%s reason=%s; registering again", self._key, reason)
            self._missing = reason
            self._on_state(reason)

    def _retry(self) -> None:
        if (self._retries is None or self._retries.done()) and not self._task_group.closed:
            self._retries = self._task_group.start(self._keep_trying(), f"register {self._key}")

    async def _keep_trying(self) -> None:
        backoff = Backoff(self._rng, _RETRY_MAX_S)
        while True:
            await backoff.pause()
            value = self._value
            if value is None:
                return
            try:
                await self._put(value)
            except DiscoveryLost:
                continue
            except KeyConflict as error:
                self._set_missing(error.message)
                continue
            if value is self._value:
                return
