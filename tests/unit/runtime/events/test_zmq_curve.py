"""CURVE on the zmq event plane: who receives events, and from whom."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
from tests.unit.runtime.events.zmq_lab import PREFIX, Secrets, ZmqHarness, no_sockets_left, until

from kvolt.runtime.events import curve
from kvolt.runtime.events.curve import Authenticator, KeyPair, secure_connections
from kvolt.runtime.events.port import EventStream
from kvolt.runtime.events.zmq_plane import ZmqEvents
from kvolt.runtime.events.zmq_sockets import MAX_PAYLOAD_BYTES, Registration

OLD, NEW, NEWER, WRONG = (letter * 32 for letter in (b"o", b"n", b"r", b"w"))


@pytest.fixture
def short_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "_HANDSHAKE_MS", 200)


@pytest.fixture
async def harness() -> AsyncIterator[ZmqHarness]:
    harness = ZmqHarness(Secrets(OLD))
    yield harness
    assert len(asyncio.all_tasks()) <= 2, "a task was left behind"
    assert no_sockets_left()


def registration_of(harness: ZmqHarness, plane: ZmqEvents) -> Registration:
    return msgspec.msgpack.decode(harness.store.content("")[PREFIX + plane.publisher], type=Registration)


async def assert_quiet(publisher: ZmqEvents, stream: EventStream) -> None:
    """No event of the publisher arrives."""
    for _ in range(10):
        publisher.publish("kv", b"secret")
        await asyncio.sleep(0.02)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await anext(stream)


async def test_each_publisher_registers_a_key_of_its_own(harness: ZmqHarness) -> None:
    one, two = await harness.plane(), await harness.plane()
    keys = {registration_of(harness, plane).public_key for plane in (one, two)}
    assert len(keys) == 2
    assert KeyPair.of_secret(OLD).public.decode() not in keys
    await one.close()
    await two.close()


@pytest.mark.usefixtures("short_handshakes")
async def test_a_wrong_secret_receives_nothing_and_is_logged_with_backoff(
    harness: ZmqHarness, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, stranger = await harness.plane(), await harness.plane_with(Secrets(WRONG))
    stream = stranger.subscribe("kv")
    await until(lambda: harness.totals["rejected", "subscriber"] >= 3)
    await assert_quiet(publisher, stream)
    num_logged = sum("event subscriber refused" in each.getMessage() for each in caplog.records)
    assert 1 <= num_logged < harness.totals["rejected", "subscriber"]
    friend = await harness.plane()
    await harness.connected(publisher, "kv", friend.subscribe("kv"))
    for plane in (publisher, stranger, friend):
        await plane.close()


@pytest.mark.parametrize("subscriber_keys", [None, KeyPair.create()], ids=["plain text", "own key pair"])
async def test_a_stranger_that_knows_the_address_receives_nothing(
    harness: ZmqHarness, subscriber_keys: KeyPair | None
) -> None:
    publisher = await harness.plane()
    registration = registration_of(harness, publisher)
    assert registration.public_key is not None
    with zmq.Context() as context, context.socket(zmq.SUB) as stranger:
        if subscriber_keys is not None:
            secure_connections(stranger, subscriber_keys, registration.public_key)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.SUBSCRIBE, b"")
        stranger.connect(registration.address)
        for _ in range(20):
            publisher.publish("kv", b"secret")
            await asyncio.sleep(0.01)
        assert stranger.poll(50) == 0
    stream = publisher.subscribe("kv")
    await harness.connected(publisher, "kv", stream)
    await publisher.close()


async def test_keys_are_refused_while_no_authenticator_answers() -> None:
    """A publisher without one must not fall back to accepting all keys."""
    keys, server = KeyPair.of_secret(OLD), KeyPair.create()
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher, context.socket(zmq.SUB) as stranger:
        for each in (publisher, stranger):
            each.setsockopt(zmq.LINGER, 0)
        curve.secure_publisher(publisher, server)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        secure_connections(stranger, keys, server.public.decode())
        stranger.setsockopt(zmq.SUBSCRIBE, b"")
        stranger.connect(f"tcp://127.0.0.1:{port}")
        for _ in range(20):
            publisher.send(b"secret")
            await asyncio.sleep(0.01)
        assert stranger.poll(50) == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 100,
        bytes(100_000),
        b"\xff" * 100_000,
        b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE" + bytes(47) + b"\xff" * 10_000,
        b"\xff\0\0\0\0\0\0\0\1\x7f\3\1NULL" + bytes(48) + b"\4\x19\5READY" + bytes(100),
    ],
    ids=["http", "zeros", "ones", "bad hello", "null mechanism"],
)
async def test_garbage_to_the_port_is_survived(harness: ZmqHarness, garbage: bytes) -> None:
    publisher = await harness.plane()
    port = int(registration_of(harness, publisher).address.rpartition(":")[2])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for each in strangers:
        with contextlib.suppress(ConnectionError):
            each.sendall(garbage)
    stream = publisher.subscribe("kv")
    await harness.connected(publisher, "kv", stream)
    for each in strangers:
        each.close()
    await publisher.close()


async def test_close_does_not_wait_for_incomplete_handshakes(harness: ZmqHarness) -> None:
    publisher = await harness.plane()
    port = int(registration_of(harness, publisher).address.rpartition(":")[2])
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    subscribers = [await harness.plane_with(Secrets(secret)) for secret in (OLD, WRONG)]
    for subscriber in subscribers:
        subscriber.subscribe("kv")
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        for plane in (publisher, *subscribers):
            await plane.close()
    for each in strangers:
        each.close()


@pytest.mark.parametrize(
    ("publisher_secrets", "subscriber_secrets"),
    [((OLD,), (OLD, NEW)), ((OLD, NEW), (OLD,)), ((OLD, NEW), (NEW, NEWER)), ((NEW, NEWER), (NEW,))],
)
async def test_secrets_are_rotated_machine_by_machine(
    harness: ZmqHarness, publisher_secrets: tuple[bytes, ...], subscriber_secrets: tuple[bytes, ...]
) -> None:
    publisher = await harness.plane_with(Secrets(*publisher_secrets))
    subscriber = await harness.plane_with(Secrets(*subscriber_secrets))
    await harness.connected(publisher, "kv", subscriber.subscribe("kv"))
    await publisher.close()
    await subscriber.close()


@pytest.mark.usefixtures("short_handshakes")
async def test_a_refused_subscriber_is_accepted_after_the_publisher_gets_its_secret(
    harness: ZmqHarness,
) -> None:
    held = Secrets(OLD)
    publisher, subscriber = await harness.plane_with(held), await harness.plane_with(Secrets(NEW))
    stream = subscriber.subscribe("kv")
    await until(lambda: harness.totals["rejected", "subscriber"] >= 1)
    held.replace(OLD, NEW)
    await harness.connected(publisher, "kv", stream)
    await publisher.close()
    await subscriber.close()


async def test_a_running_subscriber_connects_again_with_its_new_secret(harness: ZmqHarness) -> None:
    held = Secrets(WRONG)
    publisher, subscriber = await harness.plane(), await harness.plane_with(held)
    stream = subscriber.subscribe("kv")
    await until(lambda: harness.totals["rejected", "subscriber"] >= 1)
    held.replace(OLD)
    await harness.connected(publisher, "kv", stream)
    await publisher.close()
    await subscriber.close()
    held.replace(NEW)  # after the close: ignored


async def test_rotation_in_the_middle_of_a_stream_ends_no_connection(harness: ZmqHarness) -> None:
    plane = await harness.plane()
    stream = plane.subscribe("kv")
    await harness.connected(plane, "kv", stream)
    assert harness.secrets is not None
    plane.publish("kv", b"before")
    harness.secrets.replace(OLD, NEW)
    plane.publish("kv", b"after")
    async with asyncio.timeout(5):
        events = [await anext(stream), await anext(stream)]
    assert [(each.payload, each.missed) for each in events] == [(b"before", 0), (b"after", 0)]
    await plane.close()


async def test_the_largest_event_fits_encrypted(harness: ZmqHarness) -> None:
    plane = await harness.plane()
    stream = plane.subscribe("kv")
    await harness.connected(plane, "kv", stream)
    payload = bytes(MAX_PAYLOAD_BYTES)
    plane.publish("kv", payload)
    async with asyncio.timeout(10):
        event = await anext(stream)
    assert event.payload == payload
    await plane.close()


@pytest.mark.parametrize(
    ("publisher_secrets", "subscriber_secrets", "reason"),
    [(None, Secrets(OLD), "unencrypted"), (Secrets(OLD), None, "encrypted")],
)
async def test_secured_and_plain_processes_ignore_each_other(
    harness: ZmqHarness,
    publisher_secrets: Secrets | None,
    subscriber_secrets: Secrets | None,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher = await harness.plane_with(publisher_secrets)
    subscriber = await harness.plane_with(subscriber_secrets)
    stream = subscriber.subscribe("kv")
    with caplog.at_level(logging.WARNING):
        await until(lambda: harness.totals["rejected", reason] == 1)
        await assert_quiet(publisher, stream)
    assert sum("event publisher ignored" in each.getMessage() for each in caplog.records) == 1
    await publisher.close()
    await subscriber.close()


@pytest.mark.parametrize("key", ["", "short", "x" * 41, "\x01" * 40, "é" * 40])
async def test_a_malformed_key_is_counted_and_ignored(harness: ZmqHarness, key: str) -> None:
    plane = await harness.plane()
    stream = plane.subscribe("kv")
    await harness.connected(plane, "kv", stream)
    address = registration_of(harness, plane).address  # of a live publisher, whose connection must stay
    value = msgspec.msgpack.encode(Registration(address, 1, key))
    await harness.discovery.put(PREFIX + "bad", value, await harness.discovery.lease(1))
    await until(lambda: harness.totals["rejected", "address"] == 1)
    await harness.connected(plane, "kv", stream)
    await plane.close()


async def test_a_publisher_on_its_predecessors_port_is_connected_with_its_own_key(
    harness: ZmqHarness,
) -> None:
    """The predecessor's registration outlives it by its lease."""
    publisher, subscriber = await harness.plane(), await harness.plane()
    stream = subscriber.subscribe("kv")
    address = registration_of(harness, publisher).address
    stale = msgspec.msgpack.encode(Registration(address, 1, KeyPair.create().public.decode()))
    lease = await harness.discovery.lease(1)
    await harness.discovery.put(PREFIX + "stale", stale, lease)
    receiver = subscriber._receiver
    assert receiver is not None
    await until(lambda: "stale" in receiver._publishers)
    await harness.discovery.revoke(lease)
    await harness.connected(publisher, "kv", stream)
    await publisher.close()
    await subscriber.close()


async def test_malformed_requests_to_the_authenticator_are_refused() -> None:
    refused: list[None] = []
    with zmq.Context() as context, context.socket(zmq.REQ) as asker:
        authenticator = Authenticator(context, [OLD], lambda: refused.append(None))
        asker.setsockopt(zmq.LINGER, 0)
        asker.connect("inproc://zeromq.zap.01")
        for request in ([b""], [b"1.0", b"7"], [b"1.0", b"7", b"kvolt", b"\xff", b"", b"NULL"]):
            asker.send_multipart(request)
            await until(lambda: asker.poll(0))
            assert asker.recv_multipart()[2] == b"300"
        authenticator.close()
    assert len(refused) == 3
