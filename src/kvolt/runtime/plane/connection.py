"""Drives a Session over a byte stream: one write per loop tick, heartbeats, and peer liveness.

A peer whose socket closes is lost at once. A peer that is silent for `dead_after_s` while its socket stays open may
be stalled (stopped, swapping, out of CPU): it gets no new calls, and its streams are kept for `stall_grace_s`, unless
the same peer answers on another connection. Time in which this loop was stalled does not count as silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from kvolt.core.errors import KvoltError, NetworkFault, ProtocolError, VersionMismatch, WorkerLost
from kvolt.runtime.network import split_host, tune_socket
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.session import Session, SessionLimits
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.runtime.plane.wire import Hello
from kvolt.runtime.security.identity import Identity, peer_identity

log = logging.getLogger(__name__)

_PAUSE_ABOVE_BYTES = 1 << 20
_ABORT_ABOVE_BYTES = 16 << 20
_HELLO_TIMEOUT_S = 5.0
_MAX_PATIENCE_FACTOR = 5.0


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    heartbeat_s: float = 1.0
    dead_after_s: float = 3.0
    """A peer that is silent for this long gets no new calls."""
    limits: SessionLimits = field(default_factory=SessionLimits)
    stall_grace_s: float = 30.0
    """How long the streams of a silent peer are kept while its socket stays open."""


class Connection(asyncio.Protocol):
    """One connection to a peer process, dialed or accepted."""

    def __init__(
        self,
        *,
        dialer: bool,
        hello: Hello,
        options: ConnectionOptions,
        on_made: Callable[[Connection], ProtocolError | None],
        on_open: Callable[[Connection, ServedStream], None],
        on_ready: Callable[[Connection], None],
        on_closed: Callable[[Connection, KvoltError], None],
        on_silent: Callable[[Connection], None],
        stats: PlaneStats,
        budget: ByteBudget,
    ) -> None:
        self.session = Session(dialer=dialer, hello=hello, limits=options.limits, host=self, stats=stats)
        self.dialer = dialer
        self.peer_name = "?"
        self.peer_host = "?"
        self.peer_identity: Identity | None = None
        """From the peer's certificate; None without TLS."""
        self.is_admitted = False
        """Counted in the connections of the peer's address."""
        self.closed: KvoltError | None = None
        """Why the connection is over, once it is."""
        self.silent = False
        """Nothing arrived for `dead_after_s`; the peer may be stalled."""
        self._options = options
        self._admit = on_made
        self._serve = on_open
        self._notify_ready = on_ready
        self._notify_closed = on_closed
        self._notify_silence = on_silent
        self._stats = stats
        self._budget = budget
        self._counted_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._flush_scheduled = False
        self._busy = False
        self._made_at = 0.0
        self._last_received = 0.0
        self._silent_since = 0.0
        self._replaced_at: float | None = None
        """When a silent peer answered on another connection."""
        self._sent_since_beat = False
        self._beat: asyncio.TimerHandle | None = None
        self._beat_due = 0.0
        self._close_reason: KvoltError | None = None
        self._linger: asyncio.TimerHandle | None = None

    @property
    def ready(self) -> bool:
        """Usable for new calls."""
        session = self.session
        return (
            self.closed is None
            and not self.silent
            and session.peer is not None
            and not session.peer_going_away
            and not session.exhausted
        )

    @property
    def silent_s(self) -> float:
        """Seconds since the last received bytes."""
        return self._loop.time() - self._last_received

    @property
    def is_responsive(self) -> bool:
        """Bytes arrived within the last two heartbeats, the longest pause of a healthy peer."""
        peer = self.session.peer
        theirs_s = 0.0 if peer is None else peer.heartbeat_s
        return self.silent_s < 2 * max(self._options.heartbeat_s, theirs_s)

    @property
    def send_buffer_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self.closed is not None:  # aborted while the transport was being made
            self._transport.abort()
            return
        # Any byte that the socket does not accept at once blocks bulk; urgent frames may still be written up to
        # _PAUSE_ABOVE_BYTES. resume_writing is called when the buffer is empty again.
        # Not 0: a TLS transport would pause at 0 unsent bytes, and not resume.
        self._transport.set_write_buffer_limits(high=1)
        tune_socket(transport)
        self.peer_name = _name(transport.get_extra_info("peername"))
        self.peer_host = split_host(self.peer_name)[0]
        now = self._loop.time()
        self._made_at = self._last_received = now
        self.peer_identity = peer_identity(transport)
        self.is_admitted = True
        refusal = self._admit(self)
        if refusal is not None:
            self.refuse(refusal)
            return
        self._schedule_beat(now)
        self.wake()

    def data_received(self, data: bytes) -> None:
        self._last_received = self._loop.time()
        self._stats.bytes_in += len(data)
        if self._close_reason is not None:
            return
        if self.silent:
            self._set_silent(False)
        try:
            self.session.receive(data, self._last_received)
        except ProtocolError as error:
            if isinstance(error, VersionMismatch):
                self._stats.refused_versions += 1
            self.refuse(error)
            return
        self._count_unfinished()

    def _count_unfinished(self) -> None:
        num_bytes = self.session.unfinished_bytes
        if num_bytes != self._counted_bytes and self.closed is None:
            self._counted_bytes = num_bytes
            self._budget.set_held_bytes(self, num_bytes)

    def shed(self) -> None:
        """Free the incomplete messages: the byte budget is exceeded and this connection holds the most."""
        if not self.session.drop_messages():
            self.refuse(ProtocolError("too much unfinished data from this address", rule="unfinished"))
        self._counted_bytes = 0

    def eof_received(self) -> None:
        """Treat a half-close as a close: both directions end."""

    def pause_writing(self) -> None:
        self._busy = True

    def resume_writing(self) -> None:
        self._busy = False
        if self.session.paused:
            self.session.resume()
        self.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        reason = self._close_reason or WorkerLost(
            f"the connection to {self.peer_name} was lost", address=self.peer_name, reason="closed"
        )
        self._finish(reason)

    # --- session.Host

    def wake(self) -> None:
        if not self._flush_scheduled and self._transport is not None and self.closed is None:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def on_hello(self, hello: Hello) -> None:
        self._notify_ready(self)

    def on_open(self, stream: ServedStream) -> None:
        self._serve(self, stream)

    def report_callback_error(self, fault: Exception) -> None:
        log.error("stream callback failed", exc_info=fault)

    # --- closing

    def close(self, reason: KvoltError) -> None:
        """Send what is queued, then close; every stream on this side ends with `reason`."""
        if self.closed is not None or self._close_reason is not None:
            return
        self._close_reason = reason
        transport = self._transport
        if transport is not None:
            transport.close()
            # Time of a peer that does not read, or over TLS does not close its side: it is no longer counted.
            self._linger = self._loop.call_later(self._options.dead_after_s, transport.abort)
        self._finish(reason)

    def abort(self, reason: KvoltError) -> None:
        """Close without sending what is queued: for a peer that does not answer."""
        if self.closed is not None:
            return
        self._close_reason = reason
        if self._transport is not None:
            self._transport.abort()
        self._finish(reason)

    def flush(self) -> None:
        """Write queued frames now instead of at the end of the tick."""
        self._flush()

    def refuse(self, error: ProtocolError) -> None:
        """Send the reason to the peer, and close."""
        if self._transport is not None:
            refusal = self.session.refusal(error)
            self._stats.frames_out += 1
            self._stats.bytes_out += len(refusal)
            self._transport.write(refusal)
        self.close(error)

    def _finish(self, reason: KvoltError) -> None:
        if self.closed is not None:
            return
        self.closed = reason
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
        self._budget.set_held_bytes(self, 0)
        if isinstance(reason, NetworkFault):
            # A peer may have supplied the reason; only local ones become metric labels.
            label = reason.fields.get("reason") if type(reason) is WorkerLost else None
            self._stats.losses[str(label or reason.code)] += 1
        stream_error = reason if isinstance(reason, NetworkFault) else _lost(self.peer_name, reason)
        # Update the candidate sets first: the end of a stream may start a call that replaces it.
        self._notify_closed(self, reason)
        self.session.close(stream_error)

    # --- sending

    def _flush(self) -> None:
        self._flush_scheduled = False
        transport = self._transport
        if transport is None or self.closed is not None:
            return
        session = self.session
        frames = session.drain_urgent()
        if not self._busy:
            chunk = session.next_chunk()
            if chunk is not None:
                frames.append(chunk)
        if not frames:
            return
        data = frames[0] if len(frames) == 1 else b"".join(frames)
        self._sent_since_beat = True
        self._stats.bytes_out += len(data)
        transport.write(data)
        if self._busy:
            # Only resume_writing ends the pause, because it flushes the backlogs.
            unsent = transport.get_write_buffer_size()
            if unsent > _ABORT_ABOVE_BYTES:
                # Streams use their backlogs by now; the rest are replies to a peer that sends but never reads.
                self.abort(
                    WorkerLost(f"{self.peer_name} does not read", address=self.peer_name, reason="unread")
                )
            elif unsent > _PAUSE_ABOVE_BYTES:
                session.paused = True
        elif session.bulk_ready:
            self.wake()  # the next chunk gets its own tick, so that deltas are sent in between

    # --- heartbeat

    def _schedule_beat(self, now: float) -> None:
        self._beat_due = now + self._options.heartbeat_s
        self._beat = self._loop.call_at(self._beat_due, self._on_beat)

    def _dead_after_s(self) -> float:
        """`dead_after_s`, or three heartbeats of a peer with a longer interval, up to a limit."""
        ours = self._options.dead_after_s
        peer = self.session.peer
        return ours if peer is None else min(max(ours, 3 * peer.heartbeat_s), _MAX_PATIENCE_FACTOR * ours)

    def mark_replaced(self) -> None:
        """Note that the peer answers on another connection: this one is lost unless bytes arrive soon."""
        if self.silent and self._replaced_at is None:
            self._replaced_at = self._loop.time()

    def _set_silent(self, silent: bool) -> None:
        self.silent = silent
        self._replaced_at = None
        if silent:
            self._silent_since = self._last_received
            self._stats.heartbeat_timeouts += 1
        else:
            self.session.stalls.record(self._silent_since, self._last_received)
        self._notify_silence(self)
        self.session.set_peer_silent(silent)

    def _is_lost(self, now: float, silent_s: float) -> bool:
        """Whether a silent connection must be closed."""
        if self._replaced_at is not None and now - self._replaced_at >= self._options.dead_after_s:
            return True
        return silent_s >= self._options.stall_grace_s

    def _on_beat(self) -> None:
        now = self._loop.time()
        late_s = now - self._beat_due
        # A stall of this process: nothing could be received in that time, whatever the peer sent.
        self._last_received = min(self._last_received + late_s, now)
        self._made_at += late_s
        if self._replaced_at is not None:
            self._replaced_at += late_s
        stalled = late_s > self._options.heartbeat_s / 2
        if stalled:
            self.session.stalls.record(self._beat_due, now)
            if self._stats.record_stall(now, late_s):
                log.warning("process stalled: seconds=%.1f; not counted as silence of peers", late_s)
        silent_s = now - self._last_received
        if not self.silent and silent_s >= self._dead_after_s():
            self._set_silent(True)
        if self.silent and self._is_lost(now, silent_s):
            self.abort(silent_error(self.peer_name, silent_s))
        if self.closed is not None:
            return
        try:
            self.session.expire_unfinished(now, late_s)
        except ProtocolError as error:
            self.refuse(error)
            return
        self._count_unfinished()
        if self.session.peer is None:
            if now - self._made_at > _HELLO_TIMEOUT_S:
                self.abort(ProtocolError(f"{self.peer_name} sent no hello", rule="hello"))
                return
        elif not self._sent_since_beat:
            self.session.ping()
            self._flush()  # now, so that the ping does not count as traffic below
        self._sent_since_beat = False
        self._schedule_beat(now)


def silent_error(peer: str, silent_s: float) -> WorkerLost:
    """The error that ends the streams of a silent peer."""
    return WorkerLost(
        f"{peer} has been silent for {silent_s:.0f} s; it may be stalled or unreachable",
        address=peer,
        reason="heartbeat",
    )


def _lost(peer: str, reason: KvoltError) -> WorkerLost:
    return WorkerLost(
        f"the connection to {peer} was closed: {reason.message}", address=peer, reason=reason.code
    )


def _name(address: object) -> str:
    if isinstance(address, tuple) and len(address) >= 2:
        return f"[{address[0]}]:{address[1]}" if ":" in str(address[0]) else f"{address[0]}:{address[1]}"
    return str(address) if address else "?"
