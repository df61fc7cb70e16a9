"""Caller's end of a stream, sans-I/O: credit, delivery to the sink, and the stalls that its deadlines exclude."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from kvolt.core.errors import MALFORMED, KvoltError, ProtocolError
from kvolt.runtime.plane.bulk import Message, MessageKind
from kvolt.runtime.plane.wire import decode_delta

Body = bytes | msgspec.Raw
Decode = Callable[[Body], Any]

MAX_STALLS = 256
"""Newest intervals kept per connection. At most one per heartbeat, so they cover minutes."""

_SOME_BYTES = msgspec.msgpack.encode(b"")


class Sink(Protocol):
    """Receiver of a caller's stream. Called from the loop's read path: must not raise or block."""

    def on_item(self, item: Any) -> None: ...

    def on_end(self, error: KvoltError | None) -> None:
        """Called once, after the last item; not called after `CallerStream.cancel`."""
        ...


class StepSink(Protocol):
    """Receives the plain tokens of a whole step in one call, for sinks that share it.

    A sink names it in its attribute `steps`. If all members of a step name the same one, it is called instead of
    them; everything that is not a plain token still goes to the sinks.
    """

    def on_step(self, sinks: Sequence[Sink], token_ids: Sequence[int]) -> None:
        """One token for each sink, in order. The same `sinks` list is reused while the batch is unchanged."""
        ...


def _innermost(sink: Sink) -> Sink:
    while (inner := getattr(sink, "sink", None)) is not None:
        sink = inner
    return sink


class Stalls:
    """Stalls of this process or of the peer on one connection, which deadlines between responses do not count.

    Disjoint intervals in loop time, oldest first.
    """

    __slots__ = ("_intervals",)

    def __init__(self) -> None:
        self._intervals: deque[tuple[float, float]] = deque(maxlen=MAX_STALLS)

    def record(self, start: float, end: float) -> None:
        """Record a stall that ends after all earlier ones. Overlapping time counts once."""
        intervals = self._intervals
        while intervals and intervals[-1][0] >= start:
            intervals.pop()
        if intervals:
            start = max(start, intervals[-1][1])
        if start < end:
            intervals.append((start, end))

    def seconds_since(self, since: float) -> float:
        """Stalled seconds after `since`."""
        seconds = 0.0
        for start, end in reversed(self._intervals):
            if end <= since:
                break
            seconds += end - max(start, since)
        return seconds


class CallerHost(Protocol):
    """Interface of the session that a caller's stream needs."""

    peer_silent: bool
    stalls: Stalls

    def grant(self, stream_id: int, num_items: int) -> None: ...

    def cancel_call(self, stream_id: int) -> None: ...

    def settle_steps_read(self) -> None: ...


class CallerStream:
    """Caller's end of a stream.

    With `automatic` credit an item counts as read when it is delivered, until `pause_reading`; otherwise the
    reader calls `mark_consumed`. Credit is returned half a window at a time.

    The session's receive loop accesses the public fields directly because it runs once per token.
    """

    __slots__ = (
        "_automatic",
        "_decode",
        "_finish",
        "_session",
        "_unacked_items",
        "_window",
        "deliver",
        "ended",
        "id",
        "last_arrival",
        "low_water",
        "sink",
        "steps",
        "window_left",
    )

    def __init__(
        self,
        session: CallerHost,
        stream_id: int,
        sink: Sink,
        decode: Decode,
        window: int,
        automatic: bool = False,
    ) -> None:
        self._session = session
        self._finish = sink.on_end
        self._decode = decode
        self._window = window
        self._automatic = automatic
        self._unacked_items = 0
        """Items consumed by the reader whose credit was not returned yet."""
        self.id = stream_id
        self.ended = False
        self.deliver = sink.on_item
        self.steps: StepSink | None = getattr(sink, "steps", None)
        self.sink = _innermost(sink)
        """The innermost sink, without wrappers such as Call: the one passed to a StepSink."""
        self.window_left = window
        """Items that the peer may still send."""
        self.low_water = (window + 1) // 2 if automatic else 0
        """Below this `on_low` is called; 0 without automatic credit."""
        self.last_arrival: float | None = None

    def on_low(self) -> None:
        """Return credit when the window is half empty (automatic credit); ProtocolError when it is overdrawn."""
        if self.window_left < 0:
            raise ProtocolError(f"stream {self.id} sent more than its credit", rule="credit")
        if self.low_water and self.window_left < self._window:
            self._grant(self._window - self.window_left)

    def mark_consumed(self, num_items: int) -> None:
        """Return credit for consumed items. Only without automatic credit."""
        self._unacked_items += num_items
        if self._unacked_items * 2 >= self._window and not self.ended:
            num_items, self._unacked_items = self._unacked_items, 0
            self._grant(num_items)

    @property
    def is_reading_paused(self) -> bool:
        """The reader has paused automatic credit."""
        return self._automatic and self.low_water == 0

    def pause_reading(self) -> None:
        """Stop automatic credit because the reader is behind."""
        self._session.settle_steps_read()
        self.low_water = 0

    def resume_reading(self) -> None:
        """Resume automatic credit."""
        self._session.settle_steps_read()
        if self._automatic and not self.ended:
            self.low_water = (self._window + 1) // 2
            if self.window_left < self.low_water:
                self._grant(self._window - self.window_left)

    def cancel(self) -> None:
        """Cancel at the peer; nothing more is delivered, not even an end."""
        if not self.ended:
            self.ended = True
            self._session.cancel_call(self.id)

    def accept_message(self, message: Message, now: float) -> None:
        """Deliver one long message."""
        match message.kind:
            case MessageKind.DELTA:
                self.accept(decode_delta(message.data), now)
            case MessageKind.BYTES:
                self.accept_bytes(message.data, now)
            case MessageKind.ENCODED:
                self.accept_raw(message.data, now)

    def accept_raw(self, raw: Body, now: float, decode: Decode | None = None) -> None:
        """Decode and deliver one item. An item that does not decode ends this stream only."""
        try:
            item = (decode or self._decode)(raw)
        except (*MALFORMED, KvoltError) as error:
            self._fail_decoding(error)
        else:
            self.accept(item, now)

    def accept_bytes(self, item: bytes, now: float) -> None:
        """Deliver a byte string sent unencoded, if the decoder accepts byte strings."""
        try:
            self._decode(_SOME_BYTES)
        except (*MALFORMED, KvoltError) as error:
            self._fail_decoding(error)
        else:
            self.accept(item, now)

    def _fail_decoding(self, error: Exception) -> None:
        self.cancel()
        self._finish(ProtocolError(f"stream {self.id}: an item does not decode: {error}", rule="item"))

    def accept(self, item: Any, now: float) -> None:
        self.last_arrival = now
        self.window_left -= 1
        if self.window_left < self.low_water:
            self.on_low()
        self.deliver(item)

    def last_item_at(self) -> float | None:
        """Loop time of the last item, or None."""
        self._session.settle_steps_read()
        return self.last_arrival

    @property
    def peer_silent(self) -> bool:
        return self._session.peer_silent

    def stalled_s(self, since: float) -> float:
        return self._session.stalls.seconds_since(since)

    def finish(self, error: KvoltError | None) -> None:
        self.ended = True
        self._finish(error)

    def _grant(self, num_items: int) -> None:
        self.window_left += num_items
        self._session.grant(self.id, num_items)
