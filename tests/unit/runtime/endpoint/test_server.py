"""Serving: who gets a stream, what becomes of a handler, and draining."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from kvolt.core.errors import Cancelled, KvoltError, NotFound
from kvolt.core.ids import InstanceId
from kvolt.runtime.endpoint.server import EndpointServer, msgpack_decoder
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.wire import Open
from kvolt.runtime.security.identity import Identity, ProcessRole

decode = msgpack_decoder(Any)


class FakeSession:
    """Takes everything at once."""

    def __init__(self) -> None:
        self.paused = False
        self.open_deltas: list[tuple[int, Any]] | None = None
        self.step_owner: object | None = None
        self.items: list[Any] = []
        self.held: list[ServedStream] = []

    def queue_item(self, stream: ServedStream, item: Any) -> None:
        self.items.append(item)

    def queue_end(self, stream: ServedStream) -> None:
        stream.mark_closed()

    def mark_backlogged(self, stream: ServedStream) -> None:
        self.held.append(stream)

    def settle_step(self) -> None: ...


def opened(
    server: EndpointServer,
    target: str = "ns.c.e",
    body: Any = None,
    window: int = 100,
    deadline_s: float | None = None,
    peer: Identity | None = None,
) -> tuple[ServedStream, FakeSession]:
    session = FakeSession()
    opening = Open(target, window, deadline_s, {"request_id": "r"}, False, msgspec.Raw(b"\xc0"))
    stream = ServedStream(session, 1, opening, msgspec.msgpack.encode(body))
    stream.peer_identity = peer
    server.on_open(stream)
    return stream, session


def code(stream: ServedStream) -> str | None:
    return stream.end_info.code if stream.end_info is not None else None


async def settle(stream: ServedStream) -> None:
    async with asyncio.timeout(10):
        while not stream.closed:
            await asyncio.sleep(0)


def serving(handler: Any) -> EndpointServer:
    server = EndpointServer()
    server.register("ns.c.e", InstanceId("7f"), server.wrap_generator(handler, decode))
    return server


async def count(number: int) -> AsyncIterator[int]:
    for value in range(number):
        yield value


async def wait_forever(request: Any) -> AsyncIterator[int]:
    yield 1
    await asyncio.Event().wait()


async def test_a_handler_answers() -> None:
    server = serving(count)
    stream, session = opened(server, body=3)
    assert server.num_active == server.num_active_streams("ns.c.e") == 1
    await settle(stream)
    assert (session.items, code(stream), server.num_active) == ([0, 1, 2], None, 0)
    await server.close()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("ns.c.e", None),
        ("ns.c.e#7f", None),
        ("ns.c.e#80", "unavailable"),
        ("ns.c.x", "not_found"),
        ("", "not_found"),
    ],
)
async def test_targets(target: str, expected: str | None) -> None:
    server = serving(count)
    stream, _ = opened(server, target, 0)
    await settle(stream)
    assert code(stream) == expected
    await server.close()


async def test_refusing_and_taking_again() -> None:
    server = serving(count)
    server.set_refusal("ns.c.e", "cordoned")
    stream, _ = opened(server, body=1)
    assert stream.end_info is not None
    assert (stream.end_info.code, stream.end_info.fields["reason"]) == ("unavailable", "cordoned")
    server.set_refusal("ns.c.e", None)
    stream, _ = opened(server, body=1)
    await settle(stream)
    assert code(stream) is None
    server.set_refusal("ns.c.e", "draining")
    server.unregister("ns.c.e")
    assert code(opened(server)[0]) == "not_found"
    server.register("ns.c.e", InstanceId("80"), server.wrap_generator(count, decode))
    stream, _ = opened(server, body=1)
    await settle(stream)
    assert code(stream) is None, "a new life starts without the old one's refusal"
    await server.close()


async def test_an_endpoint_is_served_once() -> None:
    server = serving(count)
    with pytest.raises(KvoltError, match="already"):
        server.register("ns.c.e", InstanceId("80"), lambda stream: None)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotFound("x", kind="card"), "not_found"),
        (ValueError("secret"), "internal"),
        (TimeoutError(), "internal"),
    ],
)
@pytest.mark.parametrize("where", ["call", "start", "later"])
async def test_a_handlers_error(error: Exception, expected: str, where: str) -> None:
    async def fail(request: Any) -> AsyncIterator[int]:
        if where == "start":
            raise error
        yield 1
        raise error

    def fail_at_once(request: Any) -> AsyncIterator[int]:
        raise error

    server = serving(fail_at_once if where == "call" else fail)
    stream, session = opened(server, deadline_s=60.0)
    await settle(stream)
    assert code(stream) == expected
    assert stream.end_info is not None
    assert "secret" not in stream.end_info.message
    assert session.items == ([1] if where == "later" else [])
    await server.close()


@pytest.mark.parametrize(
    ("error", "expected"), [(NotFound("x"), "not_found"), (ValueError("secret"), "internal")]
)
async def test_a_stream_handlers_error(error: Exception, expected: str) -> None:
    told: list[KvoltError] = []

    def handler(stream: ServedStream) -> None:
        stream.on_cancel = told.append
        stream.send(1)
        raise error

    server = EndpointServer()
    server.register("ns.c.e", InstanceId("7f"), handler)
    stream, session = opened(server)
    assert (code(stream), session.items, len(told), server.num_active) == (expected, [1], 1, 0)


async def test_a_request_that_does_not_decode() -> None:
    server = EndpointServer()
    server.register("ns.c.e", InstanceId("7f"), server.wrap_generator(count, msgpack_decoder(int)))
    stream, _ = opened(server, body="three")
    await settle(stream)
    assert code(stream) == "invalid_request"
    await server.close()


async def test_the_requests_time_is_kept() -> None:
    closed: list[int] = []

    async def handler(request: Any) -> AsyncIterator[int]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed.append(1)

    server = serving(handler)
    stream, session = opened(server, deadline_s=0.02)
    await settle(stream)
    assert stream.end_info is not None
    assert (stream.end_info.code, stream.end_info.fields) == (
        "deadline_exceeded",
        {"stage": "total", "after_s": 0.02},
    )
    assert (session.items, closed) == ([1], [1])
    await server.close()


async def test_time_over_at_once() -> None:
    server = serving(wait_forever)
    stream, _ = opened(server, deadline_s=0.0)
    await settle(stream)
    assert code(stream) == "deadline_exceeded"
    await server.close()


async def test_a_handler_pauses_with_its_reader() -> None:
    made: list[int] = []

    async def handler(request: Any) -> AsyncIterator[int]:
        for value in range(100):
            made.append(value)
            yield value

    server = serving(handler)
    stream, session = opened(server, window=3)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(made) == 3
    stream.add_credit(2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(made) == 5
    stream.add_credit(1000)
    await settle(stream)
    assert session.items == list(range(100))
    await server.close()


async def test_giving_up_closes_the_handler() -> None:
    closed: list[int] = []

    async def handler(request: Any) -> AsyncIterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.append(1)

    server = serving(handler)
    stream, _ = opened(server, window=3)
    await asyncio.sleep(0)
    stream.abort(Cancelled("the caller cancelled"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert (closed, server.num_active) == ([1], 0)
    await server.close()


async def test_given_up_before_it_ran() -> None:
    server = serving(wait_forever)
    stream, session = opened(server)
    stream.abort(Cancelled("the caller cancelled"))
    await asyncio.sleep(0)
    assert (session.items, server.num_active) == ([], 0)
    await server.close()


async def test_stopping_tells_the_caller_to_go_elsewhere() -> None:
    server = serving(wait_forever)
    stream, _ = opened(server)
    await asyncio.sleep(0)
    await server.close()
    assert stream.end_info is not None
    assert (stream.end_info.code, stream.end_info.fields["reason"]) == ("unavailable", "stopping")
    assert server.num_active == 0


async def test_drain_waits_for_one_endpoint_or_all() -> None:
    gate = asyncio.Event()

    async def gated(request: Any) -> AsyncIterator[int]:
        await gate.wait()
        yield 1

    server = serving(count)
    server.register("ns.c.gated", InstanceId("80"), server.wrap_generator(gated, decode))
    opened(server, body=3)
    opened(server, "ns.c.gated")
    async with asyncio.timeout(10):
        await server.drain("ns.c.e")
    assert server.num_active_streams("ns.c.gated") == 1
    for endpoint in ("ns.c.gated", None):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await server.drain(endpoint)
    gate.set()
    async with asyncio.timeout(10):
        await server.drain()
        await server.drain("unknown")
    await server.close()


async def test_a_peer_that_may_not_call_learns_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server, worker = serving(count), Identity(ProcessRole.WORKER, "w")
    server.register("ns.cordoned.e", InstanceId("8"), server.wrap_generator(count, decode))
    server.set_refusal("ns.cordoned.e", "cordoned")
    for target in ("ns.c.e", "ns.c.e#other", "ns.cordoned.e", "ns.none.e"):
        stream, _ = opened(server, target, peer=worker)
        assert code(stream) == "access_denied"
    for _ in range(100):
        opened(server, peer=worker)
    assert caplog.text.count("call refused") == 7  # the 1st, 2nd, 4th ...
    await server.close()
