"""The two ends of a stream, sans-I/O: the caller's, and the one that serves it.

Credit is counted in items. A served stream without credit, or with a transport that is full, keeps
items back: deltas merge (token boundaries kept), other items queue up to a bound; over it the
stream ends with Overloaded.
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
"""Items that do not merge which a stream without credit may keep back."""

Body = bytes | msgspec.Raw
Decode = Callable[[Body], Any]

_SOME_BYTES = msgspec.msgpack.encode(b"")


class Sink(Protocol):
    """Where a caller's stream delivers to. Called from the loop's read path: must not raise or block."""

    def on_item(self, item: Any) -> None: ...

    def on_end(self, error: KvoltError | None) -> None:
        """Once, after the last item; not called after `CallerStream.cancel`."""
        ...


class StepSink(Protocol):
    """Takes the plain tokens of a whole step in one call, for sinks that share it.

    A sink names it in an attribute `steps`. When all members of a step do, it is called in their place;
    everything that is not a plain token still goes to the sinks.
    """

    def on_step(self, sinks: Sequence[Sink], token_ids: Sequence[int]) -> None:
        """One token for each sink, in order. The same list of sinks comes again while the batch stays."""
        ...


def _innermost(sink: Sink) -> Sink:
    while (inner := getattr(sink, "sink", None)) is not None:
        sink = inner
    return sink


class CallerHost(Protocol):
    """What a caller's stream needs of its session."""

    peer_silent: bool
    stalls: Stalls

    def grant(self, stream_id: int, num_items: int) -> None: ...

    def cancel_call(self, stream_id: int) -> None: ...

    def settle_steps_read(self) -> None: ...


class ServerHost(Protocol):
    """What a served stream needs of its session."""

    paused: bool
    peer_silent: bool

    @property
    def open_deltas(self) -> list[tuple[int, Any]] | None:
        """The DELTAS frame being filled, when it is the last thing queued."""
        ...

    @property
    def step_owner(self) -> object | None:
        """The batch that counts credit for its members together; settle before looking at a stream's own."""
        ...

    def settle_step(self) -> None: ...

    def queue_item(self, stream: ServedStream, item: Any) -> None: ...

    def queue_end(self, stream: ServedStream) -> None: ...

    def hold(self, stream: ServedStream) -> None: ...

    def count_merge(self) -> None: ...


class CallerStream:
    """Our end of a stream that we opened.

    With `automatic` credit an item counts as read when it is delivered, until `hold`; otherwise the
    reader says what it has taken by `consumed`. Credit goes back half a window at a time.

    The session's receive loop reads and writes the public fields itself: it runs once per token.
    """

    __slots__ = (
        "_automatic",
        "_decode",
        "_finish",
        "_session",
        "_unread_back",
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
        self._unread_back = 0
        """Items taken by the reader and not yet given back as credit."""
        self.id = stream_id
        self.ended = False
        self.deliver = sink.on_item
        self.steps: StepSink | None = getattr(sink, "steps", None)
        self.sink = _innermost(sink)
        """The caller's own, behind whatever watches the call: what a StepSink is given."""
        self.window_left = window
        """Items that the peer may still send."""
        self.low_water = (window + 1) // 2 if automatic else 0
        """Below this `on_low` is called; 0 without automatic credit."""
        self.last_arrival: float | None = None

    def on_low(self) -> None:
        """The window is half empty (automatic credit), or overdrawn."""
        if self.window_left < 0:
            raise ProtocolError(f"stream {self.id} sent more than its credit", rule="credit")
        if self.low_water and self.window_left < self._window:
            self._grant(self._window - self.window_left)

    def consumed(self, num_items: int) -> None:
        """The reader took items. Only for a stream without automatic credit."""
        self._unread_back += num_items
        if self._unread_back * 2 >= self._window and not self.ended:
            num_items, self._unread_back = self._unread_back, 0
            self._grant(num_items)

    @property
    def held(self) -> bool:
        """The reader is behind and has said so."""
        return self._automatic and self.low_water == 0

    def hold(self) -> None:
        """Give no more automatic credit: the reader is behind."""
        self._session.settle_steps_read()
        self.low_water = 0

    def release(self) -> None:
        """The reader has caught up."""
        self._session.settle_steps_read()
        if self._automatic and not self.ended:
            self.low_water = (self._window + 1) // 2
            if self.window_left < self.low_water:
                self._grant(self._window - self.window_left)

    def cancel(self) -> None:
        """Tell the peer to stop; nothing more is delivered, not even an end."""
        if not self.ended:
            self.ended = True
            self._session.cancel_call(self.id)

    def accept_raw(self, raw: Body, now: float, decode: Decode | None = None) -> None:
        """An item by itself. One that does not decode ends this stream, not the others' connection."""
        try:
            item = (decode or self._decode)(raw)
        except (*MALFORMED, KvoltError) as error:
            self._break_off(error)
        else:
            self.accept(item, now)

    def accept_bytes(self, item: bytes, now: float) -> None:
        """A byte string that came unencoded, to a decoder that would have let a short one through."""
        try:
            self._decode(_SOME_BYTES)
        except (*MALFORMED, KvoltError) as error:
            self._break_off(error)
        else:
            self.accept(item, now)

    def _break_off(self, error: Exception) -> None:
        self.cancel()
        self._finish(ProtocolError(f"stream {self.id}: an item does not decode: {error}", rule="item"))

    def accept(self, item: Any, now: float) -> None:
        self.last_arrival = now
        self.window_left -= 1
        if self.window_left < self.low_water:
            self.on_low()
        self.deliver(item)

    def seen_at(self) -> float | None:
        """When its last item came."""
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
    """Our end of a stream that the peer opened: the request comes whole, answers go out one by one."""

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
        """A message of this stream is being sent in pieces; what follows waits for it."""
        self.ending = False
        """We have said the last word; some of it may still be kept back."""
        self.closed = False
        """Nothing more leaves: the peer has the end, or has given up, or is gone."""
        self.end_info: ErrorInfo | None = None
        self.on_cancel: Callable[[KvoltError], None] | None = None
        """Called once when the peer gives up, the connection is lost, or the backlog overflows."""
        self.on_writable: Callable[[], None] | None = None
        """Called when `send` would go through again after items were kept back."""
        self.on_closed: Callable[[], None] | None = None
        """Called once when the stream is over, however it ended."""
        self.on_released: Callable[[], None] | None = None
        """Called once then, too, and first: for the plane, which counts open streams."""
        self.on_silent: Callable[[bool], None] | None = None
        """Called when the peer falls silent, and when it answers again."""

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
        """The request, decoded once; its bytes are let go. InvalidRequest when they are not that."""
        body, self.body = self.body, b""
        try:
            return decode(body)
        except MALFORMED as error:
            raise InvalidRequest(f"the request does not decode: {error}", param="body") from error

    def send(self, item: Any) -> None:
        """An item for the next frame. What is sent to a stream that has ended vanishes: its reader is gone."""
        if self.ending or self.closed:
            return
        session = self.session
        if session.step_owner is not None:
            session.settle_step()
        if self.credit > 0 and self._backlog is None and not self.bulk and not session.paused:
            self.credit -= 1
            open_deltas = session.open_deltas
            if open_deltas is not None and type(item) is Delta:
                open_deltas.append((self.id, item))  # what queue_item does, without the calls
            else:
                session.queue_item(self, item)
        else:
            self._keep_back(item)

    def end(self, error: BaseException | None = None) -> None:
        """The last word; what is kept back goes first. A second end is ignored."""
        if self.ending or self.closed:
            return
        self.session.settle_step()
        self.ending = True
        self.end_info = None if error is None else to_info(error)
        if not self.has_backlog:
            self.session.queue_end(self)

    def put_back(self, items: list[Any]) -> None:
        """Items that were sent but must wait behind a bulk message after all, before what is kept back."""
        self.credit += len(items)
        if self._backlog is None:
            self._backlog = Backlog()
            self.session.hold(self)
        self._backlog.add_first(items)

    def add_credit(self, num_items: int) -> None:
        self.credit += num_items
        self.release()

    def release(self) -> None:
        """Let go of what was kept back, as far as credit and transport allow."""
        self.session.settle_step()
        backlog = self._backlog
        while backlog and self.credit > 0 and not self.bulk and not self.session.paused:
            self.credit -= 1
            self.session.queue_item(self, backlog.take())
        if backlog or self.bulk:
            return
        self._backlog = None
        if self.ending:
            self.session.queue_end(self)
        elif self.on_writable is not None:
            if self.writable:
                self.on_writable()
            elif self.session.paused:
                self.session.hold(self)  # so that the end of the pause is told

    def give_up(self, error: KvoltError) -> None:
        """Nobody reads this any more: tell the producer, once."""
        if self.closed:
            return
        self.session.settle_step()
        self._backlog = None
        self.body = b""
        told, self.on_cancel = self.on_cancel, None
        try:
            if told is not None and not self.ending:
                told(error)
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
        """End with an error in place of all that is kept back, and tell the producer."""
        if not self.ending:
            self.break_off(error)

    def break_off(self, error: KvoltError) -> None:
        """As `fail`, also in place of an end that was said already: an item before it cannot leave."""
        if self.closed:
            return
        self.session.settle_step()
        self._backlog = None
        self.end_info = to_info(error)
        self.session.queue_end(self)
        producing, self.ending = not self.ending, True
        if producing and self.on_cancel is not None:
            self.on_cancel(error)

    def _keep_back(self, item: Any) -> None:
        backlog = self._backlog
        if backlog is None:
            backlog = self._backlog = Backlog()
            self.session.hold(self)
        if backlog.add(item):
            self.session.count_merge()
        elif len(backlog) > BACKLOG_ITEMS:
            self.fail(Overloaded("the reader is too slow", queue="stream_backlog", limit=BACKLOG_ITEMS))
