"""Server's end of a stream, sans-I/O.

Credit is counted in items. Without credit, or while the transport is full, a served stream puts items into its
backlog: deltas merge (token boundaries kept), other items queue up to a bound. Beyond it the stream ends with
Overloaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvolt.core.delta import Delta, merge_deltas
from kvolt.core.errors import MALFORMED, ErrorInfo, InvalidRequest, KvoltError, Overloaded, to_info
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.runtime.plane.streams import Body, Decode
from kvolt.runtime.plane.wire import Open
from kvolt.runtime.security.identity import Identity

BACKLOG_ITEMS = 1024
"""Backlog limit of a stream, in entries after merging deltas."""


class _DeltaRun(list[Delta]):
    """Consecutive deltas of one choice, merged when sent."""


class Backlog:
    """Items of a stream whose reader is slow.

    Keeps order, but deltas of one choice are collected and merged into one delta when they are sent, so each token
    costs a list entry and not a copy of all tokens before it.
    """

    __slots__ = ("_entries", "_open_runs")

    def __init__(self) -> None:
        self._entries: deque[Any] = deque()
        self._open_runs: dict[int, _DeltaRun] = {}
        """By choice: the run that still accepts deltas; a non-delta item closes all runs."""

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, item: Any) -> bool:
        """Append an item; True if it joined a queued delta of its choice."""
        if type(item) is not Delta:
            self._open_runs.clear()
            self._entries.append(item)
            return False
        run = self._open_runs.get(item.index)
        if run is not None and run[-1].finish is None:
            run.append(item)
            return True
        run = self._open_runs[item.index] = _DeltaRun((item,))
        self._entries.append(run)
        return False

    def push_front(self, items: Sequence[Any]) -> None:
        """Insert items before all queued ones."""
        self._entries.extendleft(reversed(items))

    def pop(self) -> Any:
        entry = self._entries.popleft()
        if type(entry) is not _DeltaRun:
            return entry
        if self._open_runs.get(entry[0].index) is entry:
            del self._open_runs[entry[0].index]
        return merge_deltas(entry)


class ServerHost(Protocol):
    """Interface of the session that a served stream needs."""

    paused: bool
    peer_silent: bool
    stats: PlaneStats

    @property
    def open_deltas(self) -> list[tuple[int, Any]] | None:
        """The DELTAS frame being filled, when it is the last thing queued."""
        ...

    step_owner: Any
    """The StepBatch with combined credit counting; call `settle_step` before reading a stream's own credit."""

    def settle_step(self) -> None: ...

    def queue_step(self, frame: bytes, num_items: int) -> None: ...

    def queue_item(self, stream: ServedStream, item: Any) -> None: ...

    def queue_end(self, stream: ServedStream) -> None: ...

    def mark_backlogged(self, stream: ServedStream) -> None: ...


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
        "peer_identity",
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
        self.peer_identity: Identity | None = None
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
            self.session.stats.merged += 1
        elif len(backlog) > BACKLOG_ITEMS:
            self.fail(Overloaded("the reader is too slow", queue="stream_backlog", limit=BACKLOG_ITEMS))
