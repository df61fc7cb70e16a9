"""A deadline that moves: it fires once, at the latest setting."""

from __future__ import annotations

import asyncio

from kvolt.runtime.lazy_timer import LazyTimer
from kvolt.testing.virtual.loop import run_virtual


def test_it_fires_once_at_the_latest_deadline() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        fired: list[float] = []
        timer = LazyTimer(loop, lambda: fired.append(round(loop.time() - began, 6)))
        timer.arm(10)
        await asyncio.sleep(5)
        timer.arm(10)
        await asyncio.sleep(30)
        assert fired == [15]
        timer.arm(10)
        timer.arm(1)
        await asyncio.sleep(30)
        assert fired == [15, 36]
        timer.arm(1)
        timer.disarm()
        await asyncio.sleep(30)
        timer.arm(1)
        timer.cancel()
        await asyncio.sleep(30)
        assert fired == [15, 36]

    run_virtual(scenario)


def test_after_a_stall_there_is_a_moment_to_move_it() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        fired: list[float] = []
        timer = LazyTimer(loop, lambda: fired.append(loop.time()))
        timer.arm(10)
        loop._now = 50.0  # type: ignore[attr-defined]
        await asyncio.sleep(0.5)
        assert fired == []
        timer.arm(10)
        await asyncio.sleep(30)
        assert fired == [60.5]
        timer.arm(10)
        loop._now += 50.0  # type: ignore[attr-defined]
        await asyncio.sleep(30)
        assert fired == [60.5, 131.5], "once, not for ever"

    run_virtual(scenario)
