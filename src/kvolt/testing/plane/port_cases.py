"""Cases of the request plane's suite for the port itself, without processes."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from kvolt.core.errors import ConnectFailed, KvoltError, NetworkFault, Unavailable
from kvolt.runtime.plane.port import Destination, IncomingStream, OutgoingStream, RequestPlane
from kvolt.testing.cases import SOON_S, cases_in, expect, fails
from kvolt.testing.plane.harness import Case, Harness, until

_TARGET = "ns.worker.generate"
_decode = msgspec.msgpack.Decoder().decode


class _ServedStreams:
    """Collects the streams that peers open, for the case to serve."""

    def __init__(self) -> None:
        self.streams: list[IncomingStream] = []
        self.cancel_errors: list[KvoltError] = []
        self.num_closed = 0

    def on_open(self, stream: IncomingStream) -> None:
        self.streams.append(stream)
        stream.on_cancel = self.cancel_errors.append
        stream.on_closed = self._on_closed

    def _on_closed(self) -> None:
        self.num_closed += 1

    async def one(self) -> IncomingStream:
        """Wait for the next stream."""
        await until(lambda: len(self.streams) > 0, "the stream at the peer")
        return self.streams.pop(0)


class _Reader:
    """Sink that collects items and ends."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.ends: list[KvoltError | None] = []

    def on_item(self, item: Any) -> None:
        self.items.append(item)

    def on_end(self, error: KvoltError | None) -> None:
        self.ends.append(error)


async def _pair(harness: Harness) -> tuple[RequestPlane, _ServedStreams, RequestPlane]:
    """A serving plane, its streams, and a calling plane."""
    served = _ServedStreams()
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
    incoming = await served.one()
    expect((incoming.target, incoming.context) == (_TARGET, {"request_id": "r"}), "target and context arrive")
    expect(
        incoming.deadline_s is not None and 20.0 < incoming.deadline_s <= 30.0,
        f"{incoming.deadline_s} s are left",
    )
    expect(incoming.decode_body(_decode) == {"a": 1}, "the request arrives")
    expect(
        incoming.writable and not incoming.closed and stream.last_item_at() is None,
        "no item has been sent yet",
    )
    for item in range(3):
        incoming.send(item)
    incoming.end()
    await until(lambda: reader.ends == [None], "the end")
    expect(reader.items == [0, 1, 2] and stream.last_item_at() is not None, "items arrive before the end")
    expect(
        incoming.closed and served.num_closed == 1 and served.cancel_errors == [],
        "the stream ended without a cancel",
    )


async def open_to_closed_plane_fails(harness: Harness) -> None:
    gone = await harness.plane("gone", _refuse)
    to = _to(gone)
    await gone.close()
    caller, reader = await harness.plane("caller", _refuse), _Reader()
    await fails(ConnectFailed, _open(caller, to, reader))
    await fails(ConnectFailed, caller.ensure_connected(to.address, SOON_S))
    await fails(ConnectFailed, _open(caller, Destination("nonsense", _TARGET), reader))
    expect(reader.ends == [] and caller.gauges().num_calls == 0, "a failed open does not call on_end")


async def open_to_connected_peer_does_not_wait(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    await caller.ensure_connected(server.address or "", SOON_S)
    opening = _open(caller, _to(server), _Reader())
    try:
        opening.send(None)
    except StopIteration as done:
        done.value.cancel()
    else:
        opening.close()
        raise AssertionError("open suspended")
    await until(
        lambda: served.num_closed == len(served.streams), "it is cancelled at the peer, if it arrived"
    )


async def cancel_reaches_the_peer(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    reader = _Reader()
    stream = await _open(caller, _to(server), reader)
    incoming = await served.one()
    incoming.send(1)
    await until(lambda: reader.items == [1], "the item")
    stream.cancel()
    stream.cancel()
    await until(lambda: len(served.cancel_errors) == 1 and served.num_closed == 1, "the peer is cancelled")
    incoming.send(2)
    incoming.end()
    await asyncio.sleep(0.05)
    expect((reader.items, reader.ends) == ([1], []), "nothing is delivered after a cancel, not even the end")
    expect(caller.gauges().num_calls == server.gauges().num_served == 0, "no stream is left")


async def fail_overtakes_queued_items(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    reader = _Reader()
    stream = await _open(caller, _to(server), reader, automatic_credit=False)
    incoming = await served.one()
    num_sent = 2 * harness.window_items
    for item in range(num_sent):
        incoming.send(item)
    expect(not incoming.writable, "items are queued without credit")
    incoming.fail(Unavailable("stopping"))
    await until(lambda: len(reader.ends) == 1, "the end")
    expect(
        type(reader.ends[0]) is Unavailable and len(reader.items) < num_sent,
        "the error overtakes queued items",
    )
    expect(len(served.cancel_errors) == 1, "the producer is notified too")
    stream.cancel()


async def paused_stream_gets_at_most_its_window(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    reader = _Reader()
    stream = await _open(caller, _to(server), reader)
    incoming = await served.one()
    stream.pause_reading()
    expect(stream.is_reading_paused, "the pause state is visible")
    num_sent = 4 * harness.window_items
    for item in range(num_sent):
        incoming.send(item)
    incoming.end()
    await asyncio.sleep(0.2)
    expect(0 < len(reader.items) <= harness.window_items, f"{len(reader.items)} items came")
    stream.resume_reading()
    expect(not stream.is_reading_paused, "the pause state is visible")
    await until(lambda: reader.ends == [None], "the end")
    expect(reader.items == list(range(num_sent)), "nothing is lost")


async def credit_follows_consumption(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    reader, num_consumed = _Reader(), 0
    stream = await _open(caller, _to(server), reader, automatic_credit=False)
    incoming = await served.one()
    writable: list[int] = []
    incoming.on_writable = lambda: writable.append(1)
    for item in range(3 * harness.window_items):
        incoming.send(item)
    await asyncio.sleep(0.2)
    expect(len(reader.items) == harness.window_items, f"{len(reader.items)} items came")
    while num_consumed < 3 * harness.window_items:
        await until(lambda: len(reader.items) > num_consumed, "more items")  # noqa: B023 - awaited in this turn
        stream.mark_consumed(len(reader.items) - num_consumed)
        num_consumed = len(reader.items)
    await until(lambda: len(writable) > 0 and incoming.writable, "the producer is notified of credit")
    stream.cancel()


async def losses_are_reported_by_address(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    events: list[Any] = []

    class Ends(_Reader):
        def on_end(self, error: KvoltError | None) -> None:
            events.append(type(error))

    def lost(address: str, reason: KvoltError) -> None:
        expect(isinstance(reason, NetworkFault), f"{reason!r}")
        events.append(address)

    caller.on_closed(lost)
    await _open(caller, _to(server), Ends())
    await served.one()
    await harness.cut("server")
    await until(lambda: len(events) == 2, "the loss and the end")
    expect(events[0] == server.address, f"the loss is reported before the end: {events}")
    await until(lambda: served.num_closed == 1 and len(served.cancel_errors) == 1, "the peer is cancelled")
    caller.remove_listeners(lost)
    caller.remove_listeners(lost)
    await caller.ensure_connected(server.address or "", SOON_S)
    await harness.cut("server")
    await until(lambda: caller.gauges().num_open == 0, "the second loss")
    expect(len(events) == 2, "a removed listener is not notified")


async def go_away_refuses_new_streams(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    running, late = _Reader(), _Reader()
    await _open(caller, _to(server), running)
    incoming = await served.one()
    server.go_away()
    try:
        await _open(caller, _to(server), late)
    except ConnectFailed:
        pass
    else:
        await until(lambda: len(late.ends) == 1, "the refusal")
        expect(late.ends[0] is not None and late.ends[0].retryable, f"{late.ends[0]!r}")
    expect(served.streams == [], "no new stream is served")
    incoming.send(1)
    incoming.end()
    await until(lambda: running.ends == [None], "the end of the running stream")
    expect(running.items == [1], "the running stream continues")


async def stop_listening_keeps_open_streams(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    await caller.ensure_connected(server.address or "", SOON_S)
    await server.stop_listening()
    reader = _Reader()
    await _open(caller, _to(server), reader)
    (await served.one()).end()
    await until(lambda: reader.ends == [None], "the end")
    late = await harness.plane("late", _refuse)
    await fails(ConnectFailed, late.ensure_connected(server.address or "", SOON_S))


async def close_ends_both_sides(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    reader, back = _Reader(), _Reader()
    await _open(caller, _to(server), reader)
    await served.one()
    await caller.close()
    expect(len(reader.ends) == 1 and reader.ends[0] is not None, "local calls have ended")
    await until(lambda: served.num_closed == 1 and len(served.cancel_errors) == 1, "the peer is cancelled")
    await until(lambda: server.gauges().num_open == server.gauges().num_served == 0, "no stream is left")
    await fails(ConnectFailed, _open(caller, _to(server), back))
    await caller.close()


async def first_address_is_advertised(harness: Harness) -> None:
    plane = harness.ports("server").plane("server", _refuse)
    try:
        expect(plane.address is None, "no address before it listens")
        real = await plane.listen(harness.address("server"), "public")
        expect(plane.address == f"public:{real.rpartition(':')[2]}", "the advertised host with the real port")
        await plane.listen(harness.address("server"))
        expect((plane.address or "").startswith("public:"), "a second address is not advertised")
    finally:
        await plane.close()


async def gauges_count_open_streams(harness: Harness) -> None:
    server, served, caller = await _pair(harness)
    expect(caller.gauges().num_open == caller.gauges().num_calls == 0, "no streams yet")
    streams = [await _open(caller, _to(server), _Reader()) for _ in range(3)]
    await until(lambda: server.gauges().num_served == 3, "three streams at the peer")
    expect(caller.gauges().num_calls == 3 and caller.gauges().num_open > 0, f"{caller.gauges()}")
    served.streams[0].end()
    for stream in streams[1:]:
        stream.cancel()
    await until(lambda: server.gauges().num_served == caller.gauges().num_calls == 0, "none is left")
    expect(caller.stats.calls_ended == {"ok": 1, "cancelled": 2}, f"{caller.stats.calls_ended}")
    expect(server.stats.served_ended == {"ok": 1, "cancelled": 2}, f"{server.stats.served_ended}")


PORT_CASES: tuple[Case, ...] = cases_in(__name__)
