"""Client side of one call: opening it, deadlines, and an async iterator over the responses."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import msgspec

from kvolt.core.errors import Cancelled, ConnectFailed, DeadlineExceeded, InvalidRequest, KvoltError
from kvolt.runtime.logs import current_context
from kvolt.runtime.plane.port import Destination, OutgoingStream, RequestPlane
from kvolt.runtime.plane.streams import Decode, Sink, StepSink

_LATE_S = 0.5
"""A timer that fires this much late means that this process was stalled."""
_TIMER_GRAIN_S = 0.002
"""A loop timer may fire this much early."""

_encode = msgspec.msgpack.Encoder().encode
decode_any: Decode = msgspec.msgpack.Decoder().decode


class Deadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of one call. Between responses only time waiting for the sender counts."""

    connect_s: float = 5.0
    first_s: float = 60.0
    between_s: float = 30.0
    total_s: float = 600.0
    stall_s: float = 0.0
    """Extra time for the first and the next response while the peer may be stalled."""


class Call:
    """Deadlines of one call. Items go directly from the stream to the sink; the end passes through here.

    The sink gets exactly one end: from the peer, a lost connection, a deadline, or Cancelled.
    """

    __slots__ = (
        "_armed_for",
        "_loop",
        "_started",
        "_stream",
        "_timer",
        "_waiting_since",
        "automatic_credit",
        "deadlines",
        "ended",
        "on_item",
        "sink",
        "steps",
    )

    def __init__(self, sink: Sink, deadlines: Deadlines, automatic_credit: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self.sink = sink
        self.deadlines = deadlines
        self.automatic_credit = automatic_credit
        self._started = self._waiting_since = self._loop.time()
        self._stream: OutgoingStream | None = None
        self.ended = False
        self.on_item = sink.on_item
        self.steps: StepSink | None = getattr(sink, "steps", None)
        self._timer: asyncio.TimerHandle | None = None
        self._armed_for = 0.0

    @property
    def remaining_s(self) -> float:
        """Time left until the total deadline; sent to the peer."""
        return max(self._started + self.deadlines.total_s - self._loop.time(), 0.0)

    @property
    def stream(self) -> OutgoingStream | None:
        return self._stream

    def attach(self, stream: OutgoingStream) -> None:
        """Start the deadlines of the opened stream. If the call has already ended, cancel the stream."""
        if self.ended:
            stream.cancel()
            return
        self._stream = stream
        self._waiting_since = self._loop.time()
        self._arm(self._due()[0], self._waiting_since)

    def restart_wait(self) -> None:
        """Restart the wait: the reader has consumed everything, so only now is it waiting for the sender."""
        self._waiting_since = self._loop.time()

    def _reader_is_behind(self) -> bool:
        held = self._stream is not None and self._stream.is_reading_paused
        return held or getattr(self.sink, "num_queued", 0) > 0

    def cancel(self, error: KvoltError | None = None) -> None:
        """Cancel the call locally and at the peer."""
        if self.ended:
            return
        stream = self._stream
        if stream is not None:
            stream.cancel()
        self.on_end(error or Cancelled("the caller cancelled"))

    def abandon(self) -> None:
        """End a call that was never sent, without notifying the sink."""
        self.ended = True

    def on_end(self, error: KvoltError | None) -> None:
        if self.ended:
            return
        self.ended = True
        self._stream = None  # breaks the reference cycle, so that everything is freed at once
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.sink.on_end(error)

    def _arm(self, due: float, now: float) -> None:
        # At most `between_s` from now: the first item may come at once and be the last for a long time.
        self._armed_for = min(due, now + self.deadlines.between_s)
        self._timer = self._loop.call_at(self._armed_for, self._on_timer)

    def _due(self) -> tuple[float, str, float]:
        """The next deadline: time, stage and length."""
        limits = self.deadlines
        stream = self._stream
        arrival = stream.last_item_at() if stream is not None else None
        stage, length = ("first", limits.first_s) if arrival is None else ("between", limits.between_s)
        since = max(self._waiting_since, arrival or 0.0)
        due = since + length
        if stream is not None:
            due += stream.stalled_s(since) + (limits.stall_s if stream.peer_silent else 0.0)
        total = self._started + limits.total_s
        return (due, stage, length) if due < total else (total, "total", limits.total_s)

    def _on_timer(self) -> None:
        # One timer per call, re-armed when it fires early: an arriving item only records its time.
        due, stage, length = self._due()
        now = self._loop.time()
        late_s = now - self._armed_for
        if due <= now and stage != "total" and late_s > _LATE_S:
            due = (
                now + _LATE_S
            )  # this process was stalled: first handle received bytes and the connection state
        if due <= now and stage == "between" and self._reader_is_behind():
            self._waiting_since = now  # our own reader is slow: the sender may lack credit
            due = self._due()[0]
        if due > now:
            self._arm(due, now)
        else:
            self.cancel(
                DeadlineExceeded(f"no response within {length:g} s ({stage})", stage=stage, after_s=length)
            )


class ResponseStream(AsyncIterator[Any]):
    """The responses of one call, in order. Leaving it early (`aclose` or the `async with` block) cancels the call.

    The queue is bounded by the stream's window: the peer cannot send more than was consumed.
    """

    __slots__ = ("_call", "_error", "_has_ended", "_items", "_read_since_wait", "_waiter")

    def __init__(self, deadlines: Deadlines) -> None:
        self._items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._has_ended = False
        self._read_since_wait = False
        """An item was read since the reader last waited."""
        self._error: KvoltError | None = None
        self._call = Call(self, deadlines)

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
        self._has_ended = True
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
            self._read_since_wait = True
            if self._call.stream is not None:
                self._call.stream.mark_consumed(1)
            return self._items.popleft()
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def _wait(self) -> None:
        if self._read_since_wait:
            self._read_since_wait = False
            self._call.restart_wait()
        while not self._items and not self._has_ended:
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


def _encode_request(request: Any) -> bytes:
    try:
        return _encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"the request cannot be encoded: {error}", param="body") from error


async def open_call(
    plane: RequestPlane,
    to: Destination,
    request: Any,
    call: Call,
    decode: Decode,
) -> None:
    """Open a stream for a call. If it raises, nothing was sent and the call is over.

    Raises DeadlineExceeded when the call's total deadline expired first, which is no evidence against the peer.
    """
    try:
        body = _encode_request(request)
        remaining_s = call.remaining_s
        stream = await plane.open(
            to,
            body,
            call,
            decode,
            connect_s=min(call.deadlines.connect_s, remaining_s),
            deadline_s=remaining_s,
            context=current_context(),
            automatic_credit=call.automatic_credit,
        )
    except BaseException as error:
        call.abandon()
        if isinstance(error, ConnectFailed) and call.remaining_s <= _TIMER_GRAIN_S:
            total_s = call.deadlines.total_s
            raise DeadlineExceeded(
                f"no connection within {total_s:g} s (total)", stage="total", after_s=total_s
            ) from error
        raise
    call.attach(stream)


async def open_stream(
    plane: RequestPlane, to: Destination, request: Any, deadlines: Deadlines, decode: Decode = decode_any
) -> ResponseStream:
    """Call a known process directly, without discovery."""
    responses = ResponseStream(deadlines)
    await open_call(plane, to, request, responses.call, decode)
    return responses
