"""Both ends of a stream, sans-I/O: CallerStream and ServedStream.

Credit is counted in items. Without credit, or while the transport is full, a served stream puts items into its
backlog: deltas merge (token boundaries kept), other items queue up to a bound. Beyond it the stream ends with
Overloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from kvolt.core.delta import Delta
from kvolt.core.errors import ErrorInfo, InvalidRequest, KvoltError, Overloaded, ProtocolError, to_info
from kvolt.runtime.plane.backlog import Backlog
from kvolt.runtime.plane.stalls import Stalls
from kvolt.runtime.plane.wire import MALFORMED, Open

BACKLOG_ITEMS = 1024
"""Backlog limit of a stream, in entries after merging deltas."""

Body = bytes | msgspec.Raw
Decode = Callable[[Body], Any]

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


class CallerHost(Protocol):
    """Interface of the session that a caller's stream needs."""

    peer_silent: bool
    stalls: Stalls

    def grant(self, stream_id: int, num_items: int) -> None: ...

    def cancel_call(self, stream_id: int) -> None: ...

    def settle_steps_read(self) -> None: ...


class ServerHost(Protocol):
    """Interface of the session that a served stream needs."""

    paused: bool
    peer_silent: bool

    @property
    def open_deltas(self) -> list[tuple[int, Any]] | None:
        """The DELTAS frame being filled, when it is the last thing queued."""
        ...

    @property
    def step_owner(self) -> object | None:
        """The batch with combined credit counting; call `settle_step` before reading a stream's own credit."""
        ...

    def settle_step(self) -> None: ...

    def queue_item(self, stream: ServedStream, item: Any) -> None: ...

    def queue_end(self, stream: ServedStream) -> None: ...

    def mark_backlogged(self, stream: ServedStream) -> None: ...

    def count_merge(self) -> None: ...


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


class ServedStream:
    """Server's end of a stream: the request arrives complete, responses are sent one by one."""

    __slots__ = (
        "_backlog",
        "body",
        "bulk",
        "closed",
        "context",
        "credit",
        "deadline_s",
        "end_info",
        "ending",
        "id",
        "on_cancel",
        "on_closed",
        "on_released",
        "on_silent",
        "on_writable",
        "peer_host",
        "session",
        "target",
    )

    def __init__(self, session: ServerHost, stream_id: int, opening: Open, body: Body) -> None:
        self.session = session
        self.credit = opening.window
        self._backlog: Backlog | None = None
        self.id = stream_id
        self.target = opening.target
        self.deadline_s = opening.deadline_s
        self.context = opening.context
        self.body = body
        self.peer_host = "?"
        self.bulk = False
        """A message of this stream is being sent in chunks; later items wait for it."""
        self.ending = False
        """`end` was called; the backlog may still be unsent."""
        self.closed = False
        """Nothing more is sent: the end was sent, or the peer cancelled or is lost."""
        self.end_info: ErrorInfo | None = None
        self.on_cancel: Callable[[KvoltError], None] | None = None
        """Called once when the peer cancels, the connection is lost, or the backlog overflows."""
        self.on_writable: Callable[[], None] | None = None
        """Called when `send` would go through again after a backlog."""
        self.on_closed: Callable[[], None] | None = None
        """Called once when the stream is over, for any reason."""
        self.on_released: Callable[[], None] | None = None
        """Called once before `on_closed`; the plane counts open streams with it."""
        self.on_silent: Callable[[bool], None] | None = None
        """Called with True when the peer falls silent, and with False when it answers again."""

    @property
    def is_peer_silent(self) -> bool:
        return self.session.peer_silent

    @property
    def writable(self) -> bool:
        """Whether an item sent now would leave with the next frame."""
        self.session.settle_step()
        if self.ending or self.closed:
            return False
        return self.credit > 0 and self._backlog is None and not self.bulk and not self.session.paused

    @property
    def has_backlog(self) -> bool:
        return self._backlog is not None or self.bulk

    def decode_body(self, decode: Decode) -> Any:
        """Decode the request and free its bytes; call once. Raises InvalidRequest if it does not decode."""
        body, self.body = self.body, b""
        try:
            return decode(body)
        except MALFORMED as error:
            raise InvalidRequest(f"the request does not decode: {error}", param="body") from error

    def send(self, item: Any) -> None:
        """Queue an item for the next frame. Ignored after the stream has ended."""
        if self.ending or self.closed:
            return
        session = self.session
        if session.step_owner is not None:
            session.settle_step()
        if self.credit > 0 and self._backlog is None and not self.bulk and not session.paused:
            self.credit -= 1
            open_deltas = session.open_deltas
            if open_deltas is not None and type(item) is Delta:
                open_deltas.append((self.id, item))  # inlined queue_item
            else:
                session.queue_item(self, item)
        else:
            self._append_to_backlog(item)

    def end(self, error: BaseException | None = None) -> None:
        """End the stream after the backlog has been sent. A second end is ignored."""
        if self.ending or self.closed:
            return
        self.session.settle_step()
        self.ending = True
        self.end_info = None if error is None else to_info(error)
        if not self.has_backlog:
            self.session.queue_end(self)

    def requeue(self, items: list[Any]) -> None:
        """Return items to the front of the backlog: they must wait behind a bulk message."""
        self.credit += len(items)
        if self._backlog is None:
            self._backlog = Backlog()
            self.session.mark_backlogged(self)
        self._backlog.push_front(items)

    def add_credit(self, num_items: int) -> None:
        self.credit += num_items
        self.flush_backlog()

    def flush_backlog(self) -> None:
        """Send the backlog as far as credit and transport allow."""
        self.session.settle_step()
        backlog = self._backlog
        while backlog and self.credit > 0 and not self.bulk and not self.session.paused:
            self.credit -= 1
            self.session.queue_item(self, backlog.pop())
        if backlog or self.bulk:
            return
        self._backlog = None
        if self.ending:
            self.session.queue_end(self)
        elif self.on_writable is not None:
            if self.writable:
                self.on_writable()
            elif self.session.paused:
                self.session.mark_backlogged(self)  # so that on_writable is called after the pause

    def abort(self, error: KvoltError) -> None:
        """Drop the stream because its reader is gone; calls `on_cancel` unless it has ended."""
        if self.closed:
            return
        self.session.settle_step()
        self._backlog = None
        self.body = b""
        on_cancel, self.on_cancel = self.on_cancel, None
        try:
            if on_cancel is not None and not self.ending:
                on_cancel(error)
        finally:
            self.mark_closed()

    def mark_closed(self) -> None:
        self.closed = True
        release, self.on_released = self.on_released, None
        if release is not None:
            release()
        if self.on_closed is not None:
            self.on_closed()
            self.on_closed = None

    def fail(self, error: KvoltError) -> None:
        """End with an error, drop the backlog, and notify the producer. Ignored after `end`."""
        if not self.ending:
            self.force_fail(error)

    def force_fail(self, error: KvoltError) -> None:
        """Like `fail`, but also replaces an end whose backlog cannot be sent."""
        if self.closed:
            return
        self.session.settle_step()
        self._backlog = None
        self.end_info = to_info(error)
        self.session.queue_end(self)
        producing, self.ending = not self.ending, True
        if producing and self.on_cancel is not None:
            self.on_cancel(error)

    def _append_to_backlog(self, item: Any) -> None:
        backlog = self._backlog
        if backlog is None:
            backlog = self._backlog = Backlog()
            self.session.mark_backlogged(self)
        if backlog.push(item):
            self.session.count_merge()
        elif len(backlog) > BACKLOG_ITEMS:
            self.fail(Overloaded("the reader is too slow", queue="stream_backlog", limit=BACKLOG_ITEMS))
