"""One connection of the virtual network: two pipes and a transport at each end.

Models latency, bandwidth, buffers, back-pressure and closing. Must not know the loop (all waiting uses
`loop.call_at`), the meaning of the bytes, or the causes of faults.

    write -> unsent ->  [ on the wire -> arrived, not read ]  -> data_received
             (sender)   [        window of one Pipe        ]     (receiver)

The window is bounded like a pair of socket buffers. When it is full, bytes stay unsent; above the high-water mark the
sender's protocol is paused.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol

import msgspec

from kvolt.runtime.network import ProtocolFactory, join_address

_SEGMENT_BYTES = 64 * 1024
"""Maximum segment size: a quarter of the default window, so that long writes are pipelined."""
_HIGH_WATER_BYTES = 64 * 1024
"""asyncio's default."""


class LinkHost(Protocol):
    """Interface of a host for its transports."""

    name: str
    paused: bool
    pending_losses: list[Callable[[], None]]

    def factory_at(self, port: int) -> ProtocolFactory | None:
        """Protocol factory of the listener on this port; None if there is none."""
        ...


class LinkNetwork(Protocol):
    """Interface of the network for pipes and transports."""

    rng: random.Random
    log: Callable[[str], None] | None
    retransmit_s: float

    def note(self, event: str) -> None: ...

    def draw_latency_s(self, profile: LinkProfile) -> float: ...

    def remove_connection(self, end: VirtualTransport) -> None: ...


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Behaviour of each direction of the connections between two hosts."""

    latency_s: float = 0.0005
    jitter_s: float = 0.0
    """Maximum additional latency, drawn per segment; segments stay in order."""
    bytes_per_s: float | None = None
    window_bytes: int = 256 * 1024
    rechunk: bool = False
    """Split and join segments at random."""


class Kind(Enum):
    OPEN = auto()
    DATA = auto()
    END = auto()
    RESET = auto()


@dataclass(slots=True)
class Segment:
    arrive_at: float
    kind: Kind
    data: bytes


@dataclass(slots=True)
class Route:
    """State shared by all connections between two hosts."""

    profile: LinkProfile
    partitioned_at: float | None = None


@dataclass(slots=True, eq=False)
class Pipe:
    """One direction of a connection: segments on the wire, or arrived and not read yet."""

    network: LinkNetwork
    route: Route
    loop: asyncio.AbstractEventLoop
    sender: VirtualTransport
    receiver: VirtualTransport
    segments: deque[Segment] = field(default_factory=deque)
    """In stream order: a due segment waits for earlier ones."""
    in_flight_bytes: int = 0
    dead: bool = False
    line_free_at: float = 0.0
    timer: asyncio.TimerHandle | None = None

    def room_bytes(self) -> int:
        return self.route.profile.window_bytes - self.in_flight_bytes

    def send(self, kind: Kind, data: bytes = b"") -> None:
        self.in_flight_bytes += len(data)
        if not (data and self.route.profile.rechunk):
            self._put(kind, data, joined=False)
            return
        rng = self.network.rng
        while data:
            size = rng.randint(1, len(data))
            self._put(kind, data[:size], joined=rng.random() < 0.4)
            data = data[size:]

    def _put(self, kind: Kind, data: bytes, joined: bool) -> None:
        now = self.loop.time()
        profile = self.route.profile
        self.line_free_at = max(now, self.line_free_at)
        if profile.bytes_per_s is not None:
            self.line_free_at += len(data) / profile.bytes_per_s
        arrive_at = self.line_free_at + self.network.draw_latency_s(profile)
        tail = self.segments[-1] if self.segments else None
        if joined and tail is not None and tail.kind is Kind.DATA and tail.arrive_at > now:
            tail.data += data
            tail.arrive_at = max(tail.arrive_at, arrive_at)
        else:
            self.segments.append(Segment(arrive_at, kind, data))
        self.arm()

    def arm(self) -> None:
        """Set the timer of the next arrival, if there is one."""
        if self.timer is None and self._readable():
            at = self.segments[0].arrive_at
            # Not in the receiver's context: bytes arrive at its host even if its process is stalled.
            self.timer = self.loop.call_at(at, self._arrive, context=contextvars.Context())

    def _readable(self) -> bool:
        if self.dead or not self.segments or self.receiver.reading_paused or self.receiver.host.paused:
            return False
        partitioned_at = self.route.partitioned_at
        return partitioned_at is None or self.segments[0].arrive_at <= partitioned_at

    def _arrive(self) -> None:
        self.timer = None
        now = self.loop.time()
        # The head may have changed since the timer was set: joined with later bytes, held or read.
        while self._readable() and self.segments[0].arrive_at <= now:
            segment = self.segments.popleft()
            self.in_flight_bytes -= len(segment.data)
            if self.network.log is not None:
                what = f"{len(segment.data)} bytes" if segment.data else segment.kind.name.lower()
                self.network.note(f"{self.sender.address}>{self.receiver.address} {what}")
            self.receiver.context.run(self.receiver.receive, segment)
        self.sender.context.run(self.sender.flush)
        self.arm()

    def retransmit(self) -> None:
        """Send held segments again, in order, after a partition."""
        earliest = self.loop.time() + self.route.profile.latency_s
        for segment in self.segments:
            segment.arrive_at = max(segment.arrive_at, earliest)
        self.arm()

    def stop(self) -> None:
        self.dead = True
        self.segments.clear()
        self.in_flight_bytes = 0
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class VirtualTransport(asyncio.Transport):
    """One end of a connection; behaves like asyncio's socket transport.

    `close()` always ends in `connection_lost`: a peer that accepts nothing for `retransmit_s` counts as lost.
    """

    out: Pipe
    into: Pipe

    def __init__(
        self, host: LinkHost, port: int, peer: tuple[str, int], context: contextvars.Context, cert: object
    ) -> None:
        super().__init__({"sockname": (host.name, port), "peername": peer, "peercert": cert, "socket": None})
        self.host = host
        self.address = join_address(host.name, port)
        self.context = context
        """Context of protocol callbacks, independent of the sender's context."""
        self.lost = False
        self.reading_paused = False
        self._port = port
        self._protocol: Any = None
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._high_bytes = _HIGH_WATER_BYTES
        self._low_bytes = _HIGH_WATER_BYTES // 4
        self._writing_paused = False
        self._eof_written = False
        self._end_sent = False
        self._closing = False
        self._aborted = False
        self._linger: asyncio.TimerHandle | None = None

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def open(self, protocol: asyncio.Protocol) -> None:
        self.set_protocol(protocol)
        self._call_protocol(protocol.connection_made, self)

    def _call_protocol(self, callback: Callable[..., Any], *args: Any) -> Any:
        try:
            return callback(*args)
        except Exception as error:  # as asyncio does: report the error and drop the connection
            context = {
                "message": "protocol failed",
                "exception": error,
                "transport": self,
                "protocol": self._protocol,
            }
            self.out.loop.call_exception_handler(context)
            self.abort()

    # -- reading

    def receive(self, segment: Segment) -> None:
        kind = segment.kind
        if kind is Kind.RESET:
            self.lose(ConnectionResetError(f"{self.out.receiver.address} reset the connection"))
        elif self.lost:
            if kind is Kind.DATA:
                self.out.send(Kind.RESET)
        elif self._closing:
            pass  # asyncio reads nothing more after close()
        elif kind is Kind.DATA:
            self._call_protocol(self._protocol.data_received, segment.data)
        elif kind is Kind.OPEN:
            self._accept()
        elif not self._call_protocol(self._protocol.eof_received):
            self.close()

    def _accept(self) -> None:
        factory = self.host.factory_at(self._port)
        protocol = None if factory is None else self._call_protocol(factory)
        if protocol is None:
            self.abort()
        else:
            self.open(protocol)

    def is_reading(self) -> bool:
        return not self._closing and not self.reading_paused

    def pause_reading(self) -> None:
        if not self._closing:
            self.reading_paused = True

    def resume_reading(self) -> None:
        self.reading_paused = False
        self.into.arm()

    # -- writing

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data must be bytes-like, not {type(data).__name__}")
        if self._eof_written:
            raise RuntimeError("cannot write after write_eof()")
        payload = bytes(data)
        size = len(payload)
        if self._closing or not size:
            return
        if not self._unsent and size <= min(_SEGMENT_BYTES, self.out.room_bytes()) and not self.host.paused:
            self.out.send(Kind.DATA, payload)
            return
        self._unsent.append(memoryview(payload))
        self._unsent_bytes += size
        self._fill_window()
        if self._unsent_bytes > self._high_bytes and not self._writing_paused:
            self._writing_paused = True
            self._call_protocol(self._protocol.pause_writing)

    def _fill_window(self) -> None:
        while self._unsent and not self.host.paused and (room_bytes := self.out.room_bytes()) > 0:
            head = self._unsent[0]
            size = min(len(head), room_bytes, _SEGMENT_BYTES)
            self.out.send(Kind.DATA, bytes(head[:size]))
            self._unsent_bytes -= size
            if size == len(head):
                self._unsent.popleft()
            else:
                self._unsent[0] = head[size:]

    def flush(self) -> None:
        """Send queued data if there is room, then complete a pending pause, EOF or close."""
        if self.lost or self.host.paused:
            return
        self._fill_window()
        if self._writing_paused and self._unsent_bytes <= self._low_bytes:
            self._writing_paused = False
            self._call_protocol(self._protocol.resume_writing)
        if self._unsent or self.lost:
            return
        if self._aborted:
            self.out.send(Kind.RESET)
        elif (self._closing or self._eof_written) and not self._end_sent:
            self._end_sent = True
            self.out.send(Kind.END)
        if self._closing:
            self.lose(None)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._closing:
            self._eof_written = True
            self.flush()

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low_bytes, self._high_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = _HIGH_WATER_BYTES if low is None else 4 * low
        if low is None:
            low = high // 4
        if not high >= low >= 0:
            raise ValueError(f"water marks must be high >= low >= 0, not {high} and {low}")
        self._high_bytes, self._low_bytes = high, low

    # -- the end

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Send queued data, then the end of the stream; stop reading."""
        if self._closing:
            return
        self._closing = True
        self.resume_reading()
        self.flush()
        if not self.lost:
            self._start_linger()

    def abort(self) -> None:
        """Drop unsent data and reset the connection."""
        self._closing = self._aborted = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self.flush()

    def _start_linger(self) -> None:
        wait_s = self.out.network.retransmit_s
        self._linger = self.out.loop.call_later(wait_s, self._abort_if_stuck, self._unsent_bytes)

    def _abort_if_stuck(self, unsent_bytes_before: int) -> None:
        if self._unsent_bytes < unsent_bytes_before:
            self._start_linger()
            return
        self.out.send(Kind.RESET)
        self.lose(TimeoutError(f"{self.out.receiver.address} accepts no more data"))

    def lose(self, error: BaseException | None) -> None:
        """End this side at once; the protocol's `connection_lost` is scheduled."""
        if self.lost:
            return
        self.lost = self._closing = True
        self._unsent.clear()
        self._unsent_bytes = 0
        if self._linger is not None:
            self._linger.cancel()
        self.out.network.note(f"lost {self.address} {type(error).__name__ if error else 'closed'}")
        if self.host.paused:
            self.host.pending_losses.append(partial(self._report_loss, error))
        else:
            self._report_loss(error)
        if self.out.receiver.lost:
            self.out.network.remove_connection(self)
        else:
            self.resume_reading()  # later data is dropped or reset

    def _report_loss(self, error: BaseException | None) -> None:
        if self._protocol is not None:
            self.out.loop.call_soon(self._protocol.connection_lost, error, context=self.context)
