"""Admission of streams opened by peers: a bounded number per loop turn, round-robin over connections.

One read may contain thousands of opens. Starting them all at once would block the loop for seconds, so the
excess waits for later turns. Waiting requests count as unfinished messages in the byte budget.

Open streams are limited per process and per peer address, over all connections of that address.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from kvolt.core.errors import Overloaded
from kvolt.runtime.logs import is_logged
from kvolt.runtime.network import peer_group
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.runtime.plane.port import ServeStream
from kvolt.runtime.plane.served_stream import ServedStream

log = logging.getLogger(__name__)

OPENS_PER_TURN = 32
MAX_STREAMS = 131_072
"""Limit of streams opened by peers, per process; more are refused as overloaded."""
MAX_STREAMS_PER_PEER = 65_536
"""Limit per peer address: several frontends on one host with more than 10,000 requests each."""
_STREAM_BYTES = 1024
"""Approximate memory of a stream without its request."""


class _Queue:
    """Waiting opens of one connection."""

    def __init__(self, peer_host: str) -> None:
        self.peer_host = peer_host
        self.streams: deque[tuple[ServedStream, int]] = deque()
        self.num_bytes = 0

    def add(self, stream: ServedStream) -> None:
        num_bytes = len(stream.body) + _STREAM_BYTES
        self.streams.append((stream, num_bytes))
        self.num_bytes += num_bytes

    def pop(self) -> ServedStream:
        stream, num_bytes = self.streams.popleft()
        self.num_bytes -= num_bytes
        return stream

    def shed(self) -> None:
        while self.streams:
            stream = self.pop()
            if not stream.closed:
                stream.end(Overloaded("too many requests wait to be started", queue="opens"))


class _PeerStreams:
    """Number of open streams of one peer address."""

    __slots__ = ("_gate", "group", "num_open")

    def __init__(self, gate: OpenGate, group: str) -> None:
        self._gate = gate
        self.group = group
        self.num_open = 0

    def release(self) -> None:
        """Count one stream as closed."""
        self._gate.release_stream(self)


class OpenGate:
    """Passes admitted streams to `serve`. A source is a connection."""

    def __init__(self, serve: ServeStream, budget: ByteBudget) -> None:
        self._serve = serve
        self._budget = budget
        self._queues: dict[object, _Queue] = {}
        self._peers: dict[str, _PeerStreams] = {}
        self.num_open = 0
        """Admitted streams that are not closed."""
        self.num_refused = 0
        """Streams refused because of a limit."""
        self._left = OPENS_PER_TURN
        self._is_scheduled = False

    @property
    def num_waiting(self) -> int:
        return sum(len(queue.streams) for queue in self._queues.values())

    def start_stream(self, source: object, peer_host: str, stream: ServedStream) -> None:
        """Start a stream in this turn if there is room, else in a later one. Refuse it over the limits."""
        if not self._admit(peer_host, stream):
            return
        self._schedule()
        queue = self._queues.get(source)
        if queue is None:
            if self._left > 0:
                self._left -= 1
                self._serve(stream)
                return
            queue = self._queues[source] = _Queue(peer_host)
        queue.add(stream)
        self._budget.set_held_bytes(queue, queue.num_bytes)

    def _admit(self, peer_host: str, stream: ServedStream) -> bool:
        group = peer_group(peer_host)
        peer = self._peers.get(group) or _PeerStreams(self, group)
        if self.num_open >= MAX_STREAMS:
            limit, owner = MAX_STREAMS, "this process"
        elif peer.num_open >= MAX_STREAMS_PER_PEER:
            limit, owner = MAX_STREAMS_PER_PEER, "this address"
        else:
            self._peers[group] = peer
            peer.num_open += 1
            self.num_open += 1
            stream.on_released = peer.release
            return True
        self.num_refused += 1
        if is_logged(self.num_refused):
            log.warning(
                "stream refused: peer=%s reason=%s has %d open streams refused=%d",
                peer_host,
                owner,
                limit,
                self.num_refused,
            )
        stream.end(Overloaded(f"{owner} has too many open streams", queue="streams", limit=limit))
        return False

    def release_stream(self, peer: _PeerStreams) -> None:
        self.num_open -= 1
        peer.num_open -= 1
        if not peer.num_open:
            del self._peers[peer.group]

    def drop_source(self, source: object) -> None:
        """Drop the queue of a closed connection."""
        queue = self._queues.pop(source, None)
        if queue is not None:
            self._budget.set_held_bytes(queue, 0)

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._is_scheduled = False
        self._left = OPENS_PER_TURN
        try:
            while self._left > 0 and self._queues:
                self._start_next()
        finally:
            if self._queues:
                self._schedule()

    def _start_next(self) -> None:
        """Start one stream of the next connection in turn."""
        source, queue = next(iter(self._queues.items()))
        del self._queues[source]
        stream = queue.pop() if queue.streams else None
        if queue.streams:
            self._queues[source] = queue  # to the end of the rotation
        self._budget.set_held_bytes(queue, queue.num_bytes)
        if stream is not None and not stream.closed:
            self._left -= 1
            self._serve(stream)
