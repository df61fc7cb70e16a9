"""Clients that end their side of a connection: those that still read, and those that have closed it."""

from __future__ import annotations

import asyncio

import pytest
import uvloop
from tests.unit.runtime.http.test_server import RawClient, get, raw, serving, until

from kvolt.runtime.http.protocol import CONTINUE
from kvolt.runtime.http.server import HttpRequest, Response, WrittenResponse
from kvolt.runtime.http.writer import ResponseWriter


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> asyncio.Runner:
    return asyncio.Runner(loop_factory=request.param)


async def half_close(client: RawClient, data: bytes) -> None:
    client.send(data)
    client.writer.write_eof()


class Gate:
    """A handler that answers when it is released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.story: list[str] = []

    async def __call__(self, request: HttpRequest) -> Response:
        self.story.append("began")
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.story.append("cancelled")
            raise
        return Response(200, b"done")

    async def stream(self, request: HttpRequest) -> WrittenResponse:
        async def produce(writer: ResponseWriter) -> None:
            writer.write(b"first ")
            await self.released.wait()
            writer.write(b"second")

        return WrittenResponse(produce)


def test_a_half_closed_client_gets_its_answer_after_interim_responses(runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with serving({"GET /": gate}) as (_, address), raw(address) as client:
            await half_close(client, get("/"))
            assert await client.reader.readexactly(2 * len(CONTINUE)) == 2 * CONTINUE
            gate.released.set()
            rest = (await client.rest()).replace(CONTINUE, b"")
            assert rest.startswith(b"HTTP/1.1 200 OK\r\n")
            assert rest.endswith(b"\r\n\r\ndone")
            assert gate.story == ["began"]

    with runner:
        runner.run(scenario())


def test_http_1_0_has_no_interim_responses(runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with serving({"GET /": gate}) as (_, address), raw(address) as client:
            await half_close(client, b"GET / HTTP/1.0\r\n\r\n")
            await until(lambda: gate.story == ["began"])
            await asyncio.sleep(0.2)  # several intervals
            gate.released.set()
            assert (await client.rest()).startswith(b"HTTP/1.1 200 OK\r\n")

    with runner:
        runner.run(scenario())


@pytest.mark.parametrize(
    ("content_type", "between"), [("text/event-stream", b"3\r\n:\n\n\r\n"), ("text/plain", b"")]
)
def test_only_comments_of_events_come_between_chunks(
    runner: asyncio.Runner, content_type: str, between: bytes
) -> None:
    async def scenario() -> None:
        gate = Gate()

        async def stream(request: HttpRequest) -> WrittenResponse:
            return (await gate.stream(request))._replace(content_type=content_type)

        async with serving({"GET /": stream}) as (_, address), raw(address) as client:
            await half_close(client, get("/"))
            await client.reader.readuntil(b"first \r\n")
            assert await client.reader.readexactly(2 * len(between)) == 2 * between
            gate.released.set()
            rest = await client.rest()
            assert (rest.replace(between, b"") if between else rest) == (b"6\r\nsecond\r\n0\r\n\r\n")

    with runner:
        runner.run(scenario())


def test_all_whole_requests_before_the_end_are_answered(runner: asyncio.Runner) -> None:
    async def answer(request: HttpRequest) -> Response:
        await asyncio.sleep(0)
        return Response(200, request.path.encode())

    async def scenario() -> None:
        async with serving({"GET /a": answer, "GET /b": answer}) as (_, address), raw(address) as client:
            await half_close(client, get("/a") + get("/b") + b"GET /half HTT")
            assert ((await client.answer()).body, (await client.answer()).body) == (b"/a", b"/b")
            assert await client.closed()

    with runner:
        runner.run(scenario())


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTT", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhal"]
)
def test_an_end_without_a_request_closes_the_connection(runner: asyncio.Runner, sent: bytes) -> None:
    async def scenario() -> None:
        async with serving({"POST /": Gate()}) as (_, address), raw(address) as client:
            await half_close(client, sent)
            assert await client.closed()

    with runner:
        runner.run(scenario())


def test_a_client_that_has_closed_cancels_its_request(runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with serving({"GET /": gate}) as (server, address):
            for end in ("half", "close"):  # a client that leaves later, and one that leaves at once
                gate.story.clear()
                async with raw(address) as client:
                    if end == "half":
                        await half_close(client, get("/"))
                        await client.reader.readexactly(len(CONTINUE))
                    else:
                        client.send(get("/"))
                    await until(lambda: gate.story == ["began"])
                await until(lambda: gate.story == ["began", "cancelled"])
                await until(lambda: server.num_connections == 0)

    with runner:
        runner.run(scenario())
