"""Watch queues: pending events of the readers of a prefix.

Owns coalescing: a queue keeps the latest state per key, so its memory is bounded by the number of keys and not by
the reader's speed. Must not depend on the source of changes.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Self

from kvolt.runtime.discovery.port import Delete, Put, Synced, WatchEvent

Change = tuple[str, bytes | None]
"""A key and its new value; None when it was deleted."""


class WatchQueue:
    """One watch: an async iterator that ends when it is closed.

    Cancelling a wait for the next event loses nothing: an event leaves the queue only when it is returned.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._initial: OrderedDict[str, bytes] | None = None
        self._changes: OrderedDict[str, bytes | None] = OrderedDict()
        self._reported: dict[str, bytes] = {}
        self._synced = False
        self._closed = False
        self._wakeup = asyncio.Event()

    @property
    def has_started(self) -> bool:
        return self._initial is not None

    def set_initial(self, content: Mapping[str, bytes]) -> None:
        """Set the initial content, in key order; keys outside the prefix are ignored."""
        self._initial = OrderedDict(
            (key, value) for key, value in content.items() if key.startswith(self.prefix)
        )
        self._wakeup.set()

    def push_change(self, key: str, value: bytes | None) -> None:
        if self._initial is None or not key.startswith(self.prefix):
            return
        if key in self._initial:
            # Not read yet: it must be reported before Synced, with its newest value.
            if value is None:
                del self._initial[key]
            else:
                self._initial[key] = value
            return
        self._changes.pop(key, None)
        if self._reported.get(key) != value:
            self._changes[key] = value
            self._wakeup.set()

    def close(self) -> None:
        self._closed = True
        self._wakeup.set()

    async def aclose(self) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> WatchEvent:
        while not self._closed:
            event = self._next()
            if event is not None:
                return event
            self._wakeup.clear()
            await self._wakeup.wait()
        raise StopAsyncIteration

    def _next(self) -> WatchEvent | None:
        if self._initial is None:
            return None
        if self._initial:
            key, first = self._initial.popitem(last=False)
            self._reported[key] = first
            return Put(key, first)
        if not self._synced:
            self._synced = True
            return Synced()
        if not self._changes:
            return None
        key, value = self._changes.popitem(last=False)
        if value is None:
            del self._reported[key]
            return Delete(key)
        self._reported[key] = value
        return Put(key, value)

    @property
    def closed(self) -> bool:
        return self._closed


class Watches:
    """Open watches of one client, in opening order.

    Held weakly: a reader may leave its `async for` without closing the watch.
    """

    def __init__(self) -> None:
        self._queues: list[weakref.ref[WatchQueue]] = []
        self._closed = False

    def open(self, prefix: str) -> WatchQueue:
        queue = WatchQueue(prefix)
        if self._closed:
            queue.close()
        else:
            self._queues.append(weakref.ref(queue))
        return queue

    @property
    def has_open(self) -> bool:
        return bool(self._live())

    def not_started(self) -> list[WatchQueue]:
        """Watches without initial content."""
        return [queue for queue in self._live() if not queue.has_started]

    def publish(self, changes: Iterable[Change]) -> None:
        queues = self._live()
        for key, value in changes:
            for queue in queues:
                queue.push_change(key, value)

    def close(self) -> None:
        self._closed = True
        for queue in self._live():
            queue.close()
        self._queues.clear()

    def _live(self) -> list[WatchQueue]:
        queues = [queue for reference in self._queues if (queue := reference()) and not queue.closed]
        if len(queues) != len(self._queues):
            self._queues = [weakref.ref(queue) for queue in queues]
        return queues
