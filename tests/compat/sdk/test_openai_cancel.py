"""The openai SDK: whoever leaves takes the work with him, up to the engine."""

from __future__ import annotations

import asyncio

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.compat.sdk.server import Server, ask
from tests.integration.processes import MODEL


async def test_closed_stream(server: Server, client: OpenAI) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=ask(), stream=True)
    next(stream)
    await server.bench.until_computing(1)
    stream.close()
    await server.bench.until_computing(0)
    engines = [
        view["status"]["details"]["engine"] for view in server.bench.status() if "worker" in view["name"]
    ]
    assert [engine["open"] for engine in engines] == [0, 0]


async def test_closed_completions(server: Server, client: OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=["one", "two", "three"], n=2, max_tokens=20_000, stream=True
    )
    next(stream)
    await server.bench.until_computing(3)
    stream.close()
    await server.bench.until_computing(0)


async def test_cancelled_while_waiting_for_the_whole(server: Server, aclient: AsyncOpenAI) -> None:
    answer = asyncio.create_task(aclient.chat.completions.create(model=MODEL, messages=ask()))
    await server.bench.until_computing(1)
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    await server.bench.until_computing(0)


async def test_out_of_patience(server: Server, client: OpenAI) -> None:
    """The client's own limit: the SDK closes the connection."""
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(model=MODEL, messages=ask())
    await server.bench.until_computing(0)


async def test_left_in_the_middle_many_times(server: Server, aclient: AsyncOpenAI) -> None:
    async def leave(number: int) -> None:
        stream = await aclient.chat.completions.create(model=MODEL, messages=ask(), stream=True)
        async with stream:
            for _ in range(number):
                await anext(aiter(stream))

    await asyncio.gather(*map(leave, range(1, 13)))
    await server.bench.until_computing(0)
