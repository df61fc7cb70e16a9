"""The request plane port: streams between processes. Implemented by `tcp`; other transports may follow.

A stream carries one request, any number of items back, and one end. The transport (connections, brokers, HTTP)
is the implementation's choice; a peer is identified by its address.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from kvolt.core.errors import KvoltError
from kvolt.runtime.plane.stats import PlaneGauges, PlaneStats
from kvolt.runtime.plane.streams import Decode, Sink
from kvolt.runtime.security.identity import Identity


class Destination(NamedTuple):
    """Where to open a stream: process address and target within the process."""

    address: str
    target: str
    identity: str = ""
    """URI that the certificate of the process must have; empty if it has none or is not known."""


class OutgoingStream(Protocol):
    """A stream opened by this process. Its items and its end go to the sink passed to `open`."""

    @property
    def is_reading_paused(self) -> bool:
        """The reader has paused automatic credit."""
        ...

    def pause_reading(self) -> None:
        """Stop automatic credit because the reader is behind."""
        ...

    def resume_reading(self) -> None:
        """Resume automatic credit."""
        ...

    def mark_consumed(self, num_items: int) -> None:
        """Return credit for items that the reader consumed. Only without automatic credit."""
        ...

    def last_item_at(self) -> float | None:
        """Loop time of the last item, or None."""
        ...

    @property
    def peer_silent(self) -> bool:
        """Nothing arrives from the peer: it may be stalled, but is not known to be lost."""
        ...

    def stalled_s(self, since: float) -> float:
        """Seconds since `since` (loop time) in which this process or the peer was stalled."""
        ...

    def cancel(self) -> None:
        """Cancel at the peer; nothing more is delivered, not even an end."""
        ...


class IncomingStream(Protocol):
    """A stream opened by a peer: its request has arrived completely, responses are sent one by one."""

    on_cancel: Callable[[KvoltError], None] | None
    """Called once when the peer cancels, is lost, or reads too slowly."""
    on_writable: Callable[[], None] | None
    """Called when `send` would go through again after a backlog."""
    on_closed: Callable[[], None] | None
    """Called once when the stream is over, for any reason."""
    on_silent: Callable[[bool], None] | None
    """Called with True when the peer falls silent, and with False when it answers again."""

    @property
    def target(self) -> str: ...

    @property
    def peer_host(self) -> str:
        """Peer address without the port."""
        ...

    @property
    def peer_identity(self) -> Identity | None:
        """Identity in the peer's certificate; None without TLS."""
        ...

    @property
    def is_peer_silent(self) -> bool:
        """Nothing arrives from the peer on this connection: it may be stalled, or the connection dead."""
        ...

    @property
    def deadline_s(self) -> float | None:
        """Remaining time of the call when it was opened."""
        ...

    @property
    def context(self) -> dict[str, str]: ...

    @property
    def writable(self) -> bool:
        """Whether an item sent now would leave immediately."""
        ...

    @property
    def closed(self) -> bool:
        """Nothing more is sent: the end was sent, or the peer cancelled or is lost."""
        ...

    def decode_body(self, decode: Decode) -> Any:
        """Decode the request; call once. Raises InvalidRequest if it does not decode."""
        ...

    def send(self, item: Any) -> None:
        """Send an item. Without credit Deltas merge and other items queue up to a bound."""
        ...

    def end(self, error: BaseException | None = None) -> None:
        """End the stream after the backlog has been sent. A second end is ignored."""
        ...

    def fail(self, error: KvoltError) -> None:
        """End with an error, drop the backlog, and notify the producer."""
        ...


ServeStream = Callable[[IncomingStream], None]
ClosedListener = Callable[[str, KvoltError], None]
SilentListener = Callable[[str, bool], None]


class RequestPlane(Protocol):
    """All streams of a process. Implementations must pass `kvolt.testing.plane.suite` and `plane_faults_suite`."""

    @property
    def address(self) -> str | None:
        """Advertised address, once listening."""
        ...

    @property
    def stats(self) -> PlaneStats: ...

    def gauges(self) -> PlaneGauges: ...

    async def listen(self, address: str, advertise: str | None = None) -> str:
        """Listen on an address; returns the bound address. The first one is advertised to other processes.

        `advertise` overrides it: HOST:PORT, or HOST alone to keep the bound port.
        """
        ...

    async def stop_listening(self) -> None:
        """Accept no new peers; streams of connected peers continue."""
        ...

    async def open(
        self,
        to: Destination,
        body: bytes,
        sink: Sink,
        decode: Decode,
        *,
        connect_s: float,
        deadline_s: float | None = None,
        context: dict[str, str] | None = None,
        automatic_credit: bool = False,
    ) -> OutgoingStream:
        """Open a stream. `body` is the encoded request; `decode` turns an item's bytes into the item.

        Raises ConnectFailed when the peer cannot be reached within `connect_s`. If it raises, nothing was sent.
        Does not suspend while the peer is connected. `deadline_s` counts from now; the peer gets what remains
        after connecting. With automatic credit an item counts as read once the sink has it.
        """
        ...

    async def ensure_connected(self, address: str, timeout_s: float) -> None:
        """Connect if necessary. Raises ConnectFailed or another NetworkFault when the process cannot be called."""
        ...

    def on_closed(self, listener: ClosedListener) -> None:
        """Call `listener(address, reason)` when a callable peer is lost, before its streams end."""
        ...

    def on_silent(self, listener: SilentListener) -> None:
        """Call `listener(address, True)` when a callable peer falls silent, and False when it answers again.

        A silent peer may be stalled. It gets no new calls; its streams are kept for a grace period.
        """
        ...

    def is_responsive(self, address: str) -> bool:
        """Whether the peer was heard within its last two heartbeats. True if no connection to it is open."""
        ...

    def close_silent(self, address: str) -> None:
        """End the streams to a peer that is silent now, so that another instance can take them over."""
        ...

    def remove_listeners(self, *listeners: ClosedListener | SilentListener) -> None: ...

    def go_away(self) -> None:
        """Refuse new streams of all present and future peers; active streams continue."""
        ...

    async def close(self) -> None:
        """Close everything; open streams end on both sides. Idempotent."""
        ...


PlaneFactory = Callable[[str, ServeStream], RequestPlane]
"""Makes a process's plane from its process id and the handler of incoming streams."""
