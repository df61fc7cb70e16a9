"""A bell: who waits is woken once, by a ring or by the time."""

from __future__ import annotations

import asyncio

import pytest

from kvolt.engines.wakeup import Wakeup
from kvolt.testing import run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_ring_wakes_who_waits_and_lasts_until_silenced() -> None:
    async def scenario() -> None:
        bell = Wakeup()
        asyncio.get_running_loop().call_later(2.0, bell.set)
        assert await bell.wait()
        assert now() == 2.0
        assert await bell.wait(timeout_s=5.0)
        assert now() == 2.0, "it rang already"
        bell.clear()
        assert not await bell.wait(timeout_s=5.0)
        assert now() == 7.0

    run_virtual(scenario)


def test_it_may_be_set_twice_and_without_a_waiter() -> None:
    async def scenario() -> None:
        bell = Wakeup()
        bell.set()
        bell.set()
        assert await bell.wait(timeout_s=1.0)
        bell.clear()
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, bell.set)
        loop.call_later(1.0, bell.set)
        assert await bell.wait(timeout_s=1.5)
        assert now() == 1.0, "and no timer is left, which the loop would tell"

    run_virtual(scenario)


def test_who_is_cancelled_leaves_nothing() -> None:
    async def scenario() -> None:
        bell = Wakeup()
        waiting = asyncio.ensure_future(bell.wait(timeout_s=9.0))
        await asyncio.sleep(1.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        bell.set()
        assert await bell.wait()

    run_virtual(scenario)
