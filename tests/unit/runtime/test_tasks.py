"""Scope and TaskGroup: who is cancelled when, in which order, and which error comes out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from kvolt.runtime.tasks import Scope, TaskGroup


class Diary:
    """Tasks that write down what happens to them."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def wait(self, name: str) -> None:
        """Until cancelled."""
        self.lines.append(f"{name} starts")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.lines.append(f"{name} cancelled")
            raise

    async def fail(self, name: str, num_ticks: int = 1) -> None:
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        self.lines.append(f"{name} fails")
        raise ValueError(name)

    async def work(self, name: str, num_ticks: int = 3) -> str:
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        self.lines.append(f"{name} done")
        return name


async def cancelled_outcome(
    work: Callable[[], Coroutine[Any, Any, Any]], num_ticks: int = 5
) -> asyncio.Task[Any]:
    """The task of `work`, cancelled from outside once it is under way, and over."""
    task_group = TaskGroup("outside", on_error=lambda error: None)
    task = task_group.start(work(), "inner")
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    task.cancel()
    await task_group.drain()
    return task


# --- Scope


async def test_scope_waits_for_all() -> None:
    diary = Diary()
    async with Scope("s") as scope:
        tasks = [scope.start(diary.work(name), name) for name in "abc"]
        assert diary.lines == []
    assert diary.lines == ["a done", "b done", "c done"]
    assert [task.result() for task in tasks] == ["a", "b", "c"]
    assert [task.get_name() for task in tasks] == ["s/a", "s/b", "s/c"]


async def test_empty_scope() -> None:
    async with Scope("s"):
        pass


async def test_scope_cancels_in_start_order() -> None:
    diary = Diary()
    names = [f"t{number:02}" for number in range(50)]
    async with Scope("s") as scope:
        for name in names:
            scope.start(diary.wait(name), name)
        await asyncio.sleep(0)
        scope.cancel()
    assert diary.lines == [f"{name} starts" for name in names] + [f"{name} cancelled" for name in names]


async def test_failure_while_the_body_waits() -> None:
    diary = Diary()
    reached = False
    with pytest.raises(ValueError, match="b"):
        async with Scope("s") as scope:
            scope.start(diary.wait("a"), "a")
            scope.start(diary.fail("b"), "b")
            scope.start(diary.wait("c"), "c")
            await asyncio.Event().wait()
            reached = True
    assert not reached
    assert diary.lines == ["a starts", "c starts", "b fails", "a cancelled", "c cancelled"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0, "the scope took back the cancellation that it sent"
    await asyncio.sleep(0)


async def test_failure_while_exiting() -> None:
    diary = Diary()
    with pytest.raises(ValueError, match="b"):
        async with Scope("s") as scope:
            scope.start(diary.wait("a"), "a")
            scope.start(diary.fail("b", 3), "b")
    assert diary.lines == ["a starts", "b fails", "a cancelled"]


async def test_first_failure_wins() -> None:
    diary = Diary()
    with pytest.raises(ValueError, match="first"):
        async with Scope("s") as scope:
            scope.start(diary.fail("first"), "1")
            scope.start(diary.fail("second"), "2")


async def test_failure_of_a_task_being_cancelled() -> None:
    """Clean-up that fails is not silently dropped when nothing else went wrong."""

    async def bad_cleanup() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("clean-up")

    with pytest.raises(ValueError, match="clean-up"):
        async with Scope("s") as scope:
            scope.start(bad_cleanup(), "x")
            await asyncio.sleep(0)
            scope.cancel()


async def test_exception_in_the_body() -> None:
    diary = Diary()
    with pytest.raises(KeyError):
        async with Scope("s") as scope:
            scope.start(diary.wait("a"), "a")
            scope.start(diary.wait("b"), "b")
            await asyncio.sleep(0)
            raise KeyError
    assert diary.lines == ["a starts", "b starts", "a cancelled", "b cancelled"]


async def test_exception_in_the_body_before_a_task_ran() -> None:
    diary = Diary()
    with pytest.raises(KeyError):
        async with Scope("s") as scope:
            scope.start(diary.wait("a"), "a")
            raise KeyError
    assert diary.lines == []


async def test_body_swallows_the_wake_up() -> None:
    """The failure still comes out at the exit."""
    with pytest.raises(ValueError, match="x"):
        async with Scope("s") as scope:
            scope.start(Diary().fail("x"), "x")
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_body_answers_the_failure_with_its_own() -> None:
    with pytest.raises(KeyError):
        async with Scope("s") as scope:
            scope.start(Diary().fail("x"), "x")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise KeyError from None
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("exiting", [False, True])
async def test_parent_cancelled_from_outside(exiting: bool) -> None:
    diary = Diary()

    async def parent() -> None:
        async with Scope("s") as scope:
            scope.start(diary.wait("a"), "a")
            scope.start(diary.wait("b"), "b")
            if not exiting:
                await asyncio.Event().wait()

    task = await cancelled_outcome(parent)
    assert task.cancelled()
    assert diary.lines == ["a starts", "b starts", "a cancelled", "b cancelled"]


async def test_parent_cancelled_while_children_clean_up() -> None:
    """The exit waits for every clean-up, then the cancellation goes on."""
    cleaned: list[str] = []
    gate = asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.shield(gate.wait())
            cleaned.append("x")

    async def parent() -> None:
        async with Scope("s") as scope:
            scope.start(slow_to_end(), "x")
            await asyncio.sleep(0)
            scope.cancel()

    task_group = TaskGroup("outside")
    task = task_group.start(parent(), "parent")
    await asyncio.sleep(0.01)
    assert not task.done()
    gate.set()
    await task_group.drain()
    assert cleaned == ["x"]


async def test_cancelled_and_failed_at_once() -> None:
    """The cancellation from outside is not swallowed together with the scope's own."""

    async def parent() -> None:
        async with Scope("s") as scope:
            scope.start(Diary().fail("x", 5), "x")
            await asyncio.Event().wait()

    task = await cancelled_outcome(parent, num_ticks=5)
    assert task.cancelled()


async def test_cancel_arrives_while_the_failure_unwinds() -> None:
    gate = asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.shield(gate.wait())

    async def parent() -> None:
        async with Scope("s") as scope:
            scope.start(slow_to_end(), "slow")
            scope.start(Diary().fail("x"), "x")
            await asyncio.Event().wait()

    task_group = TaskGroup("outside", on_error=lambda error: None)
    task = task_group.start(parent(), "parent")
    for _ in range(6):
        await asyncio.sleep(0)
    assert task.cancelling() == 1, "woken by the scope"
    task.cancel()
    await asyncio.sleep(0)
    gate.set()
    await task_group.drain()
    assert task.cancelled()


async def test_timeout_around_a_scope() -> None:
    diary = Diary()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            async with Scope("s") as scope:
                scope.start(diary.wait("a"), "a")
    assert diary.lines == ["a starts", "a cancelled"]


async def test_timeout_inside_a_scope() -> None:
    diary = Diary()
    with pytest.raises(TimeoutError):
        async with Scope("s") as scope:
            scope.start(diary.wait("a"), "a")
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
    assert diary.lines == ["a starts", "a cancelled"]


async def test_nested_failure_goes_up() -> None:
    diary = Diary()

    async def inner() -> None:
        async with Scope("inner") as scope:
            scope.start(diary.wait("inner a"), "a")
            scope.start(diary.fail("inner b", 2), "b")
            await asyncio.Event().wait()

    with pytest.raises(ValueError, match="inner b"):
        async with Scope("outer") as scope:
            scope.start(diary.wait("outer a"), "a")
            scope.start(inner(), "inner")
            await asyncio.Event().wait()
    assert diary.lines == [
        "outer a starts",
        "inner a starts",
        "inner b fails",
        "inner a cancelled",
        "outer a cancelled",
    ]


async def test_nested_in_one_task() -> None:
    """A failure of the outer scope's task ends the inner body, and comes out of the outer scope."""
    diary = Diary()
    with pytest.raises(ValueError, match="outer"):
        async with Scope("outer") as outer, Scope("inner") as inner:
            inner.start(diary.wait("inner"), "i")
            outer.start(diary.fail("outer", 2), "o")
            await asyncio.Event().wait()
    assert diary.lines == ["inner starts", "outer fails", "inner cancelled"]
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_task_may_start_another() -> None:
    diary = Diary()
    async with Scope("s") as scope:

        async def parent() -> None:
            await asyncio.sleep(0)
            scope.start(diary.work("late"), "late")

        scope.start(parent(), "parent")
    assert diary.lines == ["late done"]


async def test_start_after_cancel_is_cancelled() -> None:
    diary = Diary()
    async with Scope("s") as scope:
        scope.cancel()
        task = scope.start(diary.wait("a"), "a")
    assert task.cancelled()
    assert diary.lines == []


async def test_start_outside_the_block_is_refused() -> None:
    diary = Diary()
    scope = Scope("s")
    with pytest.raises(RuntimeError, match="not open"):
        scope.start(diary.wait("early"), "early")
    async with scope:
        pass
    with pytest.raises(RuntimeError, match="not open"):
        scope.start(diary.wait("late"), "late")


async def test_a_child_that_cancels_itself_is_no_failure() -> None:
    async def give_up() -> None:
        raise asyncio.CancelledError

    diary = Diary()
    async with Scope("s") as scope:
        scope.start(give_up(), "x")
        scope.start(diary.work("y"), "y")
    assert diary.lines == ["y done"]


# --- TaskGroup


async def test_task_group_failure_ends_only_its_task() -> None:
    diary = Diary()
    errors: list[BaseException] = []
    task_group = TaskGroup("c", errors.append)
    task_group.start(diary.fail("a"), "a")
    task_group.start(diary.work("b"), "b")
    assert len(task_group) == 2
    await task_group.drain()
    assert diary.lines == ["a fails", "b done"]
    assert [str(error) for error in errors] == ["a"]
    assert len(task_group) == 0


async def test_task_group_failure_is_logged_without_a_listener(caplog: pytest.LogCaptureFixture) -> None:
    task_group = TaskGroup("c")
    task_group.start(Diary().fail("oops"), "a")
    await task_group.drain()
    assert "task failed: task=c/a" in caplog.text
    assert "oops" in caplog.text


async def test_task_group_close_cancels_in_start_order() -> None:
    diary = Diary()
    task_group = TaskGroup("c")
    names = [f"t{number:02}" for number in range(50)]
    for name in names:
        task_group.start(diary.wait(name), name)
    await asyncio.sleep(0)
    await task_group.close()
    assert diary.lines == [f"{name} starts" for name in names] + [f"{name} cancelled" for name in names]
    assert task_group.closed
    assert len(task_group) == 0
    await task_group.close()


async def test_task_group_close_waits_for_cleanup() -> None:
    cleaned: list[int] = []

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(1)

    task_group = TaskGroup("c")
    task_group.start(slow_to_end(), "x")
    await asyncio.sleep(0)
    await task_group.close()
    assert cleaned == [1]


async def test_closed_task_group_refuses() -> None:
    task_group = TaskGroup("c")
    await task_group.close()
    with pytest.raises(RuntimeError, match="task group c is closed"):
        task_group.start(Diary().wait("late"), "late")


async def test_task_group_close_gives_time() -> None:
    diary = Diary()
    task_group = TaskGroup("c")
    task_group.start(diary.work("quick", 5), "quick")
    task_group.start(diary.wait("slow"), "slow")
    await task_group.close(drain_s=0.05)
    assert diary.lines == ["slow starts", "quick done", "slow cancelled"]


async def test_task_group_close_does_not_wait_when_idle() -> None:
    task_group = TaskGroup("c")
    loop = asyncio.get_running_loop()
    began = loop.time()
    await task_group.close(drain_s=30)
    assert loop.time() - began < 10


async def test_task_group_closed_from_inside_its_own_task() -> None:
    diary = Diary()
    task_group = TaskGroup("c")

    async def closer() -> None:
        await asyncio.sleep(0)
        await task_group.close()
        diary.lines.append("closer goes on")

    task_group.start(diary.wait("other"), "other")
    task = task_group.start(closer(), "closer")
    await asyncio.wait([task])
    assert not task.cancelled()
    assert diary.lines == ["other starts", "other cancelled", "closer goes on"]


async def test_task_group_closed_from_inside_does_not_drain_itself() -> None:
    """It waits for the others only: its own end cannot come before its own end."""
    diary = Diary()
    task_group = TaskGroup("c")

    async def closer() -> None:
        await task_group.close(drain_s=30)
        diary.lines.append("closer goes on")

    task_group.start(diary.work("other", 10), "other")
    task = task_group.start(closer(), "closer")
    async with asyncio.timeout(10):
        await asyncio.wait([task])
    assert diary.lines == ["other done", "closer goes on"]


async def test_two_who_drain() -> None:
    """Each of them hears of the end."""
    task_group = TaskGroup("c")
    task_group.start(Diary().work("x", 10), "x")
    waiting = TaskGroup("waiting")
    for number in range(3):
        waiting.start(task_group.drain(), str(number))
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await waiting.drain()


async def test_drain_waits_for_tasks_started_meanwhile() -> None:
    diary = Diary()
    task_group = TaskGroup("c")

    async def parent() -> None:
        await asyncio.sleep(0)
        task_group.start(diary.work("child"), "child")

    task_group.start(parent(), "parent")
    await task_group.drain()
    assert diary.lines == ["child done"]


async def test_a_cancelled_task_is_no_error() -> None:
    errors: list[BaseException] = []
    task_group = TaskGroup("c", errors.append)
    task = task_group.start(Diary().wait("a"), "a")
    await asyncio.sleep(0)
    task.cancel()
    await task_group.drain()
    assert errors == []


async def test_drain_can_be_given_up() -> None:
    task_group = TaskGroup("c")
    diary = Diary()
    task_group.start(diary.wait("a"), "a")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await task_group.drain()
    assert diary.lines == ["a starts"], "drain cancels nothing"
    await task_group.close()
