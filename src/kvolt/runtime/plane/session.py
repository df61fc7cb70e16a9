"""Multiplexing of one connection, sans-I/O.

Both sides may open streams (the dialer uses odd ids, the acceptor even ones). A Session has no socket, loop or
clock: bytes enter through `receive` and leave through `drain_urgent` and `next_chunk`; it wakes its host when
there is something to send. `sending` is its sending half.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from kvolt.core.delta import Delta
from kvolt.core.errors import (
    MALFORMED,
    Cancelled,
    ConnectFailed,
    DeadlineExceeded,
    KvoltError,
    Overloaded,
    ProtocolError,
    Unavailable,
    from_info,
    to_info,
)
from kvolt.runtime.plane import wire
from kvolt.runtime.plane.bulk import BulkReceiver
from kvolt.runtime.plane.outbox import step_deltas
from kvolt.runtime.plane.sending import Driver, SendingSide
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.stats import PlaneStats, outcome
from kvolt.runtime.plane.steps import StepReader, resolve_step
from kvolt.runtime.plane.streams import CallerStream, Decode, Sink, Stalls
from kvolt.runtime.plane.wire import FrameKind

UNFINISHED_S = 60.0
"""Time limit for a frame or a message to arrive completely. Longer than any tolerated stall."""

_STREAM_BYTES = 512


@dataclass(frozen=True, slots=True)
class SessionLimits:
    max_frame_bytes: int = 1 << 20
    max_message_bytes: int = 64 << 20
    window_items: int = 256
    max_streams: int = 20_000


class Session(SendingSide):
    """The state of one connection: its streams, and what arrives for them."""

    def __init__(
        self, *, dialer: bool, hello: wire.Hello, limits: SessionLimits, host: Driver, stats: PlaneStats
    ) -> None:
        super().__init__(hello, limits.max_message_bytes, host, stats)
        self._limits = limits
        self._hello = hello
        self._next_id = 1 if dialer else 2
        self._peer_parity = 0 if dialer else 1
        self._last_peer_id = 0
        self._decoder = wire.FrameDecoder(limits.max_frame_bytes, wire.MAX_HELLO_BYTES)
        self._frame_started_at: float | None = None
        """Arrival time of the first byte of the incomplete frame."""
        self._calls: dict[int, CallerStream] = {}
        self._pending_opens: dict[int, wire.Open] = {}
        """Streams opened by the peer whose chunked request is still arriving."""
        self._pending_open_bytes = 0
        self._bulk_receiver = BulkReceiver(limits.max_message_bytes)
        self._step_reader: StepReader | None = None
        self._now = 0.0
        self._closed = False
        self.version: int | None = None
        self.peer_going_away = False
        self.stalls = Stalls()
        """Stalls of this process or the peer."""

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def exhausted(self) -> bool:
        """All stream ids have been used: new streams need a new connection."""
        return self._next_id > wire.MAX_STREAM_ID

    # --- calling

    def open(
        self,
        target: str,
        body: bytes,
        sink: Sink,
        decode: Decode,
        deadline_s: float | None = None,
        context: dict[str, str] | None = None,
        automatic_credit: bool = False,
    ) -> CallerStream:
        """Open a stream. `body` is the encoded request; `decode` turns an item's bytes into the item."""
        limits = self._limits
        self._check_size("a request", len(body))
        if len(self._calls) >= limits.max_streams:
            raise Overloaded("too many streams on one connection", queue="streams", limit=limits.max_streams)
        stream_id = self._next_id
        if self._closed or stream_id > wire.MAX_STREAM_ID:
            raise ConnectFailed("the connection accepts no more streams")
        self._next_id += 2
        stream = CallerStream(self, stream_id, sink, decode, limits.window_items, automatic_credit)
        self._calls[stream_id] = stream
        chunked = len(body) > wire.CHUNK_BYTES
        inline = msgspec.Raw(wire.NIL if chunked else body)
        opening = wire.Open(target, limits.window_items, deadline_s, context or {}, chunked, inline)
        self._control.append(wire.frame(FrameKind.OPEN, stream_id, wire.encode(opening)))
        if chunked:
            self._bulk_sender.enqueue(stream_id, body)
        self._host.wake()
        return stream

    def cancel_call(self, stream_id: int) -> None:
        call = self._calls.pop(stream_id, None)
        if call is not None:
            if self._step_reader is not None:
                self._step_reader.mute(call)
                self._drop_step_reader()
            self.stats.calls_ended["cancelled"] += 1
            self._discard_stream(stream_id)
            # Ordered with the opens: the next open may reuse a limit or a request id freed by this cancel.
            self._control.append(wire.frame(FrameKind.CANCEL, stream_id))
            self._host.wake()

    def settle_steps_read(self) -> None:
        if self._step_reader is not None:
            self._step_reader.settle()

    def _drop_step_reader(self) -> None:
        """Discard the cached step members after one of them ended."""
        self.settle_steps_read()
        self._step_reader = None

    # --- the connection

    def close(self, error: KvoltError) -> None:
        """End every stream in the order of opening: the connection is gone."""
        self._closed = True
        self._drop_step_reader()
        self.settle_step()
        calls, self._calls = self._calls, {}
        served, self._served = self._served, {}
        self._pending_opens.clear()
        self._pending_open_bytes = 0
        self._decoder.clear()
        self._bulk_receiver.clear()
        self._bulk_sender.clear()
        self._outbox.clear()
        self._ends.clear()
        self._backlogged.clear()
        self.stats.calls_ended[outcome(error)] += len(calls)
        self.stats.served_ended[outcome(error)] += len(served)
        calls_ending = [call.finish for call in calls.values()]
        for end_stream in (*calls_ending, *(stream.abort for stream in served.values())):
            try:
                end_stream(error)
            except Exception as fault:  # a faulty owner must not keep the other streams from ending
                self._host.report_callback_error(fault)

    def _discard_stream(self, stream_id: int) -> None:
        """Discard all state of a stream that is over."""
        self._drop_queued(stream_id)
        self._remove_pending_open(stream_id)
        self._bulk_receiver.drop_stream(stream_id)

    def _remove_pending_open(self, stream_id: int) -> None:
        opening = self._pending_opens.pop(stream_id, None)
        if opening is not None:
            self._pending_open_bytes -= _open_size_bytes(opening)

    # --- receiving

    def receive(self, data: bytes, now: float = 0.0) -> None:
        """Handle bytes from the peer. On ProtocolError the caller sends `refusal`, then closes both."""
        self._now = now
        frames = self._decoder.feed(data)
        if not self._decoder.buffered_bytes:
            self._frame_started_at = None
        elif frames or self._frame_started_at is None:
            self._frame_started_at = now
        self.stats.frames_in += len(frames)
        for kind, stream_id, payload in frames:
            try:
                self._handle(kind, stream_id, payload)
            except MALFORMED as error:
                name = FrameKind(kind).name
                raise ProtocolError(f"a {name} frame does not decode: {error}", rule="payload") from error

    @property
    def unfinished_bytes(self) -> int:
        """Bytes buffered for incomplete frames and messages."""
        return self._decoder.buffered_bytes + self._bulk_receiver.buffered_bytes + self._pending_open_bytes

    def drop_messages(self) -> bool:
        """Refuse all incomplete messages to free their memory. False if there is none."""
        streams = dict.fromkeys((*self._bulk_receiver.streams, *self._pending_opens))
        for stream_id in streams:
            self._drop_message(
                stream_id,
                Overloaded("too much unfinished data from this address", queue="unfinished_messages"),
            )
        return bool(streams)

    def expire_unfinished(self, now: float, stalled_s: float) -> None:
        """Refuse messages that take too long to arrive. Raises ProtocolError if a frame does.

        `stalled_s`: stall of this process since the last call, during which nothing could arrive.
        """
        self._bulk_receiver.extend_deadlines(stalled_s)
        if self._frame_started_at is not None:
            self._frame_started_at += stalled_s
        for stream_id in self._bulk_receiver.started_before(now - UNFINISHED_S):
            self._drop_message(
                stream_id,
                DeadlineExceeded(
                    "a message did not arrive completely in time", stage="total", after_s=UNFINISHED_S
                ),
            )
        if self._frame_started_at is not None and self._frame_started_at < now - UNFINISHED_S:
            raise ProtocolError(f"a frame did not arrive completely within {UNFINISHED_S:g} s", rule="slow")

    def _drop_message(self, stream_id: int, error: KvoltError) -> None:
        call = self._calls.get(stream_id)
        if call is not None:
            self.cancel_call(stream_id)
            call.finish(error)
        else:
            self._discard_stream(stream_id)
            self._refuse(stream_id, error)

    def refusal(self, error: KvoltError) -> bytes:
        """The last frame, which contains the reason why the connection is closed."""
        return wire.frame(FrameKind.REFUSE, 0, wire.encode(to_info(error)))

    def _handle(self, kind: int, stream_id: int, payload: bytes) -> None:
        if self.peer is None:
            self._on_handshake(kind, payload)
            return
        if kind == FrameKind.STEP:
            self._on_step(payload)
            return
        self.settle_steps_read()
        if kind == FrameKind.DELTAS:
            try:
                deltas = wire.decode_deltas(payload)
            except MALFORMED:
                self._on_items(wire.decode_items(payload), wire.decode_delta)  # one may have a newer version
            else:
                self._on_deltas(deltas)
            return
        match kind:
            case FrameKind.ITEMS:
                self._on_items(wire.decode_items(payload))
            case FrameKind.CHUNK:
                self._on_chunk(stream_id, payload)
            case FrameKind.OPEN:
                if len(payload) > wire.MAX_OPEN_BYTES:
                    raise ProtocolError(f"an open of {len(payload)} bytes", rule="open_size")
                self._on_open(stream_id, wire.decode_open(payload))
            case FrameKind.ENDS:
                for target, info in wire.decode_ends(payload):
                    call = self._calls.pop(target, None)
                    if call is not None:
                        self._drop_step_reader()
                        self._discard_stream(target)
                        error = None if info is None else from_info(info)
                        self.stats.calls_ended[outcome(error)] += 1
                        call.finish(error)
            case FrameKind.CANCEL:
                self._on_cancel(stream_id)
            case FrameKind.CREDIT:
                self._on_credit(wire.decode_credit(payload))
            case FrameKind.PING:
                pass  # received bytes are the whole point
            case FrameKind.GOAWAY:
                self.peer_going_away = True
            case FrameKind.REFUSE:
                raise wire.decode_refusal(payload)
            case _:
                raise ProtocolError("a second hello", rule="hello")

    def _on_items(self, items: list[tuple[int, msgspec.Raw]], decode: Decode | None = None) -> None:
        self.stats.items_in += len(items)
        for target, raw in items:
            call = self._calls.get(target)
            if call is not None:
                call.accept_raw(raw, self._now, decode)

    def _on_deltas(self, deltas: list[tuple[int, Delta]]) -> None:
        calls = self._calls
        now = self._now
        self.stats.items_in += len(deltas)
        for target, delta in deltas:
            call = calls.get(target)
            if call is not None:  # else cancelled while in transit
                call.last_arrival = now
                call.window_left = left = call.window_left - 1
                if left < call.low_water:
                    call.on_low()
                call.deliver(delta)

    def _on_step(self, payload: bytes) -> None:
        reader = self._step_reader
        if reader is None or len(payload) != 2 * len(reader.ids) or not payload.startswith(reader.ids):
            if len(payload) % 8 or not payload:
                raise ProtocolError("a step of unequal arrays", rule="step")
            self._drop_step_reader()
            reader = self._step_reader = resolve_step(payload[: len(payload) // 2], self._calls)
            if reader is None:
                self._on_deltas(step_deltas(payload))
                return
        self.stats.items_in += reader.receive(payload, self._now)

    def _on_handshake(self, kind: int, payload: bytes) -> None:
        if kind == FrameKind.REFUSE:
            raise wire.decode_refusal(payload)
        if kind != FrameKind.HELLO:
            raise ProtocolError("the first frame is not a hello", rule="hello")
        hello = wire.decode_hello(payload)
        self.version = wire.check_hello(hello, self._hello.versions)
        self.peer = hello
        self._host.on_hello(hello)
        self._host.wake()

    def _on_open(self, stream_id: int, opening: wire.Open) -> None:
        if stream_id % 2 != self._peer_parity or stream_id <= self._last_peer_id:
            raise ProtocolError(f"stream id {stream_id} is not the peer's next", rule="stream_id")
        if opening.window < 1:
            raise ProtocolError("a stream without a window", rule="window")
        if opening.deadline_s is not None and not opening.deadline_s >= 0:
            raise ProtocolError("a deadline is negative or not a number", rule="deadline")
        self._last_peer_id = stream_id
        limit = self._limits.max_streams
        if self.going_away:
            self._refuse(stream_id, Unavailable("the process is going away", reason="draining"))
        elif len(self._served) + len(self._pending_opens) >= limit:
            self._refuse(
                stream_id, Overloaded("too many streams on one connection", queue="streams", limit=limit)
            )
        elif opening.chunked:
            self._pending_opens[stream_id] = opening
            self._pending_open_bytes += _open_size_bytes(opening)
            self._bulk_receiver.expect_message(stream_id, self._now)
        else:
            self._serve(stream_id, opening, opening.body)

    def _serve(self, stream_id: int, opening: wire.Open, body: bytes | msgspec.Raw) -> None:
        stream = self._served[stream_id] = ServedStream(self, stream_id, opening, body)
        self._host.on_open(stream)

    def _on_chunk(self, stream_id: int, payload: bytes) -> None:
        due_bytes = self._bulk_receiver.ack_due_bytes(payload)
        if due_bytes:
            self.grant(0, due_bytes)
        opening = self._pending_opens.get(stream_id)
        call = self._calls.get(stream_id)
        if opening is None and call is None:
            return  # cancelled, refused or over: ignore the remaining pieces
        message = self._bulk_receiver.receive_chunk(stream_id, payload, self._now)
        if message is None:
            return
        if opening is not None:
            self._remove_pending_open(stream_id)
            self._serve(stream_id, opening, message.data)
        elif call is not None:
            self.stats.items_in += 1
            call.accept_message(message, self._now)

    def _on_cancel(self, stream_id: int) -> None:
        if stream_id % 2 != self._peer_parity:
            raise ProtocolError(f"stream {stream_id} is not the peer's to cancel", rule="stream_id")
        stream = self._served.pop(stream_id, None)
        self._discard_stream(stream_id)
        if stream is not None:
            self.stats.served_ended["cancelled"] += 1
            stream.abort(Cancelled("the caller cancelled"))

    def _on_credit(self, credits: list[tuple[int, int]]) -> None:
        for stream_id, num_items in credits:
            if num_items < 1:
                raise ProtocolError("credit must be positive", rule="credit")
            if stream_id == 0:
                self._bulk_sender.ack_bytes(num_items)
                self._host.wake()
                continue
            stream = self._served.get(stream_id)
            if stream is not None:
                stream.add_credit(num_items)


def _open_size_bytes(opening: wire.Open) -> int:
    """Approximate memory of a stream whose request has not arrived."""
    texts = [opening.target, *opening.context, *opening.context.values()]
    return _STREAM_BYTES + sum(map(len, texts))
