"""Cases of the request plane's suite: calls and responses, from one item to a thousand streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvolt.core.delta import Delta, FinishReason, Usage
from kvolt.core.endpoints import EndpointAddress
from kvolt.runtime.logs import bind, current_context
from kvolt.runtime.tasks import Scope
from kvolt.testing.cases import cases_in, expect
from kvolt.testing.plane.harness import ENDPOINT, Case, Harness, answers, client_of, collect, count_to, served


async def one_answer(harness: Harness) -> None:
    async def double(number: int) -> AsyncIterator[int]:
        yield 2 * number

    async with served(harness, double, int) as (_, _, client):
        for number in (0, 21, -5):
            expect(await answers(client, number) == [2 * number], "one request, one answer")


async def no_answer(harness: Harness) -> None:
    async with served(harness, count_to) as (_, _, client):
        expect(await answers(client, 0) == [], "a stream may end without an item")


async def values_round_trip(harness: Harness) -> None:
    async def echo(value: Any) -> AsyncIterator[Any]:
        yield value
        yield [value, value]

    values: list[Any] = [
        None,
        True,
        -(2**63),
        2**64 - 1,
        1.5,
        "",
        "é\0🜁",
        b"",
        bytes(range(256)),
        [],
        {},
        {"a": [{"b": None}]},
    ]
    async with served(harness, echo) as (_, _, client):
        for value in values:
            expect(await answers(client, value) == [value, [value, value]], f"{value!r} changed")


async def stream_keeps_its_order(harness: Harness) -> None:
    async def mixed(number: int) -> AsyncIterator[Any]:
        for value in range(number):
            yield Delta((value,)) if value % 3 else value
            if value % 100 == 0:
                await asyncio.sleep(0)

    def flat(items: list[Any]) -> list[Any]:
        return [token for item in items for token in (item.token_ids if type(item) is Delta else (item,))]

    async with served(harness, mixed) as (_, _, client):
        expect(flat(await answers(client, 5000)) == list(range(5000)), "the order of items is kept")


async def deltas_round_trip(harness: Harness) -> None:
    usage = Usage(prompt_tokens=3, completion_tokens=70_000)
    long = Delta(tuple(range(70_000)), index=1)
    last = Delta((5,), finish=FinishReason.STOP, usage=usage)

    async def generate(request: Any) -> AsyncIterator[Delta]:
        yield Delta((1,))
        yield long
        yield last

    async with served(harness, generate) as (_, _, client):
        expect(
            await answers(client, None) == [Delta((1,)), long, last],
            "deltas of any length are returned as Delta",
        )


async def thousand_concurrent_streams(harness: Harness) -> None:
    gate = asyncio.Event()

    async def wait_then_count(number: int) -> AsyncIterator[int]:
        yield number
        await gate.wait()
        for value in range(3):
            yield number + value

    results: dict[int, list[int]] = {}
    async with served(harness, wait_then_count, int) as (_, _, client):
        streams = [await client.stream(number) for number in range(1000)]
        for number, stream in enumerate(streams):
            expect(await anext(stream) == number, "every stream starts before one ends")
        gate.set()

        async def read(number: int) -> None:
            results[number] = await collect(streams[number])

        async with Scope("readers") as scope:
            for number in range(1000):
                scope.start(read(number), str(number))
    expected = {number: [number, number + 1, number + 2] for number in range(1000)}
    expect(results == expected, "every stream gets its own items")


async def calls_in_both_directions(harness: Harness) -> None:
    one, two = await harness.runtime("one"), await harness.runtime("two")
    at_one, at_two = EndpointAddress("ns", "one", "count"), EndpointAddress("ns", "two", "count")
    await one.serve(at_one, count_to, int)
    await two.serve(at_two, count_to, int)
    to_one, to_two = await client_of(two, endpoint=at_one), await client_of(one, endpoint=at_two)
    async with Scope("both") as scope:
        tasks = [scope.start(answers(client, 500), "count") for client in (to_one, to_two) * 5]
    expect(all(task.result() == list(range(500)) for task in tasks), "both directions work at once")


async def reverse_call_reuses_connection(harness: Harness) -> None:
    async with served(harness, count_to) as (server, caller, client):
        back = EndpointAddress("ns", "caller", "count")
        await caller.serve(back, count_to, int)
        await answers(client, 3)
        before = caller.plane.gauges().num_open, server.plane.gauges().num_open
        expect(
            await answers(await client_of(server, endpoint=back), 3) == [0, 1, 2], "the reverse call works"
        )
        after = caller.plane.gauges().num_open, server.plane.gauges().num_open
        expect(before == after, f"connections: {before} before, {after} after")


async def round_robin_takes_turns(harness: Harness) -> None:
    names = ["a", "b", "c"]
    for server_name in names:
        server = await harness.runtime(server_name)

        async def handler(request: Any, answer: str = server_name) -> AsyncIterator[str]:
            yield answer

        await server.serve(ENDPOINT, handler)
    client = await client_of(await harness.runtime("caller"), num_instances=3)
    got = [(await answers(client, None))[0] for _ in range(6)]
    expect(sorted(got) == sorted(names * 2), f"round-robin over all instances: {got}")
    for instance in client.candidates():
        first, second = [await collect(await client.stream(None, instance=instance)) for _ in range(2)]
        expect(first == second, "a chosen instance gets the call")


async def context_is_propagated(harness: Harness) -> None:
    async def context(request: Any) -> AsyncIterator[dict[str, str]]:
        yield current_context()

    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with served(harness, context) as (_, _, client):
        with bind(request_id="r-1", traceparent=trace):
            got = await answers(client, None)
        expect(got == [{"request_id": "r-1", "traceparent": trace}], f"the ids reach the handler: {got}")
        expect(await answers(client, None) == [{}], "ids of another call are not kept")


CALL_CASES: tuple[Case, ...] = cases_in(__name__)
