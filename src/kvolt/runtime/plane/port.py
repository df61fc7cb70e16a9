"""The request plane as a process sees it: the port that `tcp` fills and that others may.

A plane carries streams between processes: one request out, any number of items back, one end. How it does
that (connections, brokers, HTTP) is its own affair; a peer is known by its address alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from kvolt.core.errors import KvoltError
from kvolt.runtime.plane.stats import PlaneGauges, PlaneStats
from kvolt.runtime.plane.streams import Decode, Sink


class Destination(NamedTuple):
    """A place to call: the process, and what in it."""

    address: str
    target: str


class OutgoingStream(Protocol):
    """A stream that we opened. Its items and its end go to the sink it was opened with."""

    @property
    def held(self) -> bool:
        """The reader is behind and has said so."""
        ...

    def hold(self) -> None:
        """Give no more automatic credit: the reader is behind."""
        ...

    def release(self) -> None:
        """The reader has caught up."""
        ...

    def consumed(self, num_items: int) -> None:
        """The reader took items. Only for a stream without automatic credit."""
        ...

    def seen_at(self) -> float | None:
        """When its last item came, by the loop's clock."""
        ...

    @property
    def peer_silent(self) -> bool:
        """The peer may be stalled: nothing comes from it, and it is not known to be lost."""
        ...

    def stalled_s(self, since: float) -> float:
        """Seconds after `since`, by the loop's clock, in which this process or the peer was stalled."""
        ...

    def cancel(self) -> None:
        """Tell the peer to stop; nothing more is delivered, not even an end."""
        ...


class IncomingStream(Protocol):
    """A stream that a peer opened: the request is here whole, answers go out one by one."""

    on_cancel: Callable[[KvoltError], None] | None
    """Called once when the peer gives up, is lost, or reads too slowly for what is sent."""
    on_writable: Callable[[], None] | None
    """Called when `send` would go through again after items were kept back."""
    on_closed: Callable[[], None] | None
    """Called once when the stream is over, however it ended."""
    on_silent: Callable[[bool], None] | None
    """Called when the peer falls silent, and when it answers again."""

    @property
    def target(self) -> str: ...

    @property
    def peer_host(self) -> str:
        """Address of the peer, without its port."""
        ...

    @property
    def is_peer_silent(self) -> bool:
        """Whether nothing comes from the peer on this connection: it may be stalled, or the connection dead."""
        ...

    @property
    def deadline_s(self) -> float | None:
        """What was left of the call's time when it was opened."""
        ...

    @property
    def context(self) -> dict[str, str]: ...

    @property
    def writable(self) -> bool:
        """Whether an item sent now would leave at once."""
        ...

    @property
    def closed(self) -> bool:
        """Nothing more leaves: the peer has the end, or has given up, or is gone."""
        ...

    def decode_body(self, decode: Decode) -> Any:
        """The request, decoded once. InvalidRequest when it is not that."""
        ...

    def send(self, item: Any) -> None:
        """An item for the reader. Without credit Deltas merge, other items wait up to a bound."""
        ...

    def end(self, error: BaseException | None = None) -> None:
        """The last word; what is kept back goes first. A second end is ignored."""
        ...

    def fail(self, error: KvoltError) -> None:
        """End with an error in place of all that is kept back, and tell the producer."""
        ...


ServeStream = Callable[[IncomingStream], None]
ClosedListener = Callable[[str, KvoltError], None]
SilentListener = Callable[[str, bool], None]


class RequestPlane(Protocol):
    """A process's way to all others. One plane must pass `kvolt.testing.plane.suite` and `plane_faults_suite`."""

    @property
    def address(self) -> str | None:
        """Where other processes reach us, once we listen."""
        ...

    @property
    def stats(self) -> PlaneStats: ...

    def gauges(self) -> PlaneGauges: ...

    async def listen(self, address: str, advertise: str | None = None) -> str:
        """Be reachable; returns the real address. The first one is what others are told.

        `advertise` is told in its place: HOST:PORT, or HOST alone when the port is the system's choice.
        """
        ...

    async def stop_listening(self) -> None:
        """Take no new peers; streams of those we have go on."""
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
        """Start a stream. `body` is the encoded request; `decode` turns an item's bytes into the item.

        ConnectFailed when the peer cannot be reached within `connect_s`. Whatever it raises, nothing was sent.
        Does not suspend while the peer is reached already. `deadline_s` counts from now: the peer is told
        what connecting leaves of it. With automatic credit an item counts as read when the sink has it.
        """
        ...

    async def reach(self, address: str, timeout_s: float) -> None:
        """See that a process can be called. ConnectFailed, or another NetworkFault, when it cannot."""
        ...

    def on_closed(self, listener: ClosedListener) -> None:
        """Be told (address, reason) when a peer that could be called is lost, before its streams end."""
        ...

    def on_silent(self, listener: SilentListener) -> None:
        """Report (address, True) when a peer that could be called falls silent, and False when it answers again.

        A silent peer is one that may be stalled. It gets no new calls; its streams are kept for a grace period.
        """
        ...

    def is_heard(self, address: str) -> bool:
        """Whether the peer was heard within its last two heartbeats; also where no connection to it is open."""
        ...

    def drop_silent(self, address: str) -> None:
        """End the streams to a peer that is silent now: another one can take them over."""
        ...

    def forget(self, *listeners: ClosedListener | SilentListener) -> None: ...

    def go_away(self) -> None:
        """Refuse new streams of all peers, those to come included; what runs goes on."""
        ...

    async def close(self) -> None:
        """Close everything. Streams still open end on both sides. Safe to repeat."""
        ...


PlaneFactory = Callable[[str, ServeStream], RequestPlane]
"""Makes the plane of a process from its id and what takes the streams that peers open."""
