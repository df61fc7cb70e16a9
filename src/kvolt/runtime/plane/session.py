"""Multiplexing of one connection, sans-I/O.

Both sides may open streams (the dialer uses odd ids, the acceptor even ones). A Session has no socket, loop or
clock: bytes enter through `receive` and leave through `drain_urgent` and `next_chunk`; it wakes its host when
there is something to send.

Order within one flush: control frames and opens, items of all streams (one DELTAS frame for all engine deltas
of a tick), ends, credit. Chunks of long messages are sent only when nothing urgent is queued.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from kvolt.core.delta import Delta
from kvolt.core.errors import (
    Cancelled,
    ConnectFailed,
    DeadlineExceeded,
    ErrorInfo,
    KvoltError,
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
    Unavailable,
    VersionMismatch,
    from_info,
    to_info,
)
from kvolt.runtime.plane import wire
from kvolt.runtime.plane.bulk import BulkReceiver, BulkSender, MessageKind
from kvolt.runtime.plane.outbox import Outbox, step_deltas
from kvolt.runtime.plane.stalls import Stalls
from kvolt.runtime.plane.stats import PlaneStats, outcome
from kvolt.runtime.plane.steps import StepBatch, StepReader, resolve_step
from kvolt.runtime.plane.streams import CallerStream, Decode, ServedStream, Sink
from kvolt.runtime.plane.wire import FrameKind

UNFINISHED_S = 60.0
"""Time limit for a frame or a message to arrive completely, and for the first piece of an announced message.
Longer than any tolerated stall."""


_STREAM_BYTES = 512


class Host(Protocol):
    """Interface of the driver that a session needs."""

    def wake(self) -> None:
        """Schedule a flush: there is something to send."""
        ...

    def on_hello(self, hello: wire.Hello) -> None: ...

    def on_open(self, stream: ServedStream) -> None:
        """A peer opened a stream and its request has arrived completely."""
        ...

    def report_callback_error(self, fault: Exception) -> None:
        """Report an exception raised by a stream owner's callback."""
        ...


@dataclass(frozen=True, slots=True)
class SessionLimits:
    max_frame_bytes: int = 1 << 20
    max_message_bytes: int = 64 << 20
    window_items: int = 256
    max_streams: int = 20_000


class Session:
    """The state of one connection."""

    def __init__(
        self, *, dialer: bool, hello: wire.Hello, limits: SessionLimits, host: Host, stats: PlaneStats
    ) -> None:
        self._host = host
        self._limits = limits
        self._hello = hello
        self._next_id = 1 if dialer else 2
        self._peer_parity = 0 if dialer else 1
        self._last_peer_id = 0
        self._decoder = wire.FrameDecoder(limits.max_frame_bytes, wire.MAX_HELLO_BYTES)
        self._frame_started_at: float | None = None
        """Arrival time of the first byte of the incomplete frame."""
        self._calls: dict[int, CallerStream] = {}
        self._served: dict[int, ServedStream] = {}
        self._pending_opens: dict[int, wire.Open] = {}
        """Streams opened by the peer whose chunked request is still arriving."""
        self._pending_open_bytes = 0
        self._bulk_receiver = BulkReceiver(limits.max_message_bytes)
        self._bulk_sender = BulkSender()
        self._hello_frame: bytes | None = wire.frame(FrameKind.HELLO, 0, wire.encode(hello))
        self._control: list[bytes] = []
        self._outbox = Outbox(self._served, self._bulk_sender, stats, self._check_size, self.settle_step)
        self.step_owner: StepBatch | None = None
        self._step_reader: StepReader | None = None
        self._ends: list[ServedStream] = []
        self._refusals: list[tuple[int, ErrorInfo | None]] = []
        self._credits: dict[int, int] = {}
        self._backlogged: dict[int, ServedStream] = {}
        self._now = 0.0
        self._closed = False
        self.peer: wire.Hello | None = None
        """The peer's hello, once received with a common version."""
        self.version: int | None = None
        self.going_away = False
        self.peer_going_away = False
        self.paused = False
        """The transport is full: streams put their items into the backlog."""
        self.peer_silent = False
        """Nothing has arrived for a while: the peer may be stalled."""
        self.stalls = Stalls()
        """Stalls of this process or the peer."""
        self.stats = stats

    @property
    def open_deltas(self) -> list[tuple[int, Any]] | None:
        """The DELTAS frame being filled; streams append to it directly."""
        return self._outbox.open_deltas

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def num_served(self) -> int:
        return len(self._served)

    @property
    def num_backlogged(self) -> int:
        """Served streams with a backlog, because of a slow reader or a full transport."""
        return len(self._backlogged)

    @property
    def num_bulk(self) -> int:
        """Long messages queued or being sent."""
        return len(self._bulk_sender)

    @property
    def exhausted(self) -> bool:
        """All stream ids have been used: new streams need a new connection."""
        return self._next_id > wire.MAX_STREAM_ID

    @property
    def has_bulk(self) -> bool:
        return bool(self._bulk_sender)

    @property
    def bulk_ready(self) -> bool:
        """Whether a chunk may be sent now."""
        return self._bulk_sender.ready

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

    def grant(self, stream_id: int, num_items: int) -> None:
        self._credits[stream_id] = self._credits.get(stream_id, 0) + num_items
        self._host.wake()

    # --- serving

    def queue_item(self, stream: ServedStream, item: Any) -> None:
        self._outbox.append_item(stream.id, item)
        self._host.wake()

    def queue_step(self, frame: bytes, num_items: int) -> None:
        """Queue one token for each member of a batch; the batch has checked its credit."""
        self._outbox.append_step(frame, num_items)
        self._host.wake()

    def settle_step(self) -> None:
        """End combined credit counting, so that each stream knows its own credit again."""
        owner, self.step_owner = self.step_owner, None
        if owner is not None:
            owner.settle()

    def settle_steps_read(self) -> None:
        if self._step_reader is not None:
            self._step_reader.settle()

    def _drop_step_reader(self) -> None:
        """Discard the cached step members after one of them ended."""
        if self._step_reader is not None:
            self._step_reader.settle()
            self._step_reader = None

    def queue_end(self, stream: ServedStream) -> None:
        self._ends.append(stream)
        self._host.wake()

    def mark_backlogged(self, stream: ServedStream) -> None:
        self._backlogged[stream.id] = stream

    def count_merge(self) -> None:
        self.stats.merged += 1

    # --- the connection

    def go_away(self) -> None:
        """Refuse new streams from now on, and notify the peer."""
        if not self.going_away:
            self.going_away = True
            self._control.append(wire.frame(FrameKind.GOAWAY, 0))
            self._host.wake()

    def ping(self) -> None:
        self._control.append(wire.frame(FrameKind.PING, 0))
        self._host.wake()

    def resume(self) -> None:
        """The transport has room again: send the backlogs."""
        self.paused = False
        backlogged, self._backlogged = self._backlogged, {}
        for stream in backlogged.values():
            if not stream.closed:
                stream.flush_backlog()
                if stream.has_backlog:
                    self._backlogged[stream.id] = stream

    def set_peer_silent(self, silent: bool) -> None:
        """Set whether the peer may be stalled, and notify the served streams."""
        self.peer_silent = silent
        for stream in list(self._served.values()):
            if stream.on_silent is not None:
                stream.on_silent(silent)

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
        for call in calls.values():
            try:
                call.finish(error)
            except Exception as fault:  # a faulty sink must not keep the other streams from ending
                self._host.report_callback_error(fault)
        for stream in served.values():
            try:
                stream.abort(error)
            except Exception as fault:
                self._host.report_callback_error(fault)

    # --- sending

    def drain_urgent(self) -> list[bytes]:
        """Everything but chunks, in as few frames as possible.

        Before the peer's hello only our own hello is sent: a refusal must not race with a request.
        """
        out: list[bytes] = []
        if self._hello_frame is not None:
            out.append(self._hello_frame)
            self._hello_frame = None
        if self.peer is None:
            self.stats.frames_out += len(out)
            return out
        if self._control:
            out += self._control
            self._control = []
        if self._outbox:
            self._outbox.drain_into(out)
        if self._ends or self._refusals:
            self._encode_ends(out)
        if self._credits:
            _append_frames(FrameKind.CREDIT, list(self._credits.items()), out)
            self._credits = {}
        self.stats.frames_out += len(out)
        return out

    def next_chunk(self) -> bytes | None:
        """The next piece of a long message, or None."""
        if not self._bulk_sender.ready or self.peer is None:
            return None
        chunk, completed = self._bulk_sender.next_chunk()
        self.stats.frames_out += 1
        stream = self._served.get(completed) if completed is not None else None
        if stream is not None:
            stream.bulk = False
            stream.flush_backlog()
        return chunk

    def _encode_ends(self, out: list[bytes]) -> None:
        ends, self._refusals = self._refusals, []
        for stream in self._ends:
            if stream.closed or stream.has_backlog:
                continue  # closed, or one of its items became a bulk message: the end follows that
            stream.mark_closed()
            self._served.pop(stream.id, None)
            self._discard_stream(stream.id)
            ends.append((stream.id, stream.end_info))
            self.stats.served_ended["ok" if stream.end_info is None else stream.end_info.code] += 1
        self._ends = []
        if ends:
            _append_frames(FrameKind.ENDS, ends, out)

    def _check_size(self, what: str, size_bytes: int) -> None:
        limit = self.peer.max_message_bytes if self.peer else self._limits.max_message_bytes
        if size_bytes > limit:
            raise PayloadTooLarge(
                f"{what} of {size_bytes} bytes is over the limit of {limit}",
                limit_bytes=limit,
                size_bytes=size_bytes,
            )

    def _discard_stream(self, stream_id: int) -> None:
        """Discard all state of a stream that is over."""
        self._credits.pop(stream_id, None)
        self._backlogged.pop(stream_id, None)
        self._remove_pending_open(stream_id)
        self._bulk_receiver.drop_stream(stream_id)
        if self._bulk_sender:
            self._bulk_sender.drop_stream(stream_id)

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
            except wire.MALFORMED as error:
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
            except wire.MALFORMED:
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
                raise _decode_refusal(payload)
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
            raise _decode_refusal(payload)
        if kind != FrameKind.HELLO:
            raise ProtocolError("the first frame is not a hello", rule="hello")
        hello = wire.decode_hello(payload)
        ours = self._hello.versions
        version = wire.negotiate(ours, hello.versions)
        if version is None:
            raise VersionMismatch(
                f"no common protocol version: one side speaks {list(ours)}, the other {list(hello.versions)}; "
                "upgrade the older one",
                ours=str(list(ours)),
                theirs=str(list(hello.versions)),
            )
        if hello.max_frame_bytes < wire.MIN_FRAME_LIMIT_BYTES:
            raise ProtocolError("the peer's frame limit is below the chunk size", rule="hello")
        self.version = version
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

    def _refuse(self, stream_id: int, error: KvoltError) -> None:
        self._refusals.append((stream_id, to_info(error)))
        self._host.wake()

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
            match message.kind:
                case MessageKind.DELTA:
                    call.accept(wire.decode_delta(message.data), self._now)
                case MessageKind.BYTES:
                    call.accept_bytes(message.data, self._now)
                case MessageKind.ENCODED:
                    call.accept_raw(message.data, self._now)

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


def _decode_refusal(payload: bytes) -> ProtocolError:
    error = from_info(wire.decode_error(payload))
    return error if isinstance(error, ProtocolError) else ProtocolError(error.message, rule="refused")


def _append_frames(kind: FrameKind, entries: list[tuple[int, Any]], out: list[bytes]) -> None:
    """Append entries in as many frames as needed to keep each within a chunk."""
    payload = wire.encode(entries)
    if len(payload) <= wire.CHUNK_BYTES or len(entries) == 1:
        out.append(wire.frame(kind, 0, payload))
        return
    half = len(entries) // 2
    _append_frames(kind, entries[:half], out)
    _append_frames(kind, entries[half:], out)
