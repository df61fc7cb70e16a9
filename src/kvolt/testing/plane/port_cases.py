"""Cases of the request plane's suite: the port itself, with no process around it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from kvolt.core.errors import ConnectFailed, KvoltError, NetworkFault, Unavailable
from kvolt.runtime.plane.port import Destination, IncomingStream, OutgoingStream, RequestPlane
from kvolt.testing.discovery.observer import SOON_S, expect
from kvolt.testing.plane.harness import Case, Harness, fails, until

_TARGET = "ns.worker.generate"
_decode = msgspec.msgpack.Decoder().decode


class _Served:
    """Keeps the streams that peers open, for the case to answer."""

    def __init__(self) -> None:
        self.streams: list[IncomingStream] = []
        self.given_up: list[KvoltError] = []
        self.num_closed = 0

    def on_open(self, stream: IncomingStream) -> None:
        self.streams.append(stream)
        stream.on_cancel = self.given_up.append
        stream.on_closed = self._on_closed

    def _on_closed(self) -> None:
        self.num_closed += 1

    async def one(self) -> IncomingStream:
        """The stream that comes next."""
        await until(lambda: len(self.streams) > 0, "the stream at the peer")
        return self.streams.pop(0)


class _Reader:
    """A sink that keeps what comes."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.ends: list[KvoltError | None] = []

    def on_item(self, item: Any) -> None:
        self.items.append(item)

    def on_end(self, error: KvoltError | None) -> None:
        self.ends.append(error)


async def _pair(harness: Harness) -> tuple[RequestPlane, _Served, RequestPlane]:
    """A plane that serves, what it serves, and one that calls."""
    served = _Served()
    return await harness.plane("server", served.on_open), served, await harness.plane("caller", _refuse)


def _refuse(stream: IncomingStream) -> None:
    stream.end(Unavailable("serves nothing"))


def _to(plane: RequestPlane) -> Destination:
    expect(plane.address is not None, "a plane that listens has an address")
    return Destination(plane.address or "", _TARGET)


async def _open(
    caller: RequestPlane, to: Destination, reader: _Reader, request: Any = None, automatic_credit: bool = True
) -> OutgoingStream:
    return await caller.open(
        to,
        msgspec.msgpack.encode(request),
        reader,
        _decode,
        connect_s=SOON_S,
        automatic_credit=automatic_credit,
    )


async def open_carries_the_request(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    reader = _Reader()
    stream = await caller.open(
        _to(server),
        msgspec.msgpack.encode({"a": 1}),
        reader,
        _decode,
        connect_s=SOON_S,
        deadline_s=30.0,
        context={"request_id": "r"},
    )
    there = await served.one()
    expect((there.target, there.context) == (_TARGET, {"request_id": "r"}), "target and context arrive")
    expect(there.deadline_s is not None and 20.0 < there.deadline_s <= 30.0, f"{there.deadline_s} s are left")
    expect(there.decode_body(_decode) == {"a": 1}, "the request arrives")
    expect(there.writable and not there.closed and stream.seen_at() is None, "nothing has been sent yet")
    for item in range(3):
        there.send(item)
    there.end()
    await until(lambda: reader.ends == [None], "the end")
    expect(reader.items == [0, 1, 2] and stream.seen_at() is not None, "the items come before it")
    expect(there.closed and served.num_closed == 1 and served.given_up == [], "over, and nobody gave up")


async def open_to_nobody_sends_nothing(harness: Harness) -> None:
    gone = await harness.plane("gone", _refuse)
    to = _to(gone)
    await gone.close()
    caller, reader = await harness.plane("caller", _refuse), _Reader()
    await fails(ConnectFailed, _open(caller, to, reader))
    await fails(ConnectFailed, caller.reach(to.address, SOON_S))
    await fails(ConnectFailed, _open(caller, Destination("nonsense", _TARGET), reader))
    expect(reader.ends == [] and caller.gauges().num_calls == 0, "who gets the error hears no end besides")


async def open_does_not_wait_where_the_peer_is_reached(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    await caller.reach(server.address or "", SOON_S)
    opening = _open(caller, _to(server), _Reader())
    try:
        opening.send(None)
    except StopIteration as done:
        done.value.cancel()
    else:
        opening.close()
        raise AssertionError("open suspended")
    await until(
        lambda: served.num_closed == len(served.streams), "it is cancelled at the peer, if it came there"
    )


async def cancel_reaches_the_peer(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    reader = _Reader()
    stream = await _open(caller, _to(server), reader)
    there = await served.one()
    there.send(1)
    await until(lambda: reader.items == [1], "the item")
    stream.cancel()
    stream.cancel()
    await until(lambda: len(served.given_up) == 1 and served.num_closed == 1, "the peer gives up")
    there.send(2)
    there.end()
    await asyncio.sleep(0.05)
    expect((reader.items, reader.ends) == ([1], []), "nothing is delivered after a cancel, not even an end")
    expect(caller.gauges().num_calls == server.gauges().num_served == 0, "nothing is left of it")


async def fail_takes_the_place_of_what_waits(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    reader = _Reader()
    stream = await _open(caller, _to(server), reader, automatic_credit=False)
    there = await served.one()
    num_sent = 2 * harness.window_items
    for item in range(num_sent):
        there.send(item)
    expect(not there.writable, "without credit items are kept back")
    there.fail(Unavailable("stopping"))
    await until(lambda: len(reader.ends) == 1, "the end")
    expect(type(reader.ends[0]) is Unavailable and len(reader.items) < num_sent, "before what waits")
    expect(len(served.given_up) == 1, "the producer is told, too")
    stream.cancel()


async def a_held_stream_gets_no_more_than_its_window(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    reader = _Reader()
    stream = await _open(caller, _to(server), reader)
    there = await served.one()
    stream.hold()
    expect(stream.held, "it says so")
    num_sent = 4 * harness.window_items
    for item in range(num_sent):
        there.send(item)
    there.end()
    await asyncio.sleep(0.2)
    expect(0 < len(reader.items) <= harness.window_items, f"{len(reader.items)} items came")
    stream.release()
    expect(not stream.held, "it says so")
    await until(lambda: reader.ends == [None], "the end")
    expect(reader.items == list(range(num_sent)), "nothing is lost")


async def credit_comes_with_what_was_consumed(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    reader, num_taken = _Reader(), 0
    stream = await _open(caller, _to(server), reader, automatic_credit=False)
    there = await served.one()
    writable: list[int] = []
    there.on_writable = lambda: writable.append(1)
    for item in range(3 * harness.window_items):
        there.send(item)
    await asyncio.sleep(0.2)
    expect(len(reader.items) == harness.window_items, f"{len(reader.items)} items came")
    while num_taken < 3 * harness.window_items:
        await until(lambda: len(reader.items) > num_taken, "more items")  # noqa: B023 - awaited in this turn
        stream.consumed(len(reader.items) - num_taken)
        num_taken = len(reader.items)
    await until(lambda: len(writable) > 0 and there.writable, "the producer is told that there is room")
    stream.cancel()


async def losses_are_told_by_address(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    told: list[Any] = []

    class Ends(_Reader):
        def on_end(self, error: KvoltError | None) -> None:
            told.append(type(error))

    def lost(address: str, reason: KvoltError) -> None:
        expect(isinstance(reason, NetworkFault), f"{reason!r}")
        told.append(address)

    caller.on_closed(lost)
    await _open(caller, _to(server), Ends())
    await served.one()
    await harness.cut("server")
    await until(lambda: len(told) == 2, "the loss and the end")
    expect(told[0] == server.address, f"first who chooses where to call: {told}")
    await until(lambda: served.num_closed == 1 and len(served.given_up) == 1, "the peer gives up")
    caller.forget(lost)
    caller.forget(lost)
    await caller.reach(server.address or "", SOON_S)
    await harness.cut("server")
    await until(lambda: caller.gauges().num_open == 0, "the second loss")
    expect(len(told) == 2, "who is forgotten is not told")


async def go_away_refuses_what_is_new(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    running, late = _Reader(), _Reader()
    await _open(caller, _to(server), running)
    there = await served.one()
    server.go_away()
    try:
        await _open(caller, _to(server), late)
    except ConnectFailed:
        pass
    else:
        await until(lambda: len(late.ends) == 1, "the refusal")
        expect(late.ends[0] is not None and late.ends[0].retryable, f"{late.ends[0]!r}")
    expect(served.streams == [], "nothing new is served")
    there.send(1)
    there.end()
    await until(lambda: running.ends == [None], "the end of what ran")
    expect(running.items == [1], "which went on")


async def stop_listening_keeps_what_is_open(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    await caller.reach(server.address or "", SOON_S)
    await server.stop_listening()
    reader = _Reader()
    await _open(caller, _to(server), reader)
    (await served.one()).end()
    await until(lambda: reader.ends == [None], "the end")
    late = await harness.plane("late", _refuse)
    await fails(ConnectFailed, late.reach(server.address or "", SOON_S))


async def close_ends_both_sides(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    reader, back = _Reader(), _Reader()
    await _open(caller, _to(server), reader)
    await served.one()
    await caller.close()
    expect(len(reader.ends) == 1 and reader.ends[0] is not None, "our own calls have ended")
    await until(lambda: served.num_closed == 1 and len(served.given_up) == 1, "the peer gives up")
    await until(lambda: server.gauges().num_open == server.gauges().num_served == 0, "nothing is left")
    await fails(ConnectFailed, _open(caller, _to(server), back))
    await caller.close()


async def the_first_address_is_what_others_are_told(harness: Harness) -> None:
    plane = harness.ground("server").plane("server", _refuse)
    try:
        expect(plane.address is None, "none before it listens")
        real = await plane.listen(harness.address("server"), "public")
        expect(
            plane.address == f"public:{real.rpartition(':')[2]}", "the host as told, the port that there is"
        )
        await plane.listen(harness.address("server"))
        expect((plane.address or "").startswith("public:"), "a second one is not told")
    finally:
        await plane.close()


async def gauges_count_what_is_open(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    expect(caller.gauges().num_open == caller.gauges().num_calls == 0, "nothing yet")
    streams = [await _open(caller, _to(server), _Reader()) for _ in range(3)]
    await until(lambda: server.gauges().num_served == 3, "three streams at the peer")
    expect(caller.gauges().num_calls == 3 and caller.gauges().num_open > 0, f"{caller.gauges()}")
    served.streams[0].end()
    for stream in streams[1:]:
        stream.cancel()
    await until(lambda: server.gauges().num_served == caller.gauges().num_calls == 0, "none is left")
    expect(caller.stats.calls_ended == {"ok": 1, "cancelled": 2}, f"{caller.stats.calls_ended}")
    expect(server.stats.served_ended == {"ok": 1, "cancelled": 2}, f"{server.stats.served_ended}")


PORT_CASES: tuple[Case, ...] = (
    open_carries_the_request,
    open_to_nobody_sends_nothing,
    open_does_not_wait_where_the_peer_is_reached,
    cancel_reaches_the_peer,
    fail_takes_the_place_of_what_waits,
    a_held_stream_gets_no_more_than_its_window,
    credit_comes_with_what_was_consumed,
    losses_are_told_by_address,
    go_away_refuses_what_is_new,
    stop_listening_keeps_what_is_open,
    close_ends_both_sides,
    the_first_address_is_what_others_are_told,
    gauges_count_what_is_open,
)
