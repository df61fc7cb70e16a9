"""Cases of the request plane's suite: long messages, slow readers and flow control."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvolt.core.delta import Delta, FinishReason, Usage
from kvolt.core.endpoints import EndpointAddress
from kvolt.core.errors import KvoltError, Overloaded, PayloadTooLarge
from kvolt.runtime.plane.port import IncomingStream
from kvolt.runtime.tasks import Scope
from kvolt.testing.cases import SOON_S, cases_in, expect, fails
from kvolt.testing.plane.harness import (
    ENDPOINT,
    Case,
    Harness,
    Probe,
    answers,
    client_of,
    collect,
    count_to,
    served,
    until,
)


async def long_messages_beside_short_ones(harness: Harness) -> None:
    """10 MB in both directions: short messages overtake them on other streams, not on the same stream."""
    big = bytes(range(256)) * 40_000
    started = asyncio.Event()

    async def send_big(request: bytes) -> AsyncIterator[Any]:
        yield "first"
        yield request
        yield "middle"
        started.set()
        yield request
        yield "last"

    order: list[str] = []
    async with served(harness, send_big) as (server, caller, client):
        await server.serve(EndpointAddress("ns", "worker", "count"), count_to, int)
        small = await client_of(caller, endpoint=EndpointAddress("ns", "worker", "count"))

        async def read_big() -> None:
            got = await answers(client, big)
            order.append("big")
            expect(got == ["first", big, "middle", big, "last"], "long and short items keep their order")

        async def read_small() -> None:
            async with asyncio.timeout(SOON_S):
                await started.wait()
            expect(await answers(small, 200) == list(range(200)), "the short stream is complete")
            order.append("small")

        async with Scope("readers") as scope:
            scope.start(read_big(), "big")
            scope.start(read_small(), "small")
    expect(order == ["small", "big"], "the short stream did not wait for the long one")


async def many_long_messages(harness: Harness) -> None:
    async def echo(value: Any) -> AsyncIterator[Any]:
        yield value
        yield len(value)

    async with served(harness, echo) as (_, _, client):
        bodies = [bytes([number]) * (100_000 + number) for number in range(12)]
        async with Scope("readers") as scope:
            tasks = [scope.start(answers(client, body), "echo") for body in bodies]
        for body, task in zip(bodies, tasks, strict=True):
            expect(task.result() == [body, len(body)], "each stream gets its own")


async def request_too_long(harness: Harness) -> None:
    async with served(harness, count_to) as (_, _, client):
        concurrent = await client.stream(100)
        error = await fails(PayloadTooLarge, client.stream(b"x" * (harness.max_message_bytes + 1)))
        expect(
            error.fields.get("limit_bytes") == harness.max_message_bytes,
            f"the error has the limit: {error!r}",
        )
        expect(await collect(concurrent) == list(range(100)), "a concurrent stream continues")


async def item_that_cannot_be_encoded(harness: Harness) -> None:
    """An item too long or not encodable: earlier items arrive, then its stream fails."""
    too_long = b"x" * (harness.max_message_bytes + 1)
    bad: dict[str, tuple[Any, type[KvoltError]]] = {
        "too long": (too_long, PayloadTooLarge),
        "no value": (object(), KvoltError),
        "a number": (2**70, KvoltError),
        "text": ("\ud800", KvoltError),
    }

    async def send(request: tuple[str, int]) -> AsyncIterator[Any]:
        what, num_after = request
        yield 1
        yield bad[what][0]
        for value in range(num_after):
            yield value

    async with served(harness, send, tuple[str, int]) as (server, caller, client):
        await server.serve(EndpointAddress("ns", "worker", "count"), count_to, int)
        other = await client_of(caller, endpoint=EndpointAddress("ns", "worker", "count"))
        for what, (_, kind) in bad.items():
            for num_after in (0, 3):
                concurrent = await other.stream(300)
                stream = await client.stream((what, num_after))
                expect(await anext(stream) == 1, "the earlier item arrives")
                error = await fails(kind, anext(stream))
                expect(not error.retryable, f"{what}: {error!r}")
                expect(await collect(concurrent) == list(range(300)), "a concurrent stream continues")


async def slow_reader_slows_its_handler(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.count_to) as (_, _, client):
        stream = await client.stream(3000)
        got = [await anext(stream) for _ in range(10)]
        await asyncio.sleep(0.3)
        bound = 2 * harness.window_items + 20
        expect(probe.num_sent <= bound, f"{probe.num_sent} items were made for a reader of 10")
        got += await collect(stream)
        expect(got == list(range(3000)), "nothing is lost, doubled or out of order")


async def slow_reader_slows_no_other(harness: Harness) -> None:
    async with served(harness, count_to) as (_, _, client):
        slow = await client.stream(3000)
        await anext(slow)
        for _ in range(3):
            expect(await answers(client, 1000) == list(range(1000)), "a fast reader gets all items")
        expect(await collect(slow) == list(range(1, 3000)), "the slow reader gets all items too")


async def deltas_merge_for_a_slow_reader(harness: Harness) -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=5000)

    def push(stream: IncomingStream) -> None:
        for token in range(5000):
            stream.send(Delta((token,)))
        stream.send(Delta((), finish=FinishReason.LENGTH, usage=usage))
        stream.end()

    server, caller = await harness.runtime("server"), await harness.runtime("caller")
    await server.serve_streams(ENDPOINT, push)
    client = await client_of(caller)
    stream = await client.stream(None)
    await asyncio.sleep(0.3)
    got = await collect(stream)
    tokens = [token for delta in got for token in delta.token_ids]
    expect(tokens == list(range(5000)), "every token once, in order")
    expect(len(got) <= 2 * harness.window_items + 2, f"in {len(got)} deltas")
    expect((got[-1].finish, got[-1].usage) == (FinishReason.LENGTH, usage), "the finish is kept")


async def too_many_items_for_a_slow_reader(harness: Harness) -> None:
    """Pushed items that do not merge have a bound; the reader gets Overloaded."""
    errors: list[KvoltError] = []

    def push(stream: IncomingStream) -> None:
        stream.on_cancel = errors.append
        for value in range(20_000):
            stream.send(value)

    server, caller = await harness.runtime("server"), await harness.runtime("caller")
    await server.serve_streams(ENDPOINT, push)
    client = await client_of(caller)
    stream = await client.stream(None)
    got: list[int] = []

    async def read() -> None:
        async for item in stream:
            got.append(item)

    await fails(Overloaded, read())
    expect(got == list(range(len(got))), "the first items arrived in order")
    await until(lambda: len(errors) == 1, "the producer is notified")


FLOW_CASES: tuple[Case, ...] = cases_in(__name__)
