"""Deadlines of one call, and its answers as an async iterator; the stream below is a stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvolt.core.errors import Cancelled, DeadlineExceeded, KvoltError, WorkerLost
from kvolt.runtime.endpoint.call import Call, Deadlines, ResponseStream
from kvolt.runtime.plane.streams import Stalls
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.virtual.loop import VirtualLoop, in_process, run_virtual

LIMITS = Deadlines(connect_s=1.0, first_s=10.0, between_s=2.0, total_s=100.0)


class FakeStream:
    """Delivers to whatever it is told to, and counts."""

    def __init__(self, sink: Any) -> None:
        self.sink = sink
        self.arrival: float | None = None
        self.num_consumed = self.num_cancels = 0
        self.ended = False
        self.is_reading_paused = False
        self.peer_silent = False
        self.stalls = Stalls()

    @property
    def last_arrival(self) -> float | None:
        return self.arrival

    def last_item_at(self) -> float | None:
        return self.arrival

    def stalled_s(self, since: float) -> float:
        return self.stalls.seconds_since(since)

    def item(self, item: Any) -> None:
        self.arrival = asyncio.get_running_loop().time()
        self.sink.on_item(item)

    def end(self, error: KvoltError | None = None) -> None:
        self.ended = True
        self.sink.on_end(error)

    def mark_consumed(self, num_items: int) -> None:
        self.num_consumed += num_items

    def cancel(self) -> None:
        self.ended = True
        self.num_cancels += 1


class Sink:
    def __init__(self) -> None:
        self.items: list[Any] = []
        self.ends: list[KvoltError | None] = []
        self.ended_at = 0.0

    def on_item(self, item: Any) -> None:
        self.items.append(item)

    def on_end(self, error: KvoltError | None) -> None:
        self.ends.append(error)
        self.ended_at = asyncio.get_running_loop().time()


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtual(test)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def start(limits: Deadlines = LIMITS) -> tuple[Call, FakeStream, Sink]:
    sink = Sink()
    call = Call(sink, limits)
    stream = FakeStream(call)
    call.attach(stream)  # type: ignore[arg-type]
    return call, stream, sink


def stream_of(limits: Deadlines = LIMITS) -> tuple[ResponseStream, FakeStream]:
    responses = ResponseStream(limits)
    stream = FakeStream(responses.call)
    responses.call.attach(stream)  # type: ignore[arg-type]
    return responses, stream


def expired(sink: Sink) -> tuple[Any, Any]:
    (error,) = sink.ends
    assert isinstance(error, DeadlineExceeded)
    return error.fields["stage"], error.fields["after_s"]


# --- deadlines


@virtual
async def test_first() -> None:
    _, stream, sink = start()
    await asyncio.sleep(9.9)
    assert sink.ends == []
    await asyncio.sleep(0.2)
    assert expired(sink) == ("first", 10.0)
    assert stream.num_cancels == 1


@virtual
async def test_a_silent_peer_gets_the_time_of_a_stall_besides() -> None:
    """It may be stalled; a caller that has another way gives it none."""
    for stall_s, expires_at in ((0.0, 10.0), (7.0, 17.0)):
        began = asyncio.get_running_loop().time()
        _, stream, sink = start(Deadlines(first_s=10.0, between_s=5.0, total_s=100.0, stall_s=stall_s))
        stream.peer_silent = True
        await asyncio.sleep(20.0)
        assert expired(sink) == ("first", 10.0)
        assert sink.ended_at == began + expires_at


@virtual
async def test_a_deadline_that_passed_in_a_stall_is_decided_after_what_has_arrived() -> None:
    """The call's timer may be the first to fire after a stall of its process."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    _, stream, sink = in_process("caller", start)
    await asyncio.sleep(9.0)
    loop.stall("caller")
    await asyncio.sleep(5.0)
    loop.resume("caller")
    await asyncio.sleep(0.1)
    assert sink.ends == []
    stream.item("first")
    await asyncio.sleep(1.8)
    assert sink.ends == []
    await asyncio.sleep(1.0)
    assert expired(sink) == ("between", 2.0)


@virtual
async def test_the_time_of_a_stall_counts_for_no_deadline_but_the_total() -> None:
    _, stream, sink = start(Deadlines(first_s=10.0, between_s=5.0, total_s=21.0))
    await asyncio.sleep(9.0)
    stream.stalls.record(2.0, 9.0)
    await asyncio.sleep(6.0)
    assert sink.ends == []
    stream.item("first")
    await asyncio.sleep(4.0)
    stream.stalls.record(17.0, 19.0)
    await asyncio.sleep(1.9)
    assert sink.ends == []
    await asyncio.sleep(0.2)
    assert expired(sink) == ("total", 21.0)


@virtual
async def test_a_stall_adds_its_length_to_the_wait_it_falls_into() -> None:
    loop = asyncio.get_running_loop()
    for has_item, expires_at in ((False, 9.0 + 1.0 + 1.0), (True, 0.5 + 5.0 + 1.0)):
        began = loop.time()
        _, stream, sink = start(Deadlines(first_s=9.0, between_s=5.0, total_s=1000.0))
        await asyncio.sleep(0.5)
        if has_item:
            stream.stalls.record(began, began + 0.5)
            stream.item("first")
        for number in range(1, 6):
            await asyncio.sleep(began + 4.0 * number - loop.time())
            stream.stalls.record(loop.time() - 1.0, loop.time())
        assert sink.ended_at == began + expires_at


@virtual
async def test_first_counts_from_the_request_not_from_the_dial() -> None:
    sink = Sink()
    call = Call(sink, LIMITS)
    await asyncio.sleep(9.0)
    call.attach(FakeStream(call))  # type: ignore[arg-type]
    await asyncio.sleep(9.0)
    assert sink.ends == []
    await asyncio.sleep(2.0)
    assert expired(sink)[0] == "first"


@pytest.mark.parametrize("first_after_s", [0.0, 0.5, 1.9, 2.0, 9.0])
def test_between_counts_from_the_latest_item(first_after_s: float) -> None:
    """Also when the first one comes at once and was allowed to take much longer."""

    async def main() -> None:
        _, stream, sink = start()
        await asyncio.sleep(first_after_s)
        for _ in range(3):
            stream.item(1)
            await asyncio.sleep(1.5)
        stream.item(1)
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(5.0)
        assert expired(sink) == ("between", 2.0)
        assert sink.ended_at == pytest.approx(now + 2.0, abs=0.01)

    run_virtual(main)


@virtual
async def test_total_counts_from_the_start() -> None:
    sink = Sink()
    call = Call(sink, LIMITS)
    await asyncio.sleep(5.0)
    stream = FakeStream(call)
    call.attach(stream)  # type: ignore[arg-type]
    assert call.remaining_s == pytest.approx(95.0)
    while not sink.ends:
        stream.item(1)
        await asyncio.sleep(1.0)
    assert expired(sink) == ("total", 100.0)
    assert sink.ended_at == pytest.approx(100.0)
    assert call.remaining_s == 0.0


@virtual
async def test_no_deadline_after_the_end() -> None:
    call, stream, sink = start()
    stream.end()
    await asyncio.sleep(200)
    assert sink.ends == [None]
    call.cancel()
    assert (sink.ends, stream.num_cancels) == ([None], 0)


@virtual
async def test_one_end_only() -> None:
    call, stream, sink = start()
    call.cancel()
    call.cancel()
    stream.end(WorkerLost("late"))
    assert [type(error) for error in sink.ends] == [Cancelled]
    assert stream.num_cancels == 1


@virtual
async def test_cancelled_before_there_is_a_stream() -> None:
    sink = Sink()
    call = Call(sink, LIMITS)
    call.cancel()
    stream = FakeStream(call)
    call.attach(stream)  # type: ignore[arg-type]
    assert stream.num_cancels == 1
    assert len(sink.ends) == 1


@virtual
async def test_an_abandoned_call_is_silent() -> None:
    sink = Sink()
    call = Call(sink, LIMITS)
    call.abandon()
    await asyncio.sleep(200)
    assert sink.ends == []


@virtual
async def test_endless_deadlines() -> None:
    forever = float("inf")
    _, stream, sink = start(Deadlines(connect_s=1, first_s=forever, between_s=forever, total_s=forever))
    await asyncio.sleep(50_000)
    stream.end()
    assert sink.ends == [None]


# --- the iterator


@virtual
async def test_items_in_order_then_the_end() -> None:
    responses, stream = stream_of()
    for number in range(3):
        stream.item(number)
    assert await anext(responses) == 0
    assert stream.num_consumed == 1
    stream.end()
    assert responses.num_queued == 2
    assert [item async for item in responses] == [1, 2]
    assert stream.num_consumed == 1, "no credit is needed after the end"
    with pytest.raises(StopAsyncIteration):
        await anext(responses)


@virtual
async def test_items_then_the_error_again_and_again() -> None:
    responses, stream = stream_of()
    error = WorkerLost("gone")
    stream.item(1)
    stream.end(error)
    assert await anext(responses) == 1
    for _ in range(2):
        with pytest.raises(WorkerLost) as caught:
            await anext(responses)
        assert caught.value is error


@virtual
async def test_a_reader_waits() -> None:
    responses, stream = stream_of()
    got: list[Any] = []

    async def read() -> None:
        async for item in responses:
            got.append(item)

    task_group = TaskGroup("reader")
    task_group.start(read(), "read")
    for number in range(3):
        await asyncio.sleep(0.1)
        assert got == list(range(number))
        stream.item(number)
    stream.end()
    await task_group.drain()
    assert got == [0, 1, 2]


@virtual
async def test_a_cancelled_wait_loses_nothing() -> None:
    responses, stream = stream_of()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await anext(responses)
    stream.item(1)
    assert await anext(responses) == 1
    await responses.aclose()


@virtual
async def test_leaving_cancels_and_drops() -> None:
    responses, stream = stream_of()
    async with responses:
        stream.item(1)
        stream.item(2)
        assert await anext(responses) == 1
    assert stream.num_cancels == 1
    assert responses.num_queued == 0
    with pytest.raises(Cancelled):
        await anext(responses)


@virtual
async def test_leaving_after_the_end_cancels_nothing() -> None:
    responses, stream = stream_of()
    async with responses:
        stream.end()
        assert [item async for item in responses] == []
    assert stream.num_cancels == 0


@virtual
async def test_a_reader_that_is_behind_is_not_the_senders_silence() -> None:
    responses, stream = stream_of()
    stream.item(1)
    await asyncio.sleep(20.0)
    assert await anext(responses) == 1
    stream.item(2)
    stream.end()
    assert [item async for item in responses] == [2]


@virtual
async def test_once_the_reader_has_caught_up_silence_counts() -> None:
    responses, stream = stream_of()
    stream.item(1)
    await asyncio.sleep(20.0)
    assert await anext(responses) == 1
    with pytest.raises(DeadlineExceeded) as caught:
        await anext(responses)
    assert caught.value.fields["stage"] == "between"
