"""Conformance suite of the EventPlane port, for any implementation and any event loop.

A case is an async function of a `Harness`; it raises AssertionError when the plane violates the port. With pytest:

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__) async def test_conformance(case):
        await case(MyHarness())

Cases close every plane they open. They do not depend on absolute sequence numbers, so a harness may publish while it
waits for a connection (`probe` does).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from kvolt.core.errors import InvalidRequest
from kvolt.runtime.events.port import Event, EventPlane, EventStream
from kvolt.runtime.tasks import Scope
from kvolt.testing.cases import cases_in

_DEADLINE_S = 10.0
_QUIET_S = 0.1
_PROBE_S = 0.02
_PROBE = b"probe"
_PROBE_END = b"probe-end"


class Harness(Protocol):
    """Creates planes of an implementation. All planes of one harness are connected."""

    async def plane(self) -> EventPlane:
        """Return a started plane with its own publisher id."""
        ...

    async def connected(self, publisher: EventPlane, topic: str, *streams: EventStream) -> None:
        """Wait until the next published event reaches the streams and no older event is queued in them."""
        ...

    def lose(self, publisher: EventPlane, num_events: int) -> None:
        """Drop the publisher's next events after they are numbered."""
        ...


async def probe(publisher: EventPlane, topic: str, *streams: EventStream) -> None:
    """`Harness.connected` for planes that connect asynchronously: publish until every stream receives an event."""
    async with asyncio.timeout(_DEADLINE_S):
        for stream in streams:
            await _first(publisher, topic, stream, _PROBE)
        publisher.publish(topic, _PROBE_END)
        for stream in streams:
            async for event in stream:
                if event.publisher == publisher.publisher and event.payload == _PROBE_END:
                    break


async def _first(publisher: EventPlane, topic: str, stream: EventStream, payload: bytes) -> Event:
    """Publish until the stream receives an event of this publisher; return that event."""
    async with asyncio.timeout(_DEADLINE_S):
        while True:
            publisher.publish(topic, payload)
            try:
                async with asyncio.timeout(_PROBE_S):
                    event = await anext(stream)
            except TimeoutError:
                continue
            if event.publisher == publisher.publisher:
                return event


@asynccontextmanager
async def _planes(harness: Harness, num_planes: int) -> AsyncIterator[list[EventPlane]]:
    planes: list[EventPlane] = []
    try:
        async with asyncio.timeout(_DEADLINE_S):
            for _ in range(num_planes):
                planes.append(await harness.plane())
        yield planes
    finally:
        for plane in planes:
            await plane.close()


async def _take(stream: EventStream, num_events: int) -> list[Event]:
    async with asyncio.timeout(_DEADLINE_S):
        return [await anext(stream) for _ in range(num_events)]


async def _rest(stream: EventStream) -> list[Event]:
    """Events still queued in the stream of a closed plane."""
    async with asyncio.timeout(_DEADLINE_S):
        return [event async for event in stream]


async def _assert_quiet(stream: EventStream) -> None:
    try:
        async with asyncio.timeout(_QUIET_S):
            event = await anext(stream)
    except TimeoutError:
        return
    raise AssertionError(f"unexpected event: {event}")


def _payloads(events: list[Event]) -> list[bytes]:
    return [event.payload for event in events]


def _numbered(name: str, num_events: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(num_events)]


async def keeps_order_per_publisher(harness: Harness) -> None:
    async with _planes(harness, 2) as (sender, receiver):
        stream = receiver.subscribe("kv")
        await harness.connected(sender, "kv", stream)
        sent = _numbered("e", 300)
        for payload in sent:
            sender.publish("kv", payload)
        events = await _take(stream, len(sent))
        assert _payloads(events) == sent
        assert [event.missed for event in events] == [0] * len(sent)
        assert {(event.topic, event.publisher) for event in events} == {("kv", sender.publisher)}
        first = events[0].sequence
        assert [event.sequence for event in events] == list(range(first, first + len(sent)))


async def connects_all_publishers_and_subscribers(harness: Harness) -> None:
    async with _planes(harness, 4) as (one, two, left, right):
        assert len({plane.publisher for plane in (one, two, left, right)}) == 4
        streams = (left.subscribe("kv"), right.subscribe("kv"), right.subscribe("kv"))
        await harness.connected(one, "kv", *streams)
        await harness.connected(two, "kv", *streams)
        for a, b in zip(_numbered("a", 50), _numbered("b", 50), strict=True):
            one.publish("kv", a)
            two.publish("kv", b)
        for stream in streams:
            events = await _take(stream, 100)
            assert [event.missed for event in events] == [0] * 100
            for sender, name in ((one, "a"), (two, "b")):
                mine = [event for event in events if event.publisher == sender.publisher]
                assert _payloads(mine) == _numbered(name, 50)


async def delivers_to_own_subscribers(harness: Harness) -> None:
    async with _planes(harness, 1) as (plane,):
        stream = plane.subscribe("kv")
        await harness.connected(plane, "kv", stream)
        plane.publish("kv", b"mine")
        assert _payloads(await _take(stream, 1)) == [b"mine"]


async def separates_topics(harness: Harness) -> None:
    async with _planes(harness, 2) as (sender, receiver):
        short, long = receiver.subscribe("kv"), receiver.subscribe("kv2")
        await harness.connected(sender, "kv", short)
        await harness.connected(sender, "kv2", long)
        sender.publish("kv2", b"for kv2")
        sender.publish("k", b"for k")
        sender.publish("kv.more", b"for kv.more")
        sender.publish("kv", b"for kv")
        assert _payloads(await _take(short, 1)) == [b"for kv"]
        (event,) = await _take(long, 1)
        assert (event.topic, event.payload, event.missed) == ("kv2", b"for kv2", 0)
        await _assert_quiet(short)


async def numbers_topics_separately(harness: Harness) -> None:
    async with _planes(harness, 2) as (sender, receiver):
        stream = receiver.subscribe("kv")
        await harness.connected(sender, "kv", stream)
        sender.publish("kv", b"first")
        for payload in _numbered("load", 5):
            sender.publish("load", payload)
        sender.publish("kv", b"second")
        first, second = await _take(stream, 2)
        assert (second.sequence, second.missed) == (first.sequence + 1, 0)


async def reports_a_gap(harness: Harness) -> None:
    async with _planes(harness, 2) as (sender, receiver):
        stream = receiver.subscribe("kv")
        await harness.connected(sender, "kv", stream)
        sender.publish("kv", b"before")
        harness.lose(sender, 3)
        for payload in [*_numbered("lost", 3), b"after", b"later"]:
            sender.publish("kv", payload)
        before, after, later = await _take(stream, 3)
        assert _payloads([before, after, later]) == [b"before", b"after", b"later"]
        assert [event.missed for event in (before, after, later)] == [0, 3, 0]
        assert after.sequence == before.sequence + 4


async def gaps_are_per_publisher(harness: Harness) -> None:
    async with _planes(harness, 3) as (lossy, sound, receiver):
        stream = receiver.subscribe("kv")
        for sender in (lossy, sound):
            await harness.connected(sender, "kv", stream)
        for sender in (lossy, sound):
            sender.publish("kv", b"before")
        await _take(stream, 2)
        harness.lose(lossy, 2)
        for sender in (lossy, sound):
            for payload in _numbered("e", 3):
                sender.publish("kv", payload)
        missed = [(event.publisher, event.missed) for event in await _take(stream, 4)]
        assert sorted(missed) == sorted([(lossy.publisher, 2), *[(sound.publisher, 0)] * 3])


async def slow_reader_drops_oldest(harness: Harness) -> None:
    """Both streams belong to one plane: once the wide one has all events, all were offered to the narrow one."""
    async with _planes(harness, 2) as (sender, receiver):
        wide, narrow = receiver.subscribe("kv"), receiver.subscribe("kv", queue_limit=4)
        await harness.connected(sender, "kv", wide, narrow)
        sender.publish("kv", b"before")
        await _take(narrow, 1)
        sent = _numbered("e", 10)
        for payload in sent:
            sender.publish("kv", payload)
        assert _payloads(await _take(wide, 11)) == [b"before", *sent]
        await asyncio.sleep(_QUIET_S)
        events = await _take(narrow, 4)
        assert _payloads(events) == sent[-4:]
        assert [event.missed for event in events] == [6, 0, 0, 0]
        sender.publish("kv", b"after")
        (after,) = await _take(narrow, 1)
        assert (after.payload, after.missed) == (b"after", 0)


async def late_subscriber_sees_no_gap(harness: Harness) -> None:
    async with _planes(harness, 2) as (sender, receiver):
        for payload in _numbered("early", 5):
            sender.publish("kv", payload)
        await asyncio.sleep(_QUIET_S)
        event = await _first(sender, "kv", receiver.subscribe("kv"), b"now")
        assert (event.payload, event.missed) == (b"now", 0)
        assert event.sequence > 5


async def restarted_publisher_shows_no_gap(harness: Harness) -> None:
    async with _planes(harness, 2) as (old, receiver):
        stream = receiver.subscribe("kv")
        await harness.connected(old, "kv", stream)
        old.publish("kv", b"old")
        (last,) = await _take(stream, 1)
        await old.close()
        async with _planes(harness, 1) as (new,):
            assert new.publisher != old.publisher
            event = await _first(new, "kv", stream, b"new")
        assert (last.publisher, last.payload) == (old.publisher, b"old")
        assert (event.publisher, event.payload, event.missed) == (new.publisher, b"new", 0)


async def carries_empty_and_large_payloads(harness: Harness) -> None:
    async with _planes(harness, 2) as (sender, receiver):
        stream = receiver.subscribe("kv")
        await harness.connected(sender, "kv", stream)
        large = bytes(range(256)) * 4096
        for payload in (b"", large, b""):
            sender.publish("kv", payload)
        assert _payloads(await _take(stream, 3)) == [b"", large, b""]


async def cancelled_read_drops_nothing(harness: Harness) -> None:
    async with _planes(harness, 2) as (sender, receiver):
        stream = receiver.subscribe("kv")
        await harness.connected(sender, "kv", stream)
        await _assert_quiet(stream)
        sender.publish("kv", b"after the cancelled read")
        (event,) = await _take(stream, 1)
        assert (event.payload, event.missed) == (b"after the cancelled read", 0)


async def aclose_ends_one_stream(harness: Harness) -> None:
    async with _planes(harness, 2) as (sender, receiver):
        left, stays = receiver.subscribe("kv"), receiver.subscribe("kv")
        await harness.connected(sender, "kv", left, stays)
        sender.publish("kv", b"queued")
        assert _payloads(await _take(stays, 1)) == [b"queued"]
        await asyncio.sleep(_QUIET_S)
        await left.aclose()
        sender.publish("kv", b"after")
        assert _payloads(await _take(stays, 1)) == [b"after"]
        assert await _rest(left) == []
        await left.aclose()


async def close_ends_the_iterators(harness: Harness) -> None:
    async with _planes(harness, 1) as (plane,):
        waiting, unread = plane.subscribe("kv"), plane.subscribe("kv")
        reads: list[list[Event]] = []

        async def read() -> None:
            reads.append(await _rest(waiting))

        async with Scope("close") as scope:
            scope.start(read(), "read")
            await asyncio.sleep(_QUIET_S)
            await plane.close()
        assert reads == [[]]
        assert await _rest(unread) == []
        assert await _rest(plane.subscribe("kv")) == []
        await plane.close()


async def publishes_without_subscribers(harness: Harness) -> None:
    async with _planes(harness, 1) as (sender,):
        for payload in _numbered("e", 100):
            sender.publish("kv", payload)


async def publishing_after_close_is_ignored(harness: Harness) -> None:
    """The parts of a process stop in some order: a late event is no error and is dropped."""
    async with _planes(harness, 2) as (sender, receiver):
        stream = receiver.subscribe("kv")
        await harness.connected(sender, "kv", stream)
        await sender.close()
        sender.publish("kv", b"too late")
        await _assert_quiet(stream)


async def rejects_bad_topics(harness: Harness) -> None:
    async with _planes(harness, 1) as (plane,):
        for topic in ("", "kv\0more", "\ud800"):
            for call in (
                lambda topic=topic: plane.publish(topic, b""),
                lambda topic=topic: plane.subscribe(topic),
            ):
                try:
                    call()
                except InvalidRequest:
                    continue
                raise AssertionError(f"topic {topic!r} was accepted")


CASES: tuple[Callable[[Harness], Awaitable[None]], ...] = cases_in(__name__)
