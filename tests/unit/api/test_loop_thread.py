"""LoopThread: calls that meet its end, and interrupted calls."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from tests.waits import MUST_HAPPEN_S

from kvolt.api.loop_thread import LoopThread
from kvolt.core.errors import Cancelled, Unavailable


async def nothing() -> None:
    pass


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    opened = LoopThread("test")
    yield opened
    if not opened._is_closed:
        opened.close(nothing())


def test_a_call_during_the_close_does_not_wait_for_ever(
    loop: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has seen an open loop when another thread closes it."""
    closer = threading.Thread(target=lambda: loop.close(nothing()))
    is_alive = loop._thread.is_alive

    def check_then_close() -> bool:
        alive = is_alive()
        if not closer.ident:
            closer.start()
            closer.join(MUST_HAPPEN_S)
        return alive

    monkeypatch.setattr(loop._thread, "is_alive", check_then_close)
    with pytest.raises(Unavailable, match="test is closed"):
        loop.run(nothing())


def test_many_calls_end_when_it_is_closed(loop: LoopThread) -> None:
    ends: list[type[BaseException]] = []

    def call() -> None:
        try:
            while True:
                loop.run(asyncio.sleep(0.001))
        except Exception as error:
            ends.append(type(error))

    threads = [threading.Thread(target=call, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    loop.close(asyncio.sleep(0.01))
    for thread in threads:
        thread.join(MUST_HAPPEN_S)
    assert len(ends) == 8
    assert set(ends) <= {Cancelled, Unavailable}


def test_an_interrupted_call_that_has_not_begun_returns_at_once(loop: LoopThread) -> None:
    """The loop is busy when the call and then Ctrl-C arrive; it has nothing to clean up."""
    loop._loop.call_soon_threadsafe(time.sleep, 0.5)
    main = threading.main_thread()
    assert main.ident is not None
    timer = threading.Timer(0.1, signal.pthread_kill, [main.ident, signal.SIGINT])
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loop.run(nothing())
    assert time.monotonic() - started < 10
    loop.run(nothing())


def test_an_interrupted_call_cleans_up_before_it_returns(loop: LoopThread) -> None:
    steps: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(0.1)  # the caller waits: a signal just before is seen after the wait only
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.1)
            steps.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    assert steps == ["cleaned up"]
