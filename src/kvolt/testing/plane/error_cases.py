"""Cases of the request plane's suite: errors of handlers, and errors of calls that reach no handler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from kvolt.core.endpoints import EndpointAddress
from kvolt.core.errors import (
    Cancelled,
    ConfigError,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
    Unsupported,
)
from kvolt.testing.cases import SOON_S, cases_in, expect, fails
from kvolt.testing.plane.harness import ENDPOINT, Case, Harness, answers, client_of, collect, count_to, served


async def errors_round_trip(harness: Harness) -> None:
    errors: dict[str, KvoltError] = {
        error.code: error
        for error in (
            KvoltError("base", number=1),
            InvalidRequest("bad", param="x"),
            PayloadTooLarge("big", limit_bytes=2**40, size_bytes=2**41),
            NotFound("none", kind="card", name="é"),
            Unsupported("not here", feature="logprobs"),
            Cancelled("stop"),
            ConfigError("wrong", key="k", remedy="r"),
            Overloaded("full", queue="q", limit=7, retry_after_s=0.25),
            Unavailable("away", endpoint="e", reason="none"),
            EngineFailed("died", engine="sim", fatal=True, code_seen=None),
        )
    }

    async def fail(code: str) -> AsyncIterator[int]:
        yield 1
        raise errors[code]

    async with served(harness, fail, str) as (_, _, client):
        for code, error in errors.items():
            stream = await client.stream(code)
            expect(await anext(stream) == 1, "items before the error are delivered")
            got = await fails(type(error), anext(stream))
            expect((got.message, got.fields) == (error.message, error.fields), f"{got!r} is not {error!r}")
            expect(got.retryable == error.retryable, "the error is as retryable as the original")


async def handler_bug_hides_its_message(harness: Harness) -> None:
    async def bug(request: Any) -> AsyncIterator[int]:
        yield 1
        raise ValueError("the password is 1234")

    async with served(harness, bug) as (_, _, client):
        stream = await client.stream(None)
        expect(await anext(stream) == 1, "the item before the bug")
        error = await fails(KvoltError, anext(stream))
        expect("1234" not in f"{error!r}" and "ValueError" in error.message, f"only the type: {error!r}")
        expect(await anext(await client.stream(None)) == 1, "the process still serves")


async def handler_timeout_is_no_deadline(harness: Harness) -> None:
    async def bug(request: Any) -> AsyncIterator[int]:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)
        yield 1

    async with served(harness, bug) as (_, _, client):
        await fails(KvoltError, answers(client, None))


async def errors_that_are_hard_to_send(harness: Harness) -> None:
    """An error that cannot be encoded ends its own stream only."""
    hard: list[KvoltError] = [
        EngineFailed("x" * 5_000_000, engine="sim"),
        EngineFailed("a lone surrogate \ud800", engine="\udfff"),
        EngineFailed("a big number", engine=2**100),
        EngineFailed("an unsupported value", engine=["list"]),  # type: ignore[arg-type]
    ]

    async def fail(number: int) -> AsyncIterator[int]:
        yield number
        raise hard[number]

    async with served(harness, fail, int) as (server, _, client):
        await server.serve(EndpointAddress("ns", "worker", "count"), count_to, int)
        other = await client_of(
            await harness.runtime("other"), endpoint=EndpointAddress("ns", "worker", "count")
        )
        concurrent = await other.stream(1000)
        for number in range(len(hard)):
            stream = await client.stream(number)
            expect(await anext(stream) == number, "the item before the error")
            await fails(EngineFailed, anext(stream))
        expect(await collect(concurrent) == list(range(1000)), "a concurrent stream continues")


async def unknown_endpoint(harness: Harness) -> None:
    async with served(harness, count_to) as (server, _, client):
        (instance,) = client.candidates()
        await server.stop_serving(ENDPOINT)
        error = await fails(NotFound, collect(await client.stream(3, instance=instance)))
        expect(error.fields.get("name") == str(ENDPOINT), f"the error names the endpoint: {error!r}")


async def stale_instance(harness: Harness) -> None:
    """The same endpoint at the same address, but a newer instance."""
    async with served(harness, count_to) as (server, _, client):
        (old,) = client.candidates()
        await server.stop_serving(ENDPOINT)
        new = await server.serve(ENDPOINT, count_to, int)
        error = await fails(Unavailable, collect(await client.stream(3, instance=old)))
        expect(error.retryable, "a retry on another instance is possible")
        expect(await collect(await client.stream(3, instance=new)) == [0, 1, 2], "the new instance responds")


async def no_instances(harness: Harness) -> None:
    caller = await harness.runtime("caller")
    client = await caller.client(ENDPOINT)
    await client.wait_synced(SOON_S)
    expect(client.candidates() == [], "there is no instance")
    await fails(Unavailable, client.stream(None))


async def request_of_another_type(harness: Harness) -> None:
    async with served(harness, count_to, int) as (_, _, client):
        await fails(InvalidRequest, answers(client, "three"))
        expect(await answers(client, 3) == [0, 1, 2], "the next request is served")


ERROR_CASES: tuple[Case, ...] = cases_in(__name__)
