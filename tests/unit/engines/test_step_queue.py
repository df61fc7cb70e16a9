"""StepQueue: in order, not too many, and nothing of who has gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvolt.core.delta import Delta, StepOutput
from kvolt.core.errors import EngineFailed, ErrorInfo
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import Cleared
from kvolt.core.load import WorkerLoad
from kvolt.engines.step_queue import StepQueue, mentions_request, without_requests
from kvolt.runtime.tasks import TaskGroup

A, B = RequestId("a"), RequestId("b")


def step(number: int) -> StepOutput:
    return StepOutput(load=WorkerLoad(running=number))


def full_step() -> StepOutput:
    """With something of two requests in each of its parts."""
    error = ErrorInfo("engine_failed", "lost")
    return StepOutput(
        deltas=((A, Delta((1,))), (B, Delta((2,))), (A, Delta((3,)))),
        failed=((A, error), (B, error)),
        load=WorkerLoad(running=2),
        plain_ids=(B, A),
        plain_tokens=(5, 6),
        kv_changes=(Cleared(),),
    )


async def read(unread: StepQueue, number: int) -> list[StepOutput]:
    found: list[StepOutput] = []
    async with asyncio.timeout(10):
        async for each in unread.read():
            found.append(each)
            if len(found) == number:
                break
    return found


class Reader:
    def __init__(self, unread: StepQueue) -> None:
        self.unread = unread
        self.heard: list[StepOutput] = []
        self.error: BaseException | None = None
        self.is_over = False

    async def run(self) -> None:
        try:
            async for each in self.unread.read():
                self.heard.append(each)
        except EngineFailed as error:
            self.error = error
        self.is_over = True


async def ticks(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_in_order() -> None:
    unread = StepQueue()
    for number in range(5):
        unread.put(step(number))
    unread.put(None)
    assert await read(unread, 5) == [step(number) for number in range(5)]


async def test_a_reader_that_waits_is_woken() -> None:
    unread, task_group = StepQueue(), TaskGroup("test")
    reader = Reader(unread)
    task_group.start(reader.run(), "read")
    await ticks()
    for number in range(3):
        unread.put(step(number))
        await ticks()
        assert reader.heard[-1] == step(number)
    assert not reader.is_over
    await task_group.close()


async def test_the_end_takes_everything_with_it() -> None:
    """Whoever closes wants no more."""
    unread, task_group = StepQueue(), TaskGroup("test")
    unread.put(step(1))
    unread.close(None)
    unread.put(step(2))
    reader = Reader(unread)
    task_group.start(reader.run(), "read")
    await ticks()
    assert (reader.heard, reader.error, reader.is_over) == ([], None, True)
    await task_group.close()


async def test_a_reader_that_waits_hears_of_the_end() -> None:
    unread, task_group = StepQueue(), TaskGroup("test")
    reader = Reader(unread)
    task_group.start(reader.run(), "read")
    await ticks()
    unread.close(None)
    await ticks()
    assert reader.is_over
    await task_group.close()


@pytest.mark.parametrize("waits", [False, True])
async def test_before_a_failure_comes_what_was_said(waits: bool) -> None:
    unread, task_group = StepQueue(), TaskGroup("test")
    reader = Reader(unread)
    if waits:
        task_group.start(reader.run(), "read")
        await ticks()
    error = EngineFailed("dead")
    unread.put(step(1))
    unread.close(error)
    unread.close(None)
    unread.close(EngineFailed("another"))
    unread.put(step(2))
    if not waits:
        task_group.start(reader.run(), "read")
    await ticks()
    assert (reader.heard, reader.error) == ([step(1)], error)
    with pytest.raises(EngineFailed, match="dead"):
        await read(unread, 1)
    await task_group.close()


async def test_too_much_that_is_unread_stops_who_makes_it() -> None:
    unread, task_group = StepQueue(max_steps=4), TaskGroup("test")
    made: list[int] = []

    async def make() -> None:
        for number in range(20):
            unread.put(step(number))
            made.append(number)
            await unread.wait_for_space()

    task_group.start(make(), "make")
    await ticks(10)
    assert made == [0, 1, 2, 3]
    assert await read(unread, 2) == [step(0), step(1)]
    await ticks(10)
    assert len(made) == 4, "not for each one that is read"
    assert await read(unread, 1) == [step(2)]
    await ticks(10)
    assert made == [0, 1, 2, 3, 4, 5, 6], "as many as there were"
    assert await read(unread, 17) == [step(number) for number in range(3, 20)]
    await task_group.close()


async def test_whoever_waits_for_room_is_let_go_by_the_end() -> None:
    unread, task_group = StepQueue(max_steps=1), TaskGroup("test")
    unread.put(step(1))
    waiting = task_group.start(unread.wait_for_space(), "room")
    await ticks()
    assert not waiting.done()
    unread.close(None)
    await ticks()
    assert waiting.done()
    await task_group.close()


async def test_nothing_of_who_has_gone() -> None:
    unread = StepQueue()
    untouched = step(7)
    unread.put(untouched)
    unread.put(full_step())
    unread.put(StepOutput(plain_ids=(A,), plain_tokens=(1,)))
    unread.drop_request(A)
    first, second, third = await read(unread, 3)
    assert first is untouched
    assert second == without_requests(full_step(), {A})
    assert third == StepOutput(), "who counts steps still counts it"


async def test_what_comes_after_is_another_requests() -> None:
    unread = StepQueue()
    unread.put(full_step())
    unread.drop_request(A)
    unread.put(StepOutput(plain_ids=(A,), plain_tokens=(9,)))
    assert [A in each.plain_ids for each in await read(unread, 2)] == [False, True]


def test_a_step_without_some() -> None:
    error = ErrorInfo("engine_failed", "lost")
    assert without_requests(full_step(), {A}) == StepOutput(
        deltas=((B, Delta((2,))),),
        failed=((B, error),),
        load=WorkerLoad(running=2),
        plain_ids=(B,),
        plain_tokens=(5,),
        kv_changes=(Cleared(),),
    )
    assert without_requests(full_step(), {A, B}) == StepOutput(
        load=WorkerLoad(running=2), kv_changes=(Cleared(),)
    )
    assert without_requests(full_step(), set()) == full_step()


@pytest.mark.parametrize(
    ("fields", "is_told"),
    [
        ({"deltas": ((A, Delta()),)}, True),
        ({"failed": ((A, ErrorInfo("x", "y")),)}, True),
        ({"plain_ids": (A,), "plain_tokens": (1,)}, True),
        ({"deltas": ((B, Delta()),), "plain_ids": (B,), "plain_tokens": (1,)}, False),
        ({}, False),
    ],
    ids=["delta", "failed", "plain", "another's", "nothing"],
)
def test_whom_a_step_tells_of(fields: dict[str, Any], is_told: bool) -> None:
    assert mentions_request(StepOutput(**fields), A) == is_told


async def test_who_waits_until_all_is_read() -> None:
    unread, task_group = StepQueue(), TaskGroup("test")
    dealt_with: list[int] = []

    async def reader() -> None:
        async for each in unread.read():
            await asyncio.sleep(0.01)
            assert each.load is not None
            dealt_with.append(each.load.running)

    unread.put(step(1))
    await unread.wait_until_read(0.01)  # nobody reads: not for ever
    assert dealt_with == []
    task_group.start(reader(), "reader")
    unread.put(step(2))
    await unread.wait_until_read(10)
    assert dealt_with == [1, 2], "not only taken"
    await unread.wait_until_read(10)
    unread.put(step(3))
    unread.close(None)
    await unread.wait_until_read(10)
    await task_group.close()
