"""A thread's call and who waits for it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kvolt.kv.tiers.tier_thread import TierThread


async def test_who_is_cancelled_returns_when_the_call_has_ended() -> None:
    """What the call writes to is another's afterwards."""
    thread = TierThread("test")
    has_begun, has_ended = threading.Event(), threading.Event()

    def call() -> None:
        has_begun.set()
        time.sleep(0.3)
        has_ended.set()

    running = asyncio.ensure_future(thread.run(call))
    await asyncio.to_thread(has_begun.wait, 60)
    for _ in range(3):  # however often
        running.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert has_ended.is_set()
    await thread.close()


async def test_a_call_that_has_not_begun_never_does() -> None:
    thread = TierThread("test")
    gate, calls = threading.Event(), []
    first = asyncio.ensure_future(thread.run(gate.wait, 60))
    await asyncio.sleep(0.01)
    second = asyncio.ensure_future(thread.run(calls.append, 1))
    await asyncio.sleep(0.01)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    await first
    await thread.run(lambda: None)
    assert not calls
    await thread.close()


async def test_a_question_is_left_to_itself() -> None:
    thread = TierThread("test")
    gate = threading.Event()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await thread.ask(gate.wait, 60)
    gate.set()
    assert await thread.ask(lambda: 7) == 7
    await thread.close()
