"""Observer of a discovery watch: collects its events and waits for a state. Must not know any implementation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvolt.runtime.discovery.port import Delete, Discovery, Put, Synced, WatchEvent
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.cases import SOON_S, expect


class Observer:
    """Reads one watch to its end and keeps its events."""

    def __init__(self) -> None:
        self.events: list[WatchEvent] = []
        self.content: dict[str, bytes] = {}
        self.ended = False
        self._news = asyncio.Event()

    async def read(self, watch: AsyncIterator[WatchEvent]) -> None:
        async for event in watch:
            self.events.append(event)
            if isinstance(event, Put):
                self.content[event.key] = event.value
            elif isinstance(event, Delete):
                expect(self.content.pop(event.key, None) is not None, f"Delete of unreported {event.key!r}")
            self._news.set()
        self.ended = True
        self._news.set()

    @property
    def synced(self) -> bool:
        return Synced() in self.events

    @property
    def deletes(self) -> list[str]:
        return [event.key for event in self.events if isinstance(event, Delete)]

    def values(self, key: str) -> list[bytes]:
        return [event.value for event in self.events if isinstance(event, Put) and event.key == key]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            async with asyncio.timeout(SOON_S):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"not seen in {SOON_S:g} s: {what}; events: {self.events[-20:]}") from None

    async def until_synced(self) -> None:
        await self.until(lambda: self.synced, "Synced")

    async def until_content(self, content: dict[str, bytes]) -> None:
        await self.until(lambda: self.synced and self.content == content, f"content {content!r:.500}")


@asynccontextmanager
async def observing(client: Discovery, *prefixes: str) -> AsyncIterator[list[Observer]]:
    """One synced observer per prefix."""
    failures: list[BaseException] = []
    task_group = TaskGroup("observers", failures.append)
    observers = [Observer() for _ in prefixes]
    try:
        for observer, prefix in zip(observers, prefixes, strict=True):
            task_group.start(observer.read(client.watch_prefix(prefix)), f"watch {prefix}")
        for observer in observers:
            await observer.until_synced()
        yield observers
    finally:
        await task_group.close()
    if failures:
        raise failures[0]
