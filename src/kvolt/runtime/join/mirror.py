"""Local mirror of one watched prefix of a join server, and its watches.

After a reconnect, known keys that are missing are deleted only after a grace period, so that their owners can restore
them. Must not depend on the connection to the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from kvolt.runtime.discovery.port import Delete, Put, WatchEvent
from kvolt.runtime.discovery.watch import Watches
from kvolt.runtime.join.server import WatchItem


class Mirror:
    """Keeps its state without a stream. Has its own watches: the mirror of another prefix may be behind."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._content: dict[str, bytes] = {}
        self._unconfirmed: dict[str, None] = {}
        """Keys known before the current stream and not yet seen in it."""
        self._synced = False
        self._watches = Watches()

    @property
    def is_watched(self) -> bool:
        return self._watches.has_open

    def watch(self) -> AsyncIterator[WatchEvent]:
        queue = self._watches.open(self.prefix)
        if self._synced:
            queue.set_initial(dict(sorted(self._content.items())))
        return queue

    def close(self) -> None:
        self._watches.close()

    async def apply_stream(
        self, stream: AsyncIterator[WatchItem], grace_s: float, on_synced: Callable[[], None]
    ) -> None:
        """Apply the events of one started watch stream until it ends."""
        self._unconfirmed = dict.fromkeys(self._content)
        grace: asyncio.TimerHandle | None = None
        try:
            async for item in stream:
                if isinstance(item, Put):
                    self._set(item.key, item.value)
                elif isinstance(item, Delete):
                    self._set(item.key, None)
                elif grace is None:
                    on_synced()
                    self._start_watches()
                    grace = asyncio.get_running_loop().call_later(grace_s, self._drop_unconfirmed)
        finally:
            if grace is not None:
                grace.cancel()

    def _start_watches(self) -> None:
        self._synced = True
        for queue in self._watches.not_started():
            queue.set_initial(dict(sorted(self._content.items())))

    def _drop_unconfirmed(self) -> None:
        for key in sorted(self._unconfirmed):
            self._set(key, None)

    def _set(self, key: str, value: bytes | None) -> None:
        self._unconfirmed.pop(key, None)
        if value is None:
            self._content.pop(key, None)
        else:
            self._content[key] = value
        if self._synced:
            self._watches.publish([(key, value)])
