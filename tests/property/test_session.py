"""Two sessions back to back over a byte pipe, driven by a random walk and compared with a model.

The model of a stream is the list of what its server said. Whatever the order of flushes, pauses, cuts
and cancels, the caller gets exactly that, in order, and its end once and last; and when every stream
is over both sessions hold nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvolt.core.delta import Delta
from kvolt.core.errors import Cancelled, EngineFailed, KvoltError
from kvolt.runtime.plane_stats import PlaneStats
from kvolt.runtime.session import Session, SessionLimits
from kvolt.runtime.streams import CallerStream, ServedStream
from kvolt.runtime.wire import CHUNK_BYTES, Hello

WINDOW = 4
LIMITS = SessionLimits(window_items=WINDOW, max_message_bytes=1 << 20)
BIG_BYTES = CHUNK_BYTES + 1000
BIG_TOKENS = 30_000

decode = msgspec.msgpack.Decoder().decode


class Peer:
    """A session's host that remembers the streams it was given."""

    def __init__(self, dialer: bool, serve: Callable[[ServedStream], None]) -> None:
        self._serve = serve
        self.stats = PlaneStats()
        hello = Hello(
            versions=(1,),
            process="a" if dialer else "b",
            max_frame_bytes=LIMITS.max_frame_bytes,
            max_message_bytes=LIMITS.max_message_bytes,
            heartbeat_s=1.0,
        )
        self.session = Session(dialer=dialer, hello=hello, limits=LIMITS, host=self, stats=self.stats)

    def wake(self) -> None: ...

    def on_hello(self, hello: Hello) -> None: ...

    def on_open(self, stream: ServedStream) -> None:
        self._serve(stream)

    def on_goaway(self) -> None: ...


class Reader:
    """A caller's sink: what came, what was read of it, how it ended."""

    def __init__(self) -> None:
        self.stream: CallerStream | None = None
        self.items: list[Any] = []
        self.num_read = 0
        self.ends: list[KvoltError | None] = []
        self.cancelled = False

    def on_item(self, item: Any) -> None:
        assert not self.ends, "an item after the end"
        assert not self.cancelled, "an item after the cancel"
        self.items.append(item)
        assert len(self.items) - self.num_read <= WINDOW, "more than the window is unread"

    def on_end(self, error: KvoltError | None) -> None:
        assert not self.cancelled, "an end after the cancel"
        self.ends.append(error)

    def read(self, num_items: int) -> None:
        assert self.stream is not None
        num_items = min(num_items, len(self.items) - self.num_read)
        if num_items and not self.cancelled:
            self.num_read += num_items
            self.stream.consumed(num_items)

    def cancel(self) -> None:
        assert self.stream is not None
        if not self.ends:
            self.stream.cancel()
            self.cancelled = True


class Producer:
    """What serves a stream, and all that it has said."""

    def __init__(self, stream: ServedStream) -> None:
        self.stream = stream
        self.sent: list[Any] = []
        self.error: KvoltError | None = None
        self.ended = self.failed = False
        self.told: list[KvoltError] = []
        self.num_closed = 0
        self.pending: deque[Any] = deque()
        """Items of a handler that waits for `on_writable` when the stream is not."""
        self.runnable = True
        stream.on_cancel = self.told.append
        stream.on_closed = self._closed
        stream.on_writable = self._writable

    def _closed(self) -> None:
        self.num_closed += 1

    def _writable(self) -> None:
        self.runnable = True

    @property
    def live(self) -> bool:
        return not self.ended and not self.failed and not self.stream.closed

    def send(self, item: Any) -> None:
        if self.live:
            self.sent.append(item)
            self.stream.send(item)

    def end(self, error: KvoltError | None) -> None:
        if self.live and not self.pending:
            self.ended, self.error = True, error
            self.stream.end(error)

    def fail(self) -> None:
        if self.live:
            self.failed, self.error = True, EngineFailed("gave up", engine="sim")
            self.stream.fail(self.error)

    def run(self) -> None:
        """One turn of a handler: as `server._GeneratorRun`, it waits when the stream is not writable."""
        if self.runnable and self.pending and self.live:
            self.send(self.pending.popleft())
            self.runnable = self.stream.writable


class World:
    def __init__(self) -> None:
        self.peers = (
            Peer(dialer=True, serve=lambda stream: self.serve(1, stream)),
            Peer(dialer=False, serve=lambda stream: self.serve(0, stream)),
        )
        self.pipes: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        """What each peer has written and the other has not got."""
        self.readers: dict[tuple[int, int], Reader] = {}
        self.producers: dict[tuple[int, int], Producer] = {}
        self.bodies: dict[tuple[int, int], Any] = {}
        self.next_token = 0
        for who in (0, 1):
            self.flush(who)
        for who in (0, 1):
            self.deliver(who, 1 << 30)

    # --- the wire

    def flush(self, who: int) -> None:
        for frame in self.peers[who].session.take_urgent():
            self.pipes[who].extend(frame)

    def chunk(self, who: int) -> None:
        """As the connection does: chunks only after all that is urgent, and only into a free transport."""
        self.flush(who)
        if not self.peers[who].session.paused:
            chunk = self.peers[who].session.take_chunk()
            if chunk is not None:
                assert len(chunk) <= CHUNK_BYTES + 10
                self.pipes[who].extend(chunk)

    def deliver(self, who: int, num_bytes: int) -> None:
        """Bytes that `who` has written reach the other."""
        pipe = self.pipes[who]
        data = bytes(pipe[:num_bytes])
        del pipe[:num_bytes]
        if data:
            self.peers[1 - who].session.receive(data)

    # --- what streams do

    def serve(self, caller: int, stream: ServedStream) -> None:
        self.producers[caller, stream.id] = Producer(stream)
        assert stream.decode_body(decode) == self.bodies[caller, stream.id], "the request came as another"

    def open(self, who: int, big: bool) -> None:
        body = b"x" * BIG_BYTES if big else len(self.readers)
        reader = Reader()
        reader.stream = self.peers[who].session.open("e", msgspec.msgpack.encode(body), reader, decode)
        self.readers[who, reader.stream.id] = reader
        self.bodies[who, reader.stream.id] = body

    def item(self, kind: int) -> Any:
        self.next_token += 1
        token = self.next_token
        match kind % 6:
            case 0 | 1:
                return token
            case 2 | 3:
                return Delta((token,))
            case 4:
                return [token, b"x" * BIG_BYTES]
            case _:
                self.next_token += BIG_TOKENS
                return Delta(tuple(range(token, token + BIG_TOKENS)))

    def settle(self) -> None:
        """Let everything reach its end; a stream that cannot is one that hangs."""
        for peer in self.peers:
            peer.session.resume()
        quiet = 0
        while quiet < 2:
            before = self._progress()
            for reader in self.readers.values():
                reader.read(1 << 30)
            for producer in self.producers.values():
                producer.run()
            for who in (0, 1):
                self.flush(who)
                self.chunk(who)
                self.deliver(who, 1 << 30)
            quiet = quiet + 1 if self._progress() == before else 0

    def _progress(self) -> Any:
        return (
            [peer.stats.frames_in for peer in self.peers],
            [len(producer.sent) for producer in self.producers.values()],
            [(len(reader.items), reader.num_read, len(reader.ends)) for reader in self.readers.values()],
        )


def flat(items: list[Any]) -> Iterator[Any]:
    """Deltas as their tokens: merging them is allowed, all else is not."""
    for item in items:
        if type(item) is Delta:
            yield from (("token", token) for token in item.token_ids)
        else:
            yield item


def pick(known: dict[Any, Any], number: int) -> Any:
    return list(known.values())[number % len(known)] if known else None


def step(world: World, operation: tuple[int, int, int]) -> None:
    kind, who, number = operation
    side = who % 2
    session = world.peers[side].session
    producer: Producer | None = pick(world.producers, who)
    reader: Reader | None = pick(world.readers, who)
    match kind:
        case 0:
            world.open(side, big=number % 8 == 7)
        case 1 if producer is not None and not producer.pending:
            producer.send(world.item(number))
        case 2 if producer is not None and not producer.pending:
            for extra in range(number):
                producer.send(world.item(number + extra))
        case 3 if producer is not None and producer.live:
            producer.pending.extend(world.item(number + extra) for extra in range(number))
        case 4 if producer is not None:
            producer.run()
        case 5 if producer is not None:
            producer.end(EngineFailed("it broke", engine="sim") if number % 4 == 3 else None)
        case 6 if producer is not None and number == 0:
            producer.fail()
        case 7 if reader is not None and number % 4 == 0:
            reader.cancel()
        case 8 if reader is not None:
            reader.read(1 + number)
        case 9:
            world.flush(side)
        case 10:
            world.chunk(side)
        case 11:
            world.deliver(side, 1 << 30 if number % 3 else 1 + number)
        case 12:
            session.paused = True
        case 13 if session.paused:
            session.resume()
        case 14:
            for each in (0, 1):
                world.flush(each)
                world.deliver(each, 1 << 30)


KINDS = [*range(15), 1, 2, 2, 3, 4, 4, 8, 9, 9, 10, 11, 14, 14, 14]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 11)), min_size=10, max_size=100
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(OPERATIONS)
def test_random_walk(operations: list[tuple[int, int, int]]) -> None:
    walk(operations)


def walk(operations: list[tuple[int, int, int]]) -> World:
    world = World()
    for operation in operations:
        step(world, operation)
    world.settle()
    for producer in world.producers.values():
        assert not (producer.pending and producer.live), "a handler waits for ever"
        producer.end(None)
    world.settle()
    for key, reader in world.readers.items():
        check(reader, world.producers.get(key))
    for peer in world.peers:
        check_empty(peer.session)
    return world


def check(reader: Reader, producer: Producer | None) -> None:
    if reader.cancelled:
        assert not reader.ends
    else:
        assert producer is not None, "a request was lost"
        assert len(reader.ends) == 1, "an end did not come, or came twice"
    if producer is None:
        assert not reader.items
        return
    sent, got = list(flat(producer.sent)), list(flat(reader.items))
    assert got == sent[: len(got)], "reordered, duplicated or invented"
    assert producer.num_closed == 1
    if reader.cancelled:
        assert all(isinstance(error, Cancelled) for error in producer.told)
        assert len(producer.told) <= 1
        return
    (error,) = reader.ends
    if not producer.failed:
        assert got == sent, "lost"
        assert not producer.told
    assert type(error) is type(producer.error)
    if error is not None:
        assert producer.error is not None
        assert (error.message, error.fields) == (producer.error.message, producer.error.fields)


def check_empty(session: Session) -> None:
    assert (session.num_calls, session.num_served, session.has_bulk) == (0, 0, False)
    assert not session._opening
    assert not session._held
    assert not session._credits
    assert not session._segments
    assert not session._ends
    assert not session._refused
    assert not session._cancels
    assert not session._control
    assert session._arriving.buffered_bytes == 0
    assert session._decoder.buffered_bytes == 0
    assert session.take_urgent() == []
    assert session.take_chunk() is None
