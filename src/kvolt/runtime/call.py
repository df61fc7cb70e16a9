"""A caller's view of one call: deadlines, and an async iterator over the answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import msgspec

from kvolt.core.errors import Cancelled, DeadlineExceeded, KvoltError
from kvolt.runtime.streams import CallerStream, Sink


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """How long each wait of a call may take. Between responses only the sender's silence counts."""

    connect_s: float = 5.0
    first_s: float = 60.0
    between_s: float = 30.0
    total_s: float = 600.0


class Call:
    """Watches the deadlines of one stream and passes what comes on to a sink.

    The sink sees exactly one end: the peer's, a lost connection's, a deadline's, or Cancelled.
    """

    __slots__ = (
        "_deadlines",
        "_got_first",
        "_last_arrival",
        "_loop",
        "_sink",
        "_started",
        "_stream",
        "_timer",
        "ended",
    )

    def __init__(self, sink: Sink, deadlines: Deadlines, started: float | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._sink = sink
        self._deadlines = deadlines
        self._started = self._loop.time() if started is None else started
        self._last_arrival = self._loop.time()
        self._got_first = False
        self._stream: CallerStream | None = None
        self.ended = False
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._due()[0], self._on_timer)

    @property
    def remaining_s(self) -> float:
        """Time left in total, to be told to the peer."""
        return max(self._started + self._deadlines.total_s - self._loop.time(), 0.0)

    def attach(self, stream: CallerStream) -> None:
        """The stream is open. If the call ended meanwhile, the stream is cancelled."""
        self._stream = stream
        if self.ended:
            stream.cancel()

    def consumed(self, num_items: int) -> None:
        if self._stream is not None:
            self._stream.consumed(num_items)

    def cancel(self, error: KvoltError | None = None) -> None:
        """Stop the call here and at the peer."""
        if self.ended:
            return
        if self._stream is not None:
            self._stream.cancel()
        self._end(error or Cancelled("the caller cancelled"))

    def abandon(self) -> None:
        """The call never started: no deadline is watched any more, and the sink hears nothing."""
        self.ended = True
        self._stop_timer()

    # --- streams.Sink

    def on_item(self, item: Any) -> None:
        if self.ended:
            return
        self._got_first = True
        self._last_arrival = self._loop.time()
        self._sink.on_item(item)

    def on_end(self, error: KvoltError | None) -> None:
        self._end(error)

    # ---

    def _end(self, error: KvoltError | None) -> None:
        if self.ended:
            return
        self.ended = True
        self._stop_timer()
        self._sink.on_end(error)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> tuple[float, str, float]:
        """When the next deadline is, which one, and its length."""
        limits = self._deadlines
        total = self._started + limits.total_s
        stage, length = ("between", limits.between_s) if self._got_first else ("first", limits.first_s)
        if self._last_arrival + length < total:
            return self._last_arrival + length, stage, length
        return total, "total", limits.total_s

    def _on_timer(self) -> None:
        # One timer per call, re-armed when it fires early: items only note their arrival.
        due, stage, length = self._due()
        if due > self._loop.time():
            self._timer = self._loop.call_at(due, self._on_timer)
        elif stage == "between" and self._reader_is_behind():
            self._last_arrival = self._loop.time()
            self._timer = self._loop.call_at(self._due()[0], self._on_timer)
        else:
            self.cancel(
                DeadlineExceeded(f"no answer within {length:g} s ({stage})", stage=stage, after_s=length)
            )

    def _reader_is_behind(self) -> bool:
        return getattr(self._sink, "num_queued", 0) > 0


class ResponseStream(AsyncIterator[Any]):
    """The answers of one call, in order. Leaving it early (`aclose`, or the `async with` block) cancels the call.

    The queue is bounded by the stream's window: the peer sends no more than was taken.
    """

    __slots__ = ("_call", "_error", "_items", "_over", "_waiter")

    def __init__(self, deadlines: Deadlines, started: float | None = None) -> None:
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._over = False
        self._error: KvoltError | None = None
        self._call = Call(self, deadlines, started)

    @property
    def call(self) -> Call:
        return self._call

    @property
    def num_queued(self) -> int:
        return len(self._items)

    def on_item(self, item: Any) -> None:
        self._items.append(item)
        if self._waiter is not None:
            self._wake()

    def on_end(self, error: KvoltError | None) -> None:
        self._over = True
        self._error = error
        if self._waiter is not None:
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def __anext__(self) -> Any:
        if not self._items:
            await self._wait()
        if self._items:
            self._call.consumed(1)
            return self._items.popleft()
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def batch(self) -> list[Any]:
        """All that is there, at least one item; an empty list at the end. Cheaper than one by one."""
        if not self._items:
            await self._wait()
        if not self._items and self._error is not None:
            raise self._error
        items = list(self._items)
        self._items.clear()
        self._call.consumed(len(items))
        return items

    async def _wait(self) -> None:
        while not self._items and not self._over:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def aclose(self) -> None:
        self._call.cancel()
        self._items.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
