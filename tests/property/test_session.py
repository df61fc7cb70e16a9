"""Two sessions back to back over a byte pipe, driven by a random walk and compared with a model.

The model of a stream is the list of what its server said. Whatever the order of flushes, pauses, cuts
and cancels, the caller gets exactly that, in order, and its end once and last; and when every stream
is over both sessions hold nothing.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvolt.core.delta import Delta
from kvolt.core.errors import Cancelled, EngineFailed, KvoltError
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.session import Session, SessionLimits
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.runtime.plane.steps import StepSender
from kvolt.runtime.plane.streams import CallerStream
from kvolt.runtime.plane.wire import CHUNK_BYTES, Hello

WINDOW = 4
LIMITS = SessionLimits(window_items=WINDOW, max_message_bytes=1 << 20)
BIG_BYTES = CHUNK_BYTES + 1000
BIG_TOKENS = CHUNK_BYTES // 5 + 10
FIRST_TOKEN = 1_000_000
"""Tokens from here on take five bytes."""

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

    def report_callback_error(self, fault: Exception) -> None:
        raise fault


class Reader:
    """A caller's sink: what came, what was read of it, how it ended."""

    def __init__(self, automatic: bool) -> None:
        self.automatic = automatic
        self.stream: CallerStream | None = None
        self.items: list[Any] = []
        self.num_read = 0
        self.ends: list[KvoltError | None] = []
        self.cancelled = False

    def on_item(self, item: Any) -> None:
        assert not self.ends, "an item after the end"
        assert not self.cancelled, "an item after the cancel"
        self.items.append(item)
        assert self.automatic or len(self.items) - self.num_read <= WINDOW, "more than the window is unread"

    def on_end(self, error: KvoltError | None) -> None:
        assert not self.cancelled, "an end after the cancel"
        self.ends.append(error)

    def read(self, num_items: int) -> None:
        assert self.stream is not None
        num_items = min(num_items, len(self.items) - self.num_read)
        if num_items and not self.cancelled and not self.automatic:
            self.num_read += num_items
            self.stream.mark_consumed(num_items)

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
        self.next_token = FIRST_TOKEN
        self.batch: tuple[int, ...] = ()
        self.stepper = StepSender(())
        for who in (0, 1):
            self.flush(who)
        for who in (0, 1):
            self.deliver(who, 1 << 30)

    # --- the wire

    def flush(self, who: int) -> None:
        for frame in self.peers[who].session.drain_urgent():
            self.pipes[who].extend(frame)

    def chunk(self, who: int) -> None:
        """As the connection does: chunks only after all that is urgent, and only into a free transport."""
        self.flush(who)
        if not self.peers[who].session.paused:
            chunk = self.peers[who].session.next_chunk()
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

    def open(self, who: int, big: bool, automatic: bool) -> None:
        body = b"x" * BIG_BYTES if big else len(self.readers)
        reader = Reader(automatic)
        reader.stream = self.peers[who].session.open(
            "e", msgspec.msgpack.encode(body), reader, decode, automatic_credit=automatic
        )
        self.readers[who, reader.stream.id] = reader
        self.bodies[who, reader.stream.id] = body

    def item(self, kind: int) -> Any:
        self.next_token += 1
        token = self.next_token
        match kind % 10:
            case 4:
                return [token, b"x" * BIG_BYTES]
            case 9:
                self.next_token += BIG_TOKENS
                return Delta(tuple(range(token, token + BIG_TOKENS)))
            case even if even % 2 == 0:
                return [token]
            case _:
                return Delta((token,))

    def step(self, who: int) -> None:
        """An engine's step: one token for each stream that `who` serves and that does not wait."""
        members = [
            producer
            for (caller, _), producer in self.producers.items()
            if caller != who and producer.live and not producer.pending
        ]
        if not members:
            return
        ids = (who, *(producer.stream.id for producer in members))
        if ids != self.batch:
            self.batch, self.stepper = ids, StepSender([producer.stream for producer in members])
        tokens = range(self.next_token + 1, self.next_token + 1 + len(members))
        self.next_token = tokens[-1]
        for producer, token in zip(members, tokens, strict=True):
            producer.sent.append(Delta((token,)))
        self.stepper.send(tokens)

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
            yield from item.token_ids
        else:
            yield item


def pick(known: dict[Any, Any], number: int) -> Any:
    return list(known.values())[number % len(known)] if known else None


Operation = tuple[str, int, int]
"""What, on which side or stream, how much of it."""


def step(world: World, operation: Operation) -> None:
    kind, who, number = operation
    side = who % 2
    session = world.peers[side].session
    producer: Producer | None = pick(world.producers, who)
    reader: Reader | None = pick(world.readers, who)
    match kind:
        case "open":
            world.open(side, big=number % 8 == 7, automatic=number % 2 == 1)
        case "send" if producer is not None and not producer.pending:
            producer.send(world.item(number))
        case "burst" if producer is not None and not producer.pending:
            for extra in range(number):
                producer.send(world.item(number + extra))
        case "handle" if producer is not None and producer.live:
            producer.pending.extend(world.item(number + extra) for extra in range(number))
        case "run" if producer is not None:
            producer.run()
        case "end" if producer is not None:
            producer.end(EngineFailed("it broke", engine="sim") if number % 4 == 3 else None)
        case "fail" if producer is not None and number == 0:
            producer.fail()
        case "cancel" if reader is not None and number % 4 == 0:
            reader.cancel()
        case "read" if reader is not None:
            reader.read(1 + number)
        case "flush":
            world.flush(side)
        case "chunk":
            world.chunk(side)
        case "deliver":
            world.deliver(side, 1 << 30 if number % 3 else 1 + number)
        case "pause":
            session.paused = True
        case "resume" if session.paused:
            session.resume()
        case "step":
            for _ in range(1 + number % 3):
                world.step(side)
        case "exchange":
            for each in (0, 1):
                world.flush(each)
                world.deliver(each, 1 << 30)


OFTEN = "send burst handle run read flush chunk deliver exchange step"
SELDOM = "open end fail cancel pause resume"
KINDS = OFTEN.split() * 2 + SELDOM.split() + ["burst", "exchange", "exchange"]
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 11)), min_size=20, max_size=120
)
BEGIN = [("open", 0, 0), ("open", 1, 0), ("exchange", 0, 0)]
"""A stream in each direction."""


def walks(*operations: Operation) -> Any:
    """An input that once failed, for hypothesis to try first."""
    return example(list(operations))


@walks(("send", 0, 9))  # a long delta came as a dict
@walks(("send", 0, 4), ("step", 1, 0))  # a step overtook a long item
@walks(("send", 0, 4), ("step", 1, 0), ("flush", 1, 0), ("step", 1, 0))  # and the next one, too
@walks(("send", 0, 4), ("send", 0, 1))  # and so did a delta
@walks(("send", 0, 4), *[("send", 0, 0)] * 4)  # what was kept back for want of credit overtook what was sent
@walks(
    ("handle", 0, 9),
    *[("run", 0, 0)] * 4,
    *[("exchange", 0, 0)] * 2,
    ("read", 0, 4),
    ("pause", 1, 0),
    ("exchange", 0, 0),
    ("resume", 1, 0),
)  # credit came in a pause: the handler was never told
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(OPERATIONS)
def test_random_walk(operations: list[Operation]) -> None:
    walk(BEGIN + operations)


@pytest.mark.parametrize("seed", range(4))
def test_longer_walks(seed: int) -> None:
    """Without hypothesis, which thinks longer about an operation than the sessions do."""
    rng = random.Random(seed)
    for _ in range(50):
        walk(BEGIN + [(rng.choice(KINDS), rng.randrange(8), rng.randrange(12)) for _ in range(150)])


def walk(operations: list[Operation]) -> World:
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
        assert len(producer.told) <= 1
        assert all(
            isinstance(error, EngineFailed if producer.failed else Cancelled) for error in producer.told
        )
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
    assert (session.num_calls, session.num_served, session.num_bulk) == (0, 0, 0)
    assert not session._pending_opens
    assert not session._backlogged
    assert not session._credits
    assert not session._outbox
    assert not session._ends
    assert not session._refusals
    assert not session._control
    assert session._bulk_receiver.buffered_bytes == 0
    assert session._decoder.buffered_bytes == 0
    assert session.drain_urgent() == []
    assert session.next_chunk() is None
