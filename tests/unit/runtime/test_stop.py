from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator

import pytest
from tests.waits import MUST_HAPPEN_S

from kvolt.runtime.stop import StopSignal, graceful_stop


class Hard(list[int]):
    """Remembers the exit codes instead of exiting."""

    def __call__(self, code: int) -> None:
        self.append(code)


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(MUST_HAPPEN_S):
        while not condition():
            await asyncio.sleep(0.002)


async def tick() -> None:
    """Let the loop see the signals sent so far: a last one arrives after them, over the same self-pipe."""
    seen = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, seen.set)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(seen.wait(), MUST_HAPPEN_S)
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)


async def test_a_stop_without_signals() -> None:
    stop = StopSignal()
    assert not stop.requested
    stop.request_stop("lease lost")
    stop.request_stop("something else")
    assert stop.requested
    assert await asyncio.wait_for(stop.wait(), MUST_HAPPEN_S) == "lease lost"


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
async def test_first_signal_asks_and_second_ends(number: signal.Signals, code: int) -> None:
    hard = Hard()
    stop = StopSignal(hard)
    stop.install()
    try:
        os.kill(os.getpid(), number)
        assert await asyncio.wait_for(stop.wait(), MUST_HAPPEN_S) == number.name
        assert hard == []
        os.kill(os.getpid(), number)
        await until(lambda: bool(hard))
        assert hard == [code]
    finally:
        stop.restore()


@pytest.mark.usefixtures("handlers")
async def test_one_signal_after_a_stop_in_code_is_still_polite() -> None:
    hard = Hard()
    stop = StopSignal(hard)
    stop.install()
    try:
        stop.request_stop("own decision")
        os.kill(os.getpid(), signal.SIGTERM)
        await tick()
        assert hard == []
        assert stop.reason == "own decision"
    finally:
        stop.restore()
        stop.restore()  # harmless twice


class Steps:
    """Records the order; each step can be made to fail or to hang."""

    def __init__(self, fail: str = "", hang: str = "") -> None:
        self.order: list[str] = []
        self._fail = fail
        self._hang = hang

    async def _step(self, name: str) -> None:
        self.order.append(name)
        if name == self._hang:
            await asyncio.sleep(60)
        if name == self._fail:
            raise TimeoutError(name)

    async def run(self, drain_timeout_s: float = 5.0) -> bool:
        return await graceful_stop(
            lambda: self._step("accept"),
            lambda: self._step("drain"),
            lambda: self._step("cancel"),
            drain_timeout_s,
        )


async def test_three_steps_in_order_each_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps()
    with caplog.at_level(logging.DEBUG):
        assert await steps.run()
    assert steps.order == ["accept", "drain", "cancel"]
    assert len(caplog.records) == 3


async def test_the_drain_ends_at_its_deadline() -> None:
    steps = Steps(hang="drain")
    assert not await steps.run(drain_timeout_s=0.01)
    assert steps.order == ["accept", "drain", "cancel"]


@pytest.mark.parametrize("step", ["accept", "drain"])
async def test_a_failing_step_does_not_skip_the_later_ones(step: str) -> None:
    steps = Steps(fail=step)
    with pytest.raises(TimeoutError, match=step):
        await steps.run()
    assert steps.order == ["accept", "drain", "cancel"]


async def test_cancelling_the_drain_still_cancels_what_runs() -> None:
    steps = Steps(hang="drain")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(steps.run(), 0.02)
    assert steps.order == ["accept", "drain", "cancel"]
