"""Events over the request plane: the port's conformance, and what processes may publish and read."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest
import uvloop
from tests.unit.runtime.events.plane_lab import PREFIX, EventProcess, PlaneHarness, retry_soon
from tests.waits import MUST_HAPPEN_S

from kvolt.core.endpoints import KV_TOPIC, LOAD_TOPIC, ROUTER_LOAD_TOPIC, PublisherRegistration
from kvolt.core.errors import AccessDenied, NotFound, PayloadTooLarge
from kvolt.runtime.endpoint.call import Deadlines, decode_any, open_stream
from kvolt.runtime.events import plane_events
from kvolt.runtime.events.plane_events import VERSION, Subscribe
from kvolt.runtime.events.port import Event, EventStream
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.process_control import EVENTS_ENDPOINT
from kvolt.runtime.security.identity import ProcessRole
from kvolt.testing.events_suite import CASES


@pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case, loop_factory, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    retry_soon(monkeypatch)

    async def main() -> None:
        num_descriptors = (
            len(os.listdir("/proc/self/fd")) + 1
        )  # uvloop keeps one for when it runs out of them
        await case(PlaneHarness())
        assert len(asyncio.all_tasks()) == 1
        async with asyncio.timeout(MUST_HAPPEN_S):  # closing a connection of TLS takes some turns of the loop
            while len(os.listdir("/proc/self/fd")) > num_descriptors:
                await asyncio.sleep(0.005)

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


@pytest.fixture
async def harness(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PlaneHarness]:
    retry_soon(monkeypatch)
    yield PlaneHarness()
    assert len(asyncio.all_tasks()) <= 2, "a task was left behind"


async def first(stream: EventStream) -> Event:
    async with asyncio.timeout(MUST_HAPPEN_S):
        return await anext(stream)


async def until_connected(publisher: EventProcess, topic: str, num_streams: int = 1) -> None:
    async with asyncio.timeout(MUST_HAPPEN_S):
        while len(publisher._subscribers.get(topic, ())) < num_streams:
            await asyncio.sleep(0.005)


async def test_events_have_the_identity_of_their_process(harness: PlaneHarness) -> None:
    worker, frontend = await harness.plane(ProcessRole.WORKER), await harness.plane()
    stream, own = frontend.subscribe(KV_TOPIC), worker.subscribe(KV_TOPIC)
    await until_connected(worker, KV_TOPIC)
    worker.publish(KV_TOPIC, b"news")
    event = await first(stream)
    assert (event.publisher, event.identity) == (worker.publisher, "kvolt://worker/p1")
    assert await first(own) == event
    await worker.close()
    await frontend.close()


async def test_a_worker_publishes_its_own_topics_only(harness: PlaneHarness) -> None:
    worker, frontend, router = [
        await harness.plane(role) for role in (ProcessRole.WORKER, ProcessRole.FRONTEND, ProcessRole.ROUTER)
    ]
    stream = frontend.subscribe(ROUTER_LOAD_TOPIC)
    frontend.subscribe(LOAD_TOPIC)
    await until_connected(router, ROUTER_LOAD_TOPIC)
    await until_connected(worker, LOAD_TOPIC)
    assert ROUTER_LOAD_TOPIC not in worker._subscribers
    worker.publish(ROUTER_LOAD_TOPIC, b"forged")
    router.publish(ROUTER_LOAD_TOPIC, b"true")
    assert (await first(stream)).payload == b"true"
    for each in (worker, frontend, router):
        await each.close()


async def test_a_worker_reads_no_events_of_others(harness: PlaneHarness) -> None:
    worker, frontend = await harness.plane(ProcessRole.WORKER), await harness.plane()
    assert frontend.tcp.address is not None
    to = Destination(frontend.tcp.address, EVENTS_ENDPOINT)
    stream = await open_stream(
        worker.tcp, to, Subscribe(frontend.publisher, KV_TOPIC), Deadlines(), decode_any
    )
    with pytest.raises(AccessDenied):
        await first(stream)  # type: ignore[arg-type]
    assert not frontend._subscribers
    await worker.close()
    await frontend.close()


@pytest.mark.parametrize("claimed", ["kvolt://worker/p2", "kvolt://worker/p1"], ids=["own", "victim"])
async def test_a_registration_of_another_address_gets_no_events_and_takes_none(
    harness: PlaneHarness, claimed: str
) -> None:
    """A worker registers a publisher at the address of another worker."""
    victim, rogue, frontend = [
        await harness.plane(role) for role in (ProcessRole.WORKER, ProcessRole.WORKER, ProcessRole.FRONTEND)
    ]
    assert victim.tcp.address is not None
    forged = PublisherRegistration(victim.tcp.address, VERSION, claimed)
    lease = await harness.discovery.lease(30)
    await harness.discovery.put(PREFIX + "forged", msgspec.msgpack.encode(forged), lease)
    stream = frontend.subscribe(KV_TOPIC)
    for each in (victim, rogue):
        await until_connected(each, KV_TOPIC)
    source = frontend._sources[PREFIX + "forged"]
    async with asyncio.timeout(MUST_HAPPEN_S):
        while not source._is_reported:
            await asyncio.sleep(0.005)
    for payload in (b"true", b"also true"):
        victim.publish(KV_TOPIC, payload)
        event = await first(stream)
        assert (event.publisher, event.payload) == (victim.publisher, payload)
    for each in (victim, rogue, frontend):
        await each.close()


async def test_a_stream_for_another_publisher_is_refused(harness: PlaneHarness) -> None:
    """The process at the address was restarted."""
    frontend, other = await harness.plane(), await harness.plane()
    assert frontend.tcp.address is not None
    to = Destination(frontend.tcp.address, EVENTS_ENDPOINT)
    stream = await open_stream(other.tcp, to, Subscribe("previous", KV_TOPIC), Deadlines(), decode_any)
    with pytest.raises(NotFound):
        await first(stream)  # type: ignore[arg-type]
    await frontend.close()
    await other.close()


async def test_streams_are_limited(harness: PlaneHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plane_events, "MAX_STREAMS", 1)
    publisher, one, two = [await harness.plane() for _ in range(3)]
    stream = one.subscribe(KV_TOPIC)
    await until_connected(publisher, KV_TOPIC)
    two.subscribe(KV_TOPIC)
    source = None
    async with asyncio.timeout(MUST_HAPPEN_S):
        while source is None or not source._is_reported:
            source = two._sources.get(PREFIX + publisher.publisher)
            await asyncio.sleep(0.005)
    publisher.publish(KV_TOPIC, b"heard")
    assert (await first(stream)).payload == b"heard"
    for each in (publisher, one, two):
        await each.close()


async def test_a_slow_subscriber_misses_the_oldest_events_and_delays_none(harness: PlaneHarness) -> None:
    publisher, slow, quick = [await PlaneHarness.plane(harness) for _ in range(3)]
    streams = slow.subscribe(KV_TOPIC), quick.subscribe(KV_TOPIC)
    await until_connected(publisher, KV_TOPIC, 2)
    subscriber = next(iter(publisher._subscribers[KV_TOPIC]))
    for each in publisher._subscribers[KV_TOPIC]:
        each._max_events = 4
    # No turn of the loop in between, so nothing is acknowledged.
    for number in range(10_000):
        publisher.publish(KV_TOPIC, str(number).encode())
    assert len(subscriber._waiting) == 4
    for stream in streams:
        last = await first(stream)
        missed = last.missed
        while last.payload != b"9999":
            last = await first(stream)
            missed += last.missed
        assert missed > 0
    for process in (publisher, slow, quick):
        await process.close()


async def test_events_arrive_that_were_published_while_the_transport_was_full(harness: PlaneHarness) -> None:
    publisher, other = await harness.plane(), await harness.plane()
    stream = other.subscribe(KV_TOPIC)
    await until_connected(publisher, KV_TOPIC)
    session = publisher.tcp.all()[0].session
    session.paused = True
    for number in range(3):
        publisher.publish(KV_TOPIC, str(number).encode())
    session.resume()
    publisher.publish(KV_TOPIC, b"3")
    assert [(await first(stream)).payload for _ in range(4)] == [b"0", b"1", b"2", b"3"]
    await publisher.close()
    await other.close()


async def test_the_bytes_that_wait_for_a_slow_subscriber_are_bounded(harness: PlaneHarness) -> None:
    publisher, other = await harness.plane(), await harness.plane()
    stream = other.subscribe(KV_TOPIC)
    await until_connected(publisher, KV_TOPIC)
    subscriber = next(iter(publisher._subscribers[KV_TOPIC]))
    subscriber._max_bytes = 2500
    session = publisher.tcp.all()[0].session
    session.paused = True
    for number in range(10):
        publisher.publish(KV_TOPIC, bytes([number]) * 1000)
    assert len(subscriber._waiting) == 2
    session.resume()
    events = [await first(stream) for _ in range(3)]
    assert [(event.payload[0], event.missed) for event in events] == [(0, 0), (8, 7), (9, 0)]
    await publisher.close()
    await other.close()


async def test_large_events_arrive_and_larger_ones_are_refused(harness: PlaneHarness) -> None:
    publisher, other = await harness.plane(), await harness.plane()
    stream = other.subscribe(KV_TOPIC)
    await until_connected(publisher, KV_TOPIC)
    large = random.Random(1).randbytes(8 << 20)
    publisher.publish(KV_TOPIC, large)
    publisher.publish(KV_TOPIC, b"next")
    assert (await first(stream)).payload == large
    assert (await first(stream)).payload == b"next"
    with pytest.raises(PayloadTooLarge):
        publisher.publish(KV_TOPIC, large + b"1")
    await publisher.close()
    await other.close()


@pytest.mark.parametrize(
    "value",
    [b"\xc1", b"", msgspec.msgpack.encode(PublisherRegistration("tcp://127.0.0.1:1", 1))],
    ids=["garbage", "empty", "without-a-key"],
)
async def test_registrations_without_a_certificate_are_ignored(
    harness: PlaneHarness, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await harness.discovery.lease(30)
    await harness.discovery.put(PREFIX + "stranger", value, lease)
    publisher, frontend = await harness.plane(), await harness.plane()
    with caplog.at_level(logging.WARNING):
        stream = frontend.subscribe(KV_TOPIC)
        await until_connected(publisher, KV_TOPIC)
    publisher.publish(KV_TOPIC, b"news")
    assert (await first(stream)).payload == b"news"
    assert harness.totals["rejected", "registration"] == 1
    assert len([each for each in caplog.records if "publisher ignored" in each.message]) == 1
    await publisher.close()
    await frontend.close()


async def test_one_identity_with_many_publishers_displaces_no_others(
    harness: PlaneHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plane_events, "MAX_PUBLISHERS", 3)
    worker, frontend = await harness.plane(ProcessRole.WORKER), await harness.plane()
    lease = await harness.discovery.lease(30)
    rogue = msgspec.msgpack.encode(PublisherRegistration("127.0.0.1:1", VERSION, "kvolt://worker/rogue"))
    for number in range(20):
        await harness.discovery.put(f"{PREFIX}rogue-{number}", rogue, lease)
    stream = frontend.subscribe(KV_TOPIC)
    await until_connected(worker, KV_TOPIC)
    assert len(frontend._sources) == 3
    worker.publish(KV_TOPIC, b"news")
    assert (await first(stream)).payload == b"news"
    await worker.close()
    await frontend.close()


async def test_half_open_connections_neither_reach_events_nor_stop_them(harness: PlaneHarness) -> None:
    """Strangers at the one port that there is: their number is bounded, and subscribers are served."""
    publisher = await harness.plane(ProcessRole.WORKER)
    assert publisher.tcp.address is not None
    host, port = publisher.tcp.address.rsplit(":", 1)
    strangers = [socket.create_connection((host, int(port))) for _ in range(700)]
    num_before = len(os.listdir("/proc/self/fd"))
    async with asyncio.timeout(MUST_HAPPEN_S):
        while len(os.listdir("/proc/self/fd")) < num_before + 64:
            await asyncio.sleep(0.005)
    assert len(os.listdir("/proc/self/fd")) <= num_before + 64 + 512, "of one address"
    for each in strangers[40:]:
        each.close()
    frontend = await harness.plane()
    stream = frontend.subscribe(KV_TOPIC)
    await until_connected(publisher, KV_TOPIC)
    publisher.publish(KV_TOPIC, b"news")
    assert (await first(stream)).payload == b"news"
    assert not publisher.tcp.num_open > 2
    for each in strangers:
        each.close()
    await frontend.close()
    await publisher.close()
