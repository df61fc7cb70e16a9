"""Progress thread: ends on close, wakes in time, and does not confuse reused descriptors."""

from __future__ import annotations

import os
import threading
from functools import partial
from selectors import EVENT_READ

import pytest

from kvolt.core.errors import InvalidRequest
from kvolt.runtime.clock import SystemClock
from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.memory.slabs import Slab
from kvolt.transfer.reads import progress as progress_module
from kvolt.transfer.reads.progress import ProgressThread

SOON_S = 20.0


def test_a_thread_whose_last_call_fails_has_ended() -> None:
    progress = ProgressThread("test", SystemClock())
    progress.start()

    def broken() -> None:
        raise RuntimeError("a defect")

    progress.close(broken)
    assert not progress._thread.is_alive()
    assert not progress.call_soon(lambda: None)


def test_a_time_that_is_far_away_is_waited_for_in_parts() -> None:
    """The kernel takes no longer wait."""
    progress = ProgressThread("test", SystemClock())
    progress.call_at(progress.now() + 1e9, lambda: None)
    assert progress._wait_s() == progress_module._MAX_WAIT_S
    progress.start()
    progress.close(lambda: None)
    assert not progress._thread.is_alive()


def test_timers_that_were_cancelled_do_not_pile_up() -> None:
    progress = ProgressThread("test", SystemClock())
    kept = progress.call_at(progress.now() + 1000, lambda: None)
    for _ in range(10_000):
        progress.call_at(progress.now() + 1e6, lambda: None).cancel()
    assert len(progress._timers) <= progress_module._MIN_COMPACT_TIMERS
    assert kept in progress._timers
    progress.start()
    progress.close(lambda: None)


def test_who_has_the_descriptor_of_one_that_has_gone_is_not_taken_for_it() -> None:
    """Both were ready at once; the first to be told closed the other, and its number went to a third."""
    progress = ProgressThread("test", SystemClock())
    pipes = [os.pipe() for _ in range(3)]
    (one, _), (two, _), (third, ring) = pipes
    told: list[str] = []
    is_rung, is_settled = threading.Event(), threading.Event()

    def on_ready(mine: int, other: int, events: int) -> None:
        told.append("first" if not told else "remove_session")
        progress.unwatch(mine)
        progress.unwatch(other)
        os.dup2(third, other)
        progress.watch(other, EVENT_READ, lambda events: (progress.unwatch(other), is_rung.set())[1])  # type: ignore[func-returns-value]
        progress.call_soon(is_settled.set)

    for mine, other, start in ((one, two, pipes[0][1]), (two, one, pipes[1][1])):
        os.write(start, b"x")
        progress.watch(mine, EVENT_READ, partial(on_ready, mine, other))
    progress.start()
    assert is_settled.wait(SOON_S)
    os.write(ring, b"x")
    assert is_rung.wait(SOON_S)
    assert told == ["first"]
    progress.close(lambda: None)
    for pair in pipes:
        for descriptor in pair:
            os.close(descriptor)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), float("-inf"), 1e9])
def test_a_timeout_is_a_number_of_seconds(timeout_s: float) -> None:
    agent, slab = TransferAgent(), Slab.shared(4, 4096)
    try:
        offer = agent.offer(slab, [1], SOON_S)
        for call in (
            lambda: agent.offer(slab, [1], timeout_s),
            lambda: agent.read(offer.ticket, slab, [3], timeout_s),
        ):
            with pytest.raises(InvalidRequest, match="timeout"):
                call()
        assert agent.read(offer.ticket, slab, [3], SOON_S).result(SOON_S) == "copy"
    finally:
        agent.close()


def test_blocks_at_a_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvolt.transfer.agent.MAX_BLOCKS", 3)
    agent, slab = TransferAgent(), Slab.shared(4, 4096)
    try:
        with pytest.raises(InvalidRequest, match="split it"):
            agent.offer(slab, range(4), SOON_S)
    finally:
        agent.close()
