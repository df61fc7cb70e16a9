"""Sending half of a session, sans-I/O: what is queued for the peer, and the order in which it leaves.

Order within one flush: control frames and opens, items of all streams (one DELTAS frame for all engine deltas of a
tick), ends, credit. Chunks of long messages are sent only when nothing urgent is queued.
"""

from __future__ import annotations

from typing import Any, Protocol

from kvolt.core.errors import ErrorInfo, KvoltError, PayloadTooLarge, to_info
from kvolt.runtime.plane import wire
from kvolt.runtime.plane.bulk import BulkSender
from kvolt.runtime.plane.outbox import Outbox
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.runtime.plane.steps import StepBatch
from kvolt.runtime.plane.wire import FrameKind


class Driver(Protocol):
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


class SendingSide:
    """Queues of one connection. Wakes its host when there is something to send."""

    def __init__(self, hello: wire.Hello, max_message_bytes: int, host: Driver, stats: PlaneStats) -> None:
        self._host = host
        self._max_message_bytes = max_message_bytes
        self._served: dict[int, ServedStream] = {}
        self._hello_frame: bytes | None = wire.frame(FrameKind.HELLO, 0, wire.encode(hello))
        self._control: list[bytes] = []
        self._bulk_sender = BulkSender()
        self._outbox = Outbox(self._served, self._bulk_sender, stats, self._check_size, self.settle_step)
        self._ends: list[ServedStream] = []
        self._refusals: list[tuple[int, ErrorInfo | None]] = []
        self._credits: dict[int, int] = {}
        self._backlogged: dict[int, ServedStream] = {}
        self.step_owner: StepBatch | None = None
        self.peer: wire.Hello | None = None
        """The peer's hello, once received with a common version."""
        self.going_away = False
        self.paused = False
        """The transport is full: streams put their items into the backlog."""
        self.peer_silent = False
        """Nothing has arrived for a while: the peer may be stalled."""
        self.stats = stats

    @property
    def open_deltas(self) -> list[tuple[int, Any]] | None:
        """The DELTAS frame being filled; streams append to it directly."""
        return self._outbox.open_deltas

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
    def bulk_ready(self) -> bool:
        """Whether a chunk may be sent now."""
        return self._bulk_sender.ready

    # --- queueing

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

    def queue_end(self, stream: ServedStream) -> None:
        self._ends.append(stream)
        self._host.wake()

    def mark_backlogged(self, stream: ServedStream) -> None:
        self._backlogged[stream.id] = stream

    def grant(self, stream_id: int, num_items: int) -> None:
        self._credits[stream_id] = self._credits.get(stream_id, 0) + num_items
        self._host.wake()

    def _refuse(self, stream_id: int, error: KvoltError) -> None:
        self._refusals.append((stream_id, to_info(error)))
        self._host.wake()

    def go_away(self) -> None:
        """Refuse new streams from now on, and notify the peer."""
        if not self.going_away:
            self.going_away = True
            self._control.append(wire.frame(FrameKind.GOAWAY, 0))
            self._host.wake()

    def ping(self) -> None:
        self._control.append(wire.frame(FrameKind.PING, 0))
        self._host.wake()

    # --- states of the connection

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
            self._drop_queued(stream.id)
            ends.append((stream.id, stream.end_info))
            self.stats.served_ended["ok" if stream.end_info is None else stream.end_info.code] += 1
        self._ends = []
        if ends:
            _append_frames(FrameKind.ENDS, ends, out)

    def _drop_queued(self, stream_id: int) -> None:
        """Discard what is queued for a stream that is over."""
        self._credits.pop(stream_id, None)
        self._backlogged.pop(stream_id, None)
        if self._bulk_sender:
            self._bulk_sender.drop_stream(stream_id)

    def _check_size(self, what: str, size_bytes: int) -> None:
        limit = self.peer.max_message_bytes if self.peer else self._max_message_bytes
        if size_bytes > limit:
            raise PayloadTooLarge(
                f"{what} of {size_bytes} bytes is over the limit of {limit}",
                limit_bytes=limit,
                size_bytes=size_bytes,
            )


def _append_frames(kind: FrameKind, entries: list[tuple[int, Any]], out: list[bytes]) -> None:
    """Append entries in as many frames as needed to keep each within a chunk."""
    payload = wire.encode(entries)
    if len(payload) <= wire.CHUNK_BYTES or len(entries) == 1:
        out.append(wire.frame(kind, 0, payload))
        return
    half = len(entries) // 2
    _append_frames(kind, entries[:half], out)
    _append_frames(kind, entries[half:], out)
