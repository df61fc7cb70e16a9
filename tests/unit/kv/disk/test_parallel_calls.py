"""Reads of a disk go side by side, and none is under way any more when a call is back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from kvolt.kv.disk.parallel_calls import ParallelCalls

SOON_S = 20.0


@pytest.fixture
def calls() -> Iterator[ParallelCalls]:
    made = ParallelCalls()
    yield made
    made.close()


def test_they_go_side_by_side(calls: ParallelCalls) -> None:
    all_there = threading.Barrier(4)
    calls.run([lambda: (all_there.wait(SOON_S), None)[1]] * 4)  # one after the other would wait for ever


def test_one_alone_needs_no_thread(calls: ParallelCalls) -> None:
    ran_in: list[threading.Thread] = []
    calls.run([lambda: ran_in.append(threading.current_thread())])
    assert ran_in == [threading.current_thread()]
    calls.run([])


def test_an_error_is_raised_after_all_calls_have_ended(calls: ParallelCalls) -> None:
    has_failed, done = threading.Event(), []

    def fail() -> None:
        has_failed.set()
        raise OSError("a bad sector")

    def slow() -> None:
        assert has_failed.wait(SOON_S)
        done.append("its bytes have come")

    with pytest.raises(OSError, match="bad sector"):
        calls.run([fail, slow, slow])
    assert len(done) == 2


def test_a_failed_thread_start_is_raised_after_all_calls_have_ended(
    calls: ParallelCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, may_end = ThreadPoolExecutor.submit, threading.Event()
    begun: list[Callable[[], None]] = []
    done: list[str] = []

    def none_left(self: ThreadPoolExecutor, call: Callable[[], None]) -> Future[None]:
        if len(begun) == 2:
            may_end.set()
            raise RuntimeError("can't start new thread")
        begun.append(call)
        return submit(self, call)

    def slow() -> None:
        assert may_end.wait(SOON_S)
        done.append("its bytes have come")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", none_left)
    with pytest.raises(RuntimeError, match="new thread"):
        calls.run([slow] * 3)
    assert len(done) == 2
