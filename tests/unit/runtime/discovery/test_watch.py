"""Watch queues: coalescing, order, and readers that leave without a word."""

from __future__ import annotations

import asyncio
import gc

import pytest

from kvolt.runtime.discovery.port import Delete, Put, Synced, WatchEvent
from kvolt.runtime.discovery.watch import Watches, WatchQueue


async def drain(queue: WatchQueue) -> list[WatchEvent]:
    events: list[WatchEvent] = []
    while True:
        try:
            async with asyncio.timeout(0.01):
                events.append(await anext(queue))
        except TimeoutError:
            return events


async def test_nothing_is_reported_before_the_first_content() -> None:
    queue = WatchQueue("a/")
    queue.push_change("a/1", b"x")
    assert await drain(queue) == []
    queue.set_initial({"a/2": b"y", "b": b"z"})
    assert await drain(queue) == [Put("a/2", b"y"), Synced()]


async def test_a_change_before_synced_is_merged_into_the_first_content() -> None:
    queue = WatchQueue("")
    queue.set_initial({"a": b"1", "b": b"1", "c": b"1"})
    queue.push_change("a", b"2")
    queue.push_change("b", None)
    queue.push_change("d", b"1")
    assert await drain(queue) == [Put("a", b"2"), Put("c", b"1"), Synced(), Put("d", b"1")]


async def test_unread_changes_of_a_key_become_one() -> None:
    queue = WatchQueue("")
    queue.set_initial({"a": b"1"})
    await drain(queue)
    queue.push_change("a", b"2")
    queue.push_change("b", b"1")
    queue.push_change("a", b"3")
    queue.push_change("flash", b"1")
    queue.push_change("flash", None)
    assert await drain(queue) == [Put("b", b"1"), Put("a", b"3")]
    queue.push_change("a", None)
    queue.push_change("a", b"3")
    queue.push_change("b", None)
    assert await drain(queue) == [Delete("b")]


async def test_close_ends_a_waiting_reader() -> None:
    watches = Watches()
    queue = watches.open("")
    asyncio.get_running_loop().call_soon(watches.close)
    with pytest.raises(StopAsyncIteration):
        await anext(queue)
    with pytest.raises(StopAsyncIteration):
        await anext(watches.open("late"))


async def test_a_forgotten_watch_costs_nothing() -> None:
    watches = Watches()
    kept = watches.open("")
    watches.open("")
    stopped = watches.open("")
    await stopped.aclose()
    gc.collect()
    assert watches.not_started() == [kept]
