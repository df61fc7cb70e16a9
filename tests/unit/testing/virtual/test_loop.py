"""Virtual time: jumps, order, and every way in which a run may refuse to end well."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncIterator

import pytest

from kvolt.core.errors import DeadlineExceeded
from kvolt.runtime.tasks import Scope
from kvolt.testing.virtual.loop import (
    EPOCH_S,
    Deadlock,
    InlineBlocking,
    Leak,
    Runaway,
    Unhandled,
    VirtualClock,
    VirtualLoop,
    run_virtual,
)


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def test_time_starts_at_zero_and_jumps_to_each_timer_exactly() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        seen = [loop.time()]
        for when in (0.1, 0.30000000000000004, 7200.0):
            future = loop.create_future()
            loop.call_at(when, future.set_result, None)
            await future
            seen.append(loop.time())
        return seen

    assert run_virtual(main) == [0.0, 0.1, 0.30000000000000004, 7200.0]


def test_equal_timers_run_in_the_order_in_which_they_were_set() -> None:
    # 500 timers at three times, so that the heap has to move equal ones past each other.
    rng = random.Random(7)
    times = [rng.choice((1.0, 2.0, 3.0)) for _ in range(500)]

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        ran: list[int] = []
        for number, when in enumerate(times):
            loop.call_at(when, ran.append, number)
        await asyncio.sleep(4)
        return ran

    assert run_virtual(main) == sorted(range(500), key=lambda number: times[number])


def test_a_timer_in_the_past_runs_now_and_time_does_not_go_back() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(5)
        future = loop.create_future()
        loop.call_at(1.0, future.set_result, None)
        await future
        return loop.time()

    assert run_virtual(main) == 5.0


def test_a_nan_timer_is_refused() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="NaN"):
            asyncio.get_running_loop().call_at(float("nan"), print)

    run_virtual(main)


def test_cancelled_timers_are_swept_and_never_run() -> None:
    async def main() -> tuple[list[int], int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        ran: list[int] = []
        timers = [loop.call_at(1.0 + number, ran.append, number) for number in range(1000)]
        for timer in timers[:990]:
            timer.cancel()
            timer.cancel()
        kept = len(loop._timers)
        await asyncio.sleep(2000)
        return ran, kept

    ran, kept = run_virtual(main)
    assert ran == list(range(990, 1000))
    assert kept < 300


def test_sweeping_cancelled_timers_keeps_the_order_of_the_rest() -> None:
    rng = random.Random(3)
    times = [rng.uniform(1, 100) for _ in range(2000)]

    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        ran: list[float] = []
        timers = [loop.call_at(when, ran.append, when) for when in times]
        for timer in timers[:1900]:
            timer.cancel()
        await asyncio.sleep(200)
        return ran

    assert run_virtual(main) == sorted(times[1900:])


def test_deadlock_names_the_waiting_tasks_in_creation_order() -> None:
    async def main() -> None:
        async with Scope("demo") as scope:
            for name in ("zeta", "alpha", "mid"):
                scope.start(forever(), name)

    with pytest.raises(Deadlock, match="forever line") as caught:
        run_virtual(main)
    assert caught.value.tasks == ["main", "demo/zeta", "demo/alpha", "demo/mid"]


def test_many_short_tasks_do_not_hide_the_ones_that_wait() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        waiting = [loop.create_task(forever(), name=f"waits-{number}") for number in range(200)]
        for _ in range(1000):
            await loop.create_task(asyncio.sleep(0))
        await waiting[0]

    with pytest.raises(Deadlock) as caught:
        run_virtual(main)
    assert caught.value.tasks == ["main", *(f"waits-{number}" for number in range(200))]


def test_default_task_names_do_not_depend_on_earlier_runs() -> None:
    async def main() -> list[str]:
        tasks = [asyncio.get_running_loop().create_task(asyncio.sleep(0)) for _ in range(2)]
        await asyncio.gather(*tasks)
        return [task.get_name() for task in tasks]

    assert run_virtual(main) == run_virtual(main) == ["task-2", "task-3"]


def test_virtual_time_is_capped() -> None:
    with pytest.raises(Runaway, match="cap of 10 s"):
        run_virtual(lambda: asyncio.sleep(11), until_s=10)
    run_virtual(lambda: asyncio.sleep(10), until_s=10)


def test_a_spinning_task_is_stopped() -> None:
    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(0)

    with pytest.raises(Runaway, match="at 0 s; tasks: main"):
        run_virtual(main, max_iterations=1000)


def test_a_task_left_behind_is_a_leak() -> None:
    async def main() -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(forever(), name="orphan")
        await asyncio.sleep(0)
        return task

    with pytest.raises(Leak) as caught:
        run_virtual(main)
    assert len(caught.value.left) == 1
    assert caught.value.left[0].startswith("task orphan: forever line")


def test_an_armed_timer_is_a_leak_and_a_cancelled_one_is_not() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(5, print)
        loop.call_later(6, print).cancel()

    with pytest.raises(Leak) as caught:
        run_virtual(main)
    assert caught.value.left == ["timer at 5 s: print"]


def test_an_open_async_generator_is_a_leak_and_a_closed_one_is_not() -> None:
    async def count() -> AsyncIterator[int]:
        yield 1
        yield 2

    kept: list[AsyncIterator[int]] = []

    async def main(closed: bool) -> None:
        numbers = count()
        kept.append(numbers)
        assert await anext(numbers) == 1
        if closed:
            assert [number async for number in numbers] == [2]

    with pytest.raises(Leak, match=r"async generator .*count"):
        run_virtual(lambda: main(closed=False))
    run_virtual(lambda: main(closed=True))


def test_what_is_ready_at_the_end_still_runs() -> None:
    ran: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, ran.append, "soon")
        loop.create_task(forever()).cancel()

    run_virtual(main)
    assert ran == ["soon"]


def test_an_error_in_a_callback_fails_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)

    with pytest.raises(Unhandled, match="ZeroDivisionError"):
        run_virtual(main)


def test_an_error_of_main_is_raised_and_the_rest_is_cleaned_up_oldest_first() -> None:
    ended: list[str] = []

    async def linger(name: str) -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(1)
            ended.append(name)

    async def main() -> None:
        tasks = [asyncio.get_running_loop().create_task(linger(name)) for name in ("first", "second")]
        await asyncio.sleep(0)
        raise KeyError(len(tasks))

    with pytest.raises(KeyError):
        run_virtual(main)
    assert ended == ["first", "second"]


def test_threads_and_sockets_are_refused() -> None:
    errors: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def intrude() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="Blocking port"):
            await asyncio.to_thread(print)
        with pytest.raises(RuntimeError, match="Network port"):
            await asyncio.open_connection("127.0.0.1", 1)
        with pytest.raises(RuntimeError, match="Network port"):
            await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        future = loop.create_future()
        loop.call_soon_threadsafe(future.set_result, None)
        await future

    run_virtual(main)
    assert len(errors) == 1
    assert "another thread" in errors[0]


def test_clock_and_blocking_ports() -> None:
    async def main() -> None:
        clock = VirtualClock()
        await asyncio.sleep(2.5)
        assert (clock.monotonic(), clock.wall()) == (2.5, EPOCH_S + 2.5)
        assert await InlineBlocking(latency_s=1).run(lambda: "done", timeout_s=1) == "done"
        assert clock.monotonic() == 3.5
        with pytest.raises(DeadlineExceeded):
            await InlineBlocking(latency_s=9).run(lambda: "never", timeout_s=2)
        assert clock.monotonic() == 5.5

    run_virtual(main)
