"""ThreadBlocking: deadlines, cancellation, bounds, and a process that can always exit."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from kvolt.core.errors import DeadlineExceeded, Overloaded, Unavailable
from kvolt.runtime.clock import ThreadBlocking
from kvolt.runtime.tasks import TaskGroup

LONG_S = 20.0


@pytest.fixture
async def blocking() -> AsyncIterator[ThreadBlocking]:
    threads = ThreadBlocking(num_threads=2, queue_limit=3)
    yield threads
    threads.close()


@pytest.fixture
async def task_group() -> AsyncIterator[TaskGroup]:
    tasks = TaskGroup("test", on_error=lambda error: None)
    yield tasks
    await tasks.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():
            await asyncio.sleep(0.001)


class Hang:
    """A call that hangs until it is let go."""

    def __init__(self) -> None:
        self.num_started = 0
        self._gate = threading.Event()

    def __call__(self) -> None:
        self.num_started += 1
        self._gate.wait(LONG_S)

    def let_go(self) -> None:
        self._gate.set()


@pytest.fixture
def hang() -> Iterator[Hang]:
    call = Hang()
    yield call
    call.let_go()


async def test_results_and_errors_come_back(blocking: ThreadBlocking) -> None:
    main = threading.get_ident()
    assert await blocking.run(threading.get_ident, LONG_S) != main
    with pytest.raises(ZeroDivisionError):
        await blocking.run(lambda: 1 // 0, LONG_S)


class Large:
    """Something that a call has at hand."""


async def test_an_error_keeps_nothing_once_it_was_dealt_with(blocking: ThreadBlocking) -> None:
    """No collection is needed: a refused text of a megabyte is gone with its answer."""
    held: list[weakref.ref[Large]] = []

    def refuse() -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise ValueError("too large")

    gc.disable()
    try:
        for _ in range(3):
            with pytest.raises(ValueError, match="too large"):
                await blocking.run(refuse, timeout_s=5)
        await until(lambda: not any(each() for each in held))  # a thread lets go just after it has answered
    finally:
        gc.enable()


async def test_a_timeout_of_the_call_itself_is_not_the_deadline(blocking: ThreadBlocking) -> None:
    def times_out() -> None:
        raise TimeoutError(110, "Connection timed out")

    with pytest.raises(TimeoutError, match="Connection timed out"):
        await blocking.run(times_out, LONG_S)


async def test_a_call_that_hangs_is_given_up_and_the_others_go_on(
    blocking: ThreadBlocking, hang: Hang
) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        await blocking.run(hang, 0.01)
    assert caught.value.fields == {"stage": "blocking", "after_s": 0.01}
    assert await blocking.run(lambda: "works", LONG_S) == "works"


async def test_a_cancellation_that_meets_the_result_is_not_swallowed(
    blocking: ThreadBlocking, task_group: TaskGroup
) -> None:
    ran = threading.Event()
    task = task_group.start(blocking.run(ran.set, LONG_S), "call")
    await asyncio.sleep(0)
    assert ran.wait(LONG_S)
    time.sleep(0.02)  # the result is on its way to the loop, which stands still
    asyncio.get_running_loop().call_soon(task.cancel)
    await asyncio.wait([task], timeout=LONG_S)
    assert task.cancelled()


async def test_what_is_given_up_before_it_started_never_runs(
    blocking: ThreadBlocking, task_group: TaskGroup, hang: Hang
) -> None:
    ran: list[str] = []
    hung = [task_group.start(blocking.run(hang, LONG_S), "hung") for _ in range(2)]
    await until(lambda: hang.num_started == 2)
    with pytest.raises(DeadlineExceeded):
        await blocking.run(lambda: ran.append("late"), 0.01)
    hang.let_go()
    await asyncio.wait(hung)
    await blocking.run(lambda: ran.append("next"), LONG_S)
    assert ran == ["next"]


async def test_the_queue_is_bounded_and_forgets_what_was_given_up(
    blocking: ThreadBlocking, task_group: TaskGroup, hang: Hang
) -> None:
    for _ in range(2):
        task_group.start(blocking.run(hang, LONG_S), "hung")
    await until(lambda: hang.num_started == 2)
    for _ in range(4):
        with pytest.raises(DeadlineExceeded):
            await blocking.run(lambda: None, 0.001)
    waiting = [task_group.start(blocking.run(lambda: "late", LONG_S), "waiting") for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as caught:
        await blocking.run(lambda: None, LONG_S)
    assert caught.value.fields["limit"] == 3
    hang.let_go()
    await asyncio.wait(waiting)
    assert [task.result() for task in waiting] == ["late"] * 3


async def test_no_more_threads_than_needed() -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("few")]

    blocking = ThreadBlocking(num_threads=4, name="few")
    for _ in range(10):
        await blocking.run(lambda: None, LONG_S)
        await until(lambda: blocking.num_idle == len(threads()))
    assert len(threads()) == 1
    blocking.close()
    await until(lambda: not threads())


async def test_closing_ends_what_waits_and_refuses_what_comes(
    blocking: ThreadBlocking, task_group: TaskGroup, hang: Hang
) -> None:
    tasks = [task_group.start(blocking.run(hang, LONG_S), "call") for _ in range(3)]
    await until(lambda: hang.num_started == 2)
    blocking.close()
    hang.let_go()
    await asyncio.wait(tasks, timeout=LONG_S)
    assert [task.exception() is None for task in tasks[:2]] == [True, True]
    assert isinstance(tasks[2].exception(), Unavailable)
    with pytest.raises(Unavailable):
        await blocking.run(lambda: None, LONG_S)


async def test_a_dedicated_thread_is_held_up_by_its_own_calls_alone(
    blocking: ThreadBlocking, task_group: TaskGroup, hang: Hang
) -> None:
    dedicated = blocking.dedicated("own")
    abandoned = task_group.start(dedicated.run(hang, LONG_S), "call")
    await until(lambda: hang.num_started == 1)
    abandoned.cancel()
    order: list[str] = []
    following = task_group.start(dedicated.run(lambda: order.append("following"), LONG_S), "call")
    for _ in range(4):
        assert await blocking.run(lambda: "free", LONG_S) == "free"
    assert await blocking.dedicated("another").run(lambda: "free", LONG_S) == "free"
    order.append("release")
    hang.let_go()
    await following
    assert order == ["release", "following"]


async def test_dedicated_threads_close_with_their_port(blocking: ThreadBlocking) -> None:
    before = blocking.dedicated("before")
    blocking.close()
    for port in (before, blocking.dedicated("after")):
        with pytest.raises(Unavailable):
            await port.run(lambda: None, LONG_S)


HANGS = """
import asyncio, time
from kvolt.core.errors import DeadlineExceeded
from kvolt.runtime.clock import ThreadBlocking

async def main():
    try:
        await ThreadBlocking().run(lambda: time.sleep(3600), 0.05)
    except DeadlineExceeded:
        print("given up", flush=True)

asyncio.run(main())
"""


def test_a_call_that_hangs_does_not_keep_the_process_from_exiting() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=LONG_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "given up\n", "")
