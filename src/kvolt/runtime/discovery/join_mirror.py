"""What one watched prefix of a join server is known to hold, and those who watch it.

Owns the rule for coming back: what was known and is not there is gone only after a grace, time enough
for its owner to put it back. Must not know how to reach the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from kvolt.runtime.discovery.join_server import WatchDelete, WatchItem, WatchPut
from kvolt.runtime.discovery.port import WatchEvent
from kvolt.runtime.discovery.watch import Watches


class Mirror:
    """Stands still while nobody feeds it. Has watches of its own: another prefix's mirror may be behind."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._content: dict[str, bytes] = {}
        self._unconfirmed: dict[str, None] = {}
        """Known before the present stream, and not yet seen in it."""
        self._synced = False
        self._watches = Watches()

    @property
    def is_watched(self) -> bool:
        return self._watches.any_open

    def watch(self) -> AsyncIterator[WatchEvent]:
        queue = self._watches.open(self.prefix)
        if self._synced:
            queue.begin(dict(sorted(self._content.items())))
        return queue

    def close(self) -> None:
        self._watches.close()

    async def follow(
        self, stream: AsyncIterator[WatchItem], grace_s: float, on_synced: Callable[[], None]
    ) -> None:
        """Follow one watch stream, which has begun, to its end."""
        self._unconfirmed = dict.fromkeys(self._content)
        grace: asyncio.TimerHandle | None = None
        try:
            async for item in stream:
                if isinstance(item, WatchPut):
                    self._set(item.key, item.value)
                elif isinstance(item, WatchDelete):
                    self._set(item.key, None)
                elif grace is None:
                    on_synced()
                    self._begin()
                    grace = asyncio.get_running_loop().call_later(grace_s, self._forget_unconfirmed)
        finally:
            if grace is not None:
                grace.cancel()

    def _begin(self) -> None:
        self._synced = True
        for queue in self._watches.waiting():
            queue.begin(dict(sorted(self._content.items())))

    def _forget_unconfirmed(self) -> None:
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
