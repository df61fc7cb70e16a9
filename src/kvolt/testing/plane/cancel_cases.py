"""Cases of the request plane's suite: the caller cancels, at every stage of a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvolt.core.endpoints import EndpointAddress
from kvolt.core.errors import Cancelled
from kvolt.runtime.tasks import Scope
from kvolt.testing.cases import cases_in, expect, fails
from kvolt.testing.plane.harness import Case, Harness, Probe, answers, client_of, count_to, served, until


async def cancel_before_the_first_item(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.forever) as (_, _, client):
        stream = await client.stream(0)
        await until(lambda: probe.num_started == 1, "the handler's start")
        await stream.aclose()
        await until(lambda: probe.num_closed == 1, "the end of the handler")
        await fails(Cancelled, anext(stream))


async def cancel_after_the_first_item(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.forever) as (_, _, client):
        stream = await client.stream(2)
        expect(await anext(stream) == 0, "the first item")
        await stream.aclose()
        await until(lambda: probe.num_closed == 1, "the end of the handler")


async def cancel_at_once(harness: Harness) -> None:
    """The cancel may overtake the request: the handler does not run, or ends."""
    probe = Probe()
    async with served(harness, probe.forever) as (server, _, client):
        for _ in range(20):
            await (await client.stream(1)).aclose()
        await asyncio.sleep(0.05)
        await until(lambda: probe.num_closed == probe.num_started, "the end of every handler")
        await until(lambda: server.server.num_active == 0, "no active stream")


async def leaving_the_block_cancels(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.forever) as (_, _, client):
        async with await client.stream(5) as stream:
            async for item in stream:
                if item == 2:
                    break
        await until(lambda: probe.num_closed == 1, "the end of the handler")


async def cancelling_the_reader_cancels(harness: Harness) -> None:
    probe = Probe()
    async with served(harness, probe.forever) as (_, _, client):

        async def read() -> None:
            async with await client.stream(1) as stream:
                async for _ in stream:
                    pass

        async with Scope("reader") as scope:
            scope.start(read(), "read")
            await until(lambda: probe.num_sent == 1, "the first item")
            scope.cancel()
        await until(lambda: probe.num_closed == 1, "the end of the handler")


async def cancel_during_long_answer(harness: Harness) -> None:
    big = b"x" * 5_000_000
    probe = Probe()

    async def send(number: int) -> AsyncIterator[Any]:
        yield "first"
        try:
            while True:
                yield big
        finally:
            probe.num_closed += 1

    async with served(harness, send) as (server, _, client):
        for _ in range(6):
            stream = await client.stream(1)
            expect(await anext(stream) == "first", "the first item")
            await stream.aclose()
        await until(lambda: probe.num_closed == 6, "the end of every handler")
        await server.serve(EndpointAddress("ns", "worker", "count"), count_to, int)
        other = await client_of(
            await harness.runtime("other"), endpoint=EndpointAddress("ns", "worker", "count")
        )
        expect(await answers(other, 10) == list(range(10)), "the process still serves")
        stream = await client.stream(1)
        expect([await anext(stream), await anext(stream)] == ["first", big], "the connection still works")
        await stream.aclose()


CANCEL_CASES: tuple[Case, ...] = cases_in(__name__)
