from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys

import msgspec
import pytest
import uvloop
import zmq
from tests.unit.runtime.events.zmq_lab import PREFIX, ZmqHarness, no_sockets_left, until
from tests.waits import MUST_HAPPEN_S

from kvolt.core.endpoints import PublisherRegistration
from kvolt.core.errors import ConfigError, DiscoveryLost, PayloadTooLarge, Unavailable
from kvolt.runtime.events import zmq_plane
from kvolt.runtime.events import zmq_sockets as events_zmq
from kvolt.runtime.events.port import Event
from kvolt.runtime.events.zmq_plane import ZmqEvents
from kvolt.runtime.events.zmq_sockets import ZmqOptions, decode, encode
from kvolt.testing.events_suite import CASES


@pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_conformance(case, loop_factory):
    async def main() -> None:
        num_descriptors = len(os.listdir("/proc/self/fd"))
        await case(ZmqHarness())
        assert len(asyncio.all_tasks()) == 1
        assert len(os.listdir("/proc/self/fd")) <= num_descriptors

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
    assert no_sockets_left()


@pytest.fixture
async def harness():
    harness = ZmqHarness()
    yield harness
    assert len(asyncio.all_tasks()) <= 2, "a task was left behind"
    assert no_sockets_left()


def test_message_layout():
    assert encode("kv", "p1", 258, b"x") == [b"kv\0", b"p1", b"\x02\x01" + bytes(6), b"x"]
    assert decode(encode("kv", "p1", 258, b"x")) == Event("kv", "p1", 258, b"x")


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"kv\0", b"p1", bytes(8)],
        [b"kv\0", b"p1", b"\1" + bytes(7), b"", b"more"],
        [b"kv", b"p1", b"\1" + bytes(7), b""],
        [b"\0", b"p1", b"\1" + bytes(7), b""],
        [b"kv\0x\0", b"p1", b"\1" + bytes(7), b""],
        [b"kv\0", b"p1", b"\1" + bytes(6), b""],
        [b"kv\0", b"p1", bytes(8), b""],
        [b"\xff\0", b"p1", b"\1" + bytes(7), b""],
        [b"kv\0", b"\xff", b"\1" + bytes(7), b""],
    ],
)
def test_not_an_event(parts):
    assert decode(parts) is None


async def test_registers_under_its_lease_and_leaves(harness):
    plane = await harness.plane()
    registration = msgspec.msgpack.decode(harness.store.content("")[PREFIX + "p1"])
    assert registration.keys() == {"address", "version"}
    assert registration["version"] == 1
    host, _, port = registration["address"].removeprefix("tcp://").rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    await plane.close()
    assert harness.store.content("") == {}


async def test_a_plane_that_only_publishes_watches_nothing(harness):
    plane = await harness.plane()
    assert plane._receiver is None
    await plane.close()


async def test_advertises_another_host_than_it_binds(harness):
    plane = await harness.plane(host="0.0.0.0", advertise_host="127.0.0.1")
    registration = msgspec.msgpack.decode(
        harness.store.content("")[PREFIX + "p1"], type=PublisherRegistration
    )
    assert registration.address.startswith("tcp://127.0.0.1:")
    stream = plane.subscribe("kv")
    await harness.connected(plane, "kv", stream)
    await plane.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "203.0.113.7", "no such host"])
async def test_a_host_that_cannot_serve_is_a_config_error(harness, host):
    with pytest.raises(ConfigError):
        await harness.plane(host=host)
    assert harness.store.content("") == {}


async def test_start_without_discovery_fails_and_leaves_nothing(harness):
    harness.store.offline()
    with pytest.raises(DiscoveryLost):
        await harness.plane()


async def test_close_without_discovery_succeeds(harness):
    plane = await harness.plane()
    harness.store.offline()
    await plane.close()


async def test_a_plane_starts_once(harness):
    plane = await harness.plane()
    with pytest.raises(RuntimeError):
        await plane.start()
    await plane.close()
    with pytest.raises(RuntimeError):
        await plane.start()


async def test_subscriptions_made_before_start_count(harness):
    plane = ZmqEvents(ZmqOptions(namespace="ns"), "early", harness.discovery)
    stream = plane.subscribe("kv")
    plane.publish("kv", b"nobody")
    await plane.start()
    await harness.connected(plane, "kv", stream)
    await plane.close()


async def test_other_namespaces_are_not_heard(harness):
    ours = await harness.plane()
    theirs = ZmqEvents(ZmqOptions(namespace="ns2"), "theirs", harness.discovery)
    await theirs.start()
    stream = ours.subscribe("kv")
    await harness.connected(ours, "kv", stream)
    assert list(ours._receiver._addresses) == ["p1"]
    await ours.close()
    await theirs.close()


async def test_publisher_of_unknown_version_is_skipped_with_one_warning(harness, caplog):
    plane = await harness.plane()
    stream = plane.subscribe("kv")
    lease = await harness.discovery.lease(600)
    with caplog.at_level(logging.WARNING, logger=events_zmq.__name__):
        for port in (7, 8, 9):
            value = msgspec.msgpack.encode(PublisherRegistration(f"tcp://127.0.0.1:{port}", 99))
            await harness.discovery.put(PREFIX + "newer", value, lease)
            await harness.connected(plane, "kv", stream)
    assert [record.getMessage() for record in caplog.records] == [
        f"event publisher ignored: key={PREFIX}newer reason=message version 99, expected 1"
    ]
    assert harness.totals["rejected", "version"] == 1
    await plane.close()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"\xc1", "registration"),
        (msgspec.msgpack.encode({"address": 7, "version": 1}), "registration"),
        (b"\x81\xa7address\xa1\xff", "registration"),  # bad UTF-8
        (b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0", "registration"),  # nested too deep
        (msgspec.msgpack.encode(PublisherRegistration("nonsense", 1)), "address"),
        (msgspec.msgpack.encode(PublisherRegistration("tcp://nonsense", 1)), "address"),
        (msgspec.msgpack.encode(PublisherRegistration("ipc:///tmp/elsewhere", 1)), "address"),
    ],
)
async def test_bad_registrations_are_counted_and_ignored(harness, value, reason):
    plane = await harness.plane()
    stream = plane.subscribe("kv")
    await harness.discovery.put(PREFIX + "bad", value, await harness.discovery.lease(600))
    await harness.connected(plane, "kv", stream)
    await until(lambda: harness.totals["rejected", reason] == 1)
    later = await harness.plane()
    await harness.connected(later, "kv", stream)
    await later.close()
    await plane.close()


async def test_a_failure_over_one_publisher_is_said_and_the_others_are_followed(harness, monkeypatch, caplog):
    plane = await harness.plane()
    connect = events_zmq.Receiver._connect

    def fail_once(self, address: str) -> bool:
        if address == "tcp://127.0.0.1:1":
            raise OSError("no descriptors left")
        return connect(self, address)

    monkeypatch.setattr(events_zmq.Receiver, "_connect", fail_once)
    stream = plane.subscribe("kv")
    value = msgspec.msgpack.encode(PublisherRegistration("tcp://127.0.0.1:1", 1))
    await harness.discovery.put(PREFIX + "unlucky", value, await harness.discovery.lease(600))
    await until(lambda: harness.totals["rejected", "registration"] == 1)
    await harness.connected(plane, "kv", stream)
    assert [record.getMessage()[:38] for record in caplog.records] == [
        "event publisher not followed: change=P"
    ]
    await plane.close()


async def test_malformed_and_unregistered_messages_are_counted_and_skipped(harness):
    receiver = await harness.plane()
    stream = receiver.subscribe("kv")
    with zmq.Context() as context, context.socket(zmq.PUB) as rogue:
        port = rogue.bind_to_random_port("tcp://127.0.0.1")
        value = msgspec.msgpack.encode(PublisherRegistration(f"tcp://127.0.0.1:{port}", 1))
        await harness.discovery.put(PREFIX + "rogue", value, await harness.discovery.lease(600))

        def send_until_heard() -> bool:
            rogue.send_multipart([b"kv\0"])
            return harness.totals["rejected", "malformed"] > 0

        await until(send_until_heard)
        rogue.send_multipart([b"kv\0", b"p1", b"short", b""])
        rogue.send_multipart(encode("kv", "someone else", 1, b""))
        rogue.send_multipart(encode("kv", "rogue", 1, b"well-formed"))
        async with asyncio.timeout(MUST_HAPPEN_S):
            event = await anext(stream)
        assert (event.publisher, event.payload) == ("rogue", b"well-formed")
        assert harness.totals["rejected", "unregistered"] == 1
        await receiver.close()


async def test_a_gap_across_a_lost_registration_is_seen(harness):
    """The lease of a live publisher lapses and comes back: same id, and the numbers tell what was lost."""
    sender, receiver = await harness.plane(), await harness.plane()
    stream = receiver.subscribe("kv")
    await harness.connected(sender, "kv", stream)
    sender.publish("kv", b"before")
    before = await anext(stream)
    key = PREFIX + sender.publisher
    value = harness.store.content("")[key]
    await harness.discovery.delete(key)
    await until(lambda: sender.publisher not in receiver._receiver._addresses)
    sender.publish("kv", b"unheard")
    await asyncio.sleep(0.05)
    await harness.discovery.put(key, value, await harness.discovery.lease(600))
    async with asyncio.timeout(MUST_HAPPEN_S):
        after = None
        while after is None:
            sender.publish("kv", b"after")
            try:
                async with asyncio.timeout(0.02):
                    after = await anext(stream)
            except TimeoutError:
                continue
    assert after.missed == after.sequence - before.sequence - 1
    assert after.missed >= 1
    await sender.close()
    await receiver.close()


async def test_a_port_that_went_to_another_publisher_stays_connected(harness):
    """The new owner of a port is registered before the old one's lease ends."""
    sender, receiver = await harness.plane(), await harness.plane()
    lease = await harness.discovery.lease(600)
    await harness.discovery.put(PREFIX + "dead", harness.store.content("")[PREFIX + sender.publisher], lease)
    stream = receiver.subscribe("kv")
    await harness.connected(sender, "kv", stream)
    await harness.discovery.revoke(lease)
    await until(lambda: "dead" not in receiver._receiver._addresses)
    await asyncio.sleep(0.05)
    sender.publish("kv", b"still heard")
    async with asyncio.timeout(MUST_HAPPEN_S):
        event = await anext(stream)
    assert (event.payload, event.missed) == (b"still heard", 0)
    assert harness.totals["rejected", "repeated"] == 0
    await sender.close()
    await receiver.close()


async def test_a_burst_is_read_over_several_turns(harness, monkeypatch):
    monkeypatch.setattr(events_zmq, "_MESSAGES_PER_TURN", 3)
    plane = await harness.plane()
    stream = plane.subscribe("kv")
    await harness.connected(plane, "kv", stream)
    for number in range(200):
        plane.publish("kv", bytes([number]))
    async with asyncio.timeout(MUST_HAPPEN_S):
        assert [(await anext(stream)).payload[0] for _ in range(200)] == list(range(200))
    await plane.close()


async def test_what_does_not_fit_the_buffers_is_a_gap_not_a_wait(harness):
    """The reader's loop stands still for the whole burst, so the buffers must overflow."""
    plane = await harness.plane(high_water_messages=2)
    stream = plane.subscribe("kv")
    await harness.connected(plane, "kv", stream)
    plane.publish("kv", b"before")
    before = await anext(stream)
    payload = bytes(256 * 1024)
    for _ in range(200):
        plane.publish("kv", payload)
    event, num_heard, missed = before, 0, 0
    async with asyncio.timeout(MUST_HAPPEN_S):
        while event.payload != b"after":
            plane.publish("kv", b"after")  # lost itself while the buffers are full
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    while event.payload != b"after":
                        event = await anext(stream)
                        num_heard += 1
                        missed += event.missed
    assert event.sequence - before.sequence == num_heard + missed
    assert event.sequence > before.sequence + 200
    assert missed > 0
    assert harness.totals["missed", "kv"] == missed
    await plane.close()


async def test_publishers_learn_the_subscribed_topics(harness):
    plane = await harness.plane()
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        value = msgspec.msgpack.encode(PublisherRegistration(f"tcp://127.0.0.1:{port}", 1))
        await harness.discovery.put(PREFIX + "xpub", value, await harness.discovery.lease(600))
        one, two = plane.subscribe("kv"), plane.subscribe("kv")
        await until(lambda: publisher.poll(0))
        assert publisher.recv() == b"\1kv\0"
        await one.aclose()
        assert publisher.poll(50) == 0
        await two.aclose()
        await until(lambda: publisher.poll(0))
        assert publisher.recv() == b"\0kv\0"
        await plane.close()


async def test_counts_published_received_and_dropped(harness):
    plane = await harness.plane()
    stream = plane.subscribe("kv")
    await harness.connected(plane, "kv", stream)
    published, received = harness.totals["published", "kv"], harness.totals["received", "kv"]
    plane.publish("kv", b"x")
    await anext(stream)
    await plane.close()
    plane.publish("kv", b"late")
    assert harness.totals["published", "kv"] == published + 1
    assert harness.totals["received", "kv"] == received + 1
    assert harness.totals["dropped", "kv"] == 1


async def test_too_large_a_payload_is_refused_and_takes_no_number(harness, monkeypatch):
    monkeypatch.setattr(zmq_plane, "MAX_PAYLOAD_BYTES", 10)
    plane = ZmqEvents(ZmqOptions(namespace="ns"), "p", harness.discovery)
    with pytest.raises(PayloadTooLarge):
        plane.publish("kv", bytes(11))
    assert plane._numbering.next("kv") == 1


async def test_an_idle_plane_sleeps(harness):
    """The reader on the descriptor must not spin once connections are up."""
    plane = await harness.plane()
    stream = plane.subscribe("kv")
    await harness.connected(plane, "kv", stream)
    await asyncio.sleep(0.05)
    before = os.times()
    await asyncio.sleep(0.3)
    after = os.times()
    assert (after.user + after.system) - (before.user + before.system) < 0.2
    await plane.close()


async def test_closing_while_starting_leaves_nothing(harness):
    plane = ZmqEvents(ZmqOptions(namespace="ns"), "p", harness.discovery)
    reached, go_on, lease = asyncio.Event(), asyncio.Event(), harness.discovery.lease

    async def slow_lease(ttl_s: float):
        reached.set()
        await go_on.wait()
        return await lease(ttl_s)

    harness.discovery.lease = slow_lease
    starting = asyncio.ensure_future(plane.start())
    await reached.wait()
    await plane.close()
    go_on.set()
    with pytest.raises(Unavailable):
        await starting
    assert harness.store.content("") == {}


_STRANGER = """
import os, sys, zmq
socket = zmq.Context().socket(zmq.SUB)
monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
socket.connect(sys.argv[1])
socket.setsockopt(zmq.SUBSCRIBE, b"x" * 1_000_000)
os._exit(0 if monitor.poll(20_000) else 1)  # without a close: libzmq 4.3.5 overflows its stack there
"""


async def test_a_subscription_of_a_megabyte_is_refused(harness):
    """What a stranger can make a publisher keep is bounded."""
    publisher, subscriber = await harness.plane(), await harness.plane()
    stream = subscriber.subscribe("t")
    await harness.connected(publisher, "t", stream)
    stranger = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _STRANGER, publisher._sender.address
    )
    assert await asyncio.wait_for(stranger.wait(), 60) == 0
    await harness.connected(publisher, "t", stream)
    await publisher.close()
    await subscriber.close()
