"""Responses written from callbacks, and the id that every response carries."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from tests.unit.runtime.http.test_server import Answer, RawClient, get, on_virtual_time, raw, serving, until
from tests.waits import MUST_HAPPEN_S

from kvolt.core.errors import Overloaded
from kvolt.runtime.http.server import HttpLimits, HttpRequest, HttpServer, Response, WrittenResponse
from kvolt.runtime.http.writer import ResponseWriter, chunk_head
from kvolt.runtime.network import split_address
from kvolt.testing.virtual.network import VirtualHost

Produce = Callable[[ResponseWriter], Awaitable[None]]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def written(produce: Produce, **fields: Any) -> Callable[[HttpRequest], Awaitable[WrittenResponse]]:
    async def handler(request: HttpRequest) -> WrittenResponse:
        return WrittenResponse(produce, **fields)

    return handler


async def ask(produce: Produce, request: bytes = get("/"), **fields: Any) -> Answer:
    async with serving({"GET /": written(produce, **fields)}) as (_, address), raw(address) as client:
        client.send(request)
        return await client.answer()


def test_chunk_heads() -> None:
    for size in (0, 1, 15, 16, 4095, 4096, 65_536):
        assert chunk_head(size) == b"%x\r\n" % size


# --- head and chunks


async def test_the_head_leaves_with_the_first_chunk() -> None:
    gate = asyncio.Event()

    async def produce(writer: ResponseWriter) -> None:
        assert not writer.head_sent
        await gate.wait()
        writer.write(b"one ")
        assert writer.head_sent
        await asyncio.sleep(0.02)
        writer.write(b"two")
        writer.write(b"x" * 5000)

    handler = written(produce, headers={"x-a": "b"}, content_type="text/plain")
    async with serving({"GET /": handler}) as (_, address), raw(address) as client:
        client.send(get("/") + get("/"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.reader.readexactly(1)
        gate.set()
        for _ in range(2):  # and the connection goes on
            answer = await client.answer()
            assert (answer.status, answer.body) == (200, b"one two" + b"x" * 5000)
            assert answer.headers["x-a"] == "b"
            assert answer.headers["content-type"] == "text/plain"
            assert answer.headers["transfer-encoding"] == "chunked"


async def test_what_is_written_in_one_tick_leaves_at_once() -> None:
    writes: list[bytes] = []

    async def produce(writer: ResponseWriter) -> None:
        write = writer._transport.write

        class Spy:
            def write(self, data: bytes) -> None:
                writes.append(data)
                write(data)

        writer._transport = Spy()  # type: ignore[assignment]
        writer.write(b"a")
        writer.write(b"b")
        assert writes == []
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(writes) == 1
        writer.write_framed(b"1\r\nc\r\n")
        writer.write(b"d")

    answer = await ask(produce)
    assert answer.body == b"abcd"
    assert len(writes) == 2  # the last two chunks, with the end of the body


async def test_an_empty_write_sends_the_head_and_does_not_end_the_body() -> None:
    gate = asyncio.Event()

    async def produce(writer: ResponseWriter) -> None:
        writer.write(b"")
        assert writer.head_sent
        await gate.wait()
        writer.write(b"")
        writer.write(b"late")

    async with serving({"GET /": written(produce)}) as (_, address), raw(address) as client:
        client.send(get("/") + get("/"))
        head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), MUST_HAPPEN_S)
        assert head.startswith(b"HTTP/1.1 200 ")
        gate.set()
        assert (
            await asyncio.wait_for(client.reader.readuntil(b"0\r\n\r\n"), MUST_HAPPEN_S)
            == b"4\r\nlate\r\n0\r\n\r\n"
        )
        assert (await client.answer()).body == b"late"


async def test_no_chunk_at_all_is_an_empty_body() -> None:
    async def produce(writer: ResponseWriter) -> None:
        return

    answer = await ask(produce, status=202)
    assert (answer.status, answer.body) == (202, b"")


async def test_an_end_may_be_early_and_repeated() -> None:
    async def produce(writer: ResponseWriter) -> None:
        writer.write(b"all")
        writer.end()
        writer.end()
        await asyncio.sleep(0.01)

    async with serving({"GET /": written(produce)}) as (_, address), raw(address) as client:
        client.send(get("/") + get("/"))
        assert [(await client.answer()).body for _ in range(2)] == [b"all", b"all"]


async def test_head_requests_get_the_head_alone() -> None:
    async def produce(writer: ResponseWriter) -> None:
        writer.write(b"nobody reads this")

    async with serving({"GET /": written(produce)}) as (_, address), raw(address) as client:
        client.send(b"HEAD / HTTP/1.1\r\n\r\n" + get("/"))
        assert (await client.answer(has_body=False)).status == 200
        assert (await client.answer()).body == b"nobody reads this"


async def test_a_status_that_has_no_body_has_no_framing() -> None:
    async def produce(writer: ResponseWriter) -> None:
        writer.write(b"nothing of this")

    async with serving({"GET /": written(produce, status=204)}) as (_, address), raw(address) as client:
        client.send(get("/") + get("/"))
        for _ in range(2):
            answer = await client.answer(has_body=False)
            assert answer.status == 204
            assert "transfer-encoding" not in answer.headers


async def test_http_1_0_gets_the_body_as_it_is_and_then_the_end() -> None:
    async def produce(writer: ResponseWriter) -> None:
        assert not writer.chunked
        writer.write(b"one ")
        await asyncio.sleep(0)
        writer.write(b"two")

    async with serving({"GET /": written(produce)}) as (_, address), raw(address) as client:
        client.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        answer = await client.answer(has_body=False)
        assert "transfer-encoding" not in answer.headers
        assert answer.headers["connection"] == "close"
        assert await client.rest() == b"one two"


async def test_a_real_client_reads_it() -> None:
    async def produce(writer: ResponseWriter) -> None:
        for number in range(50):
            writer.write(b"data: %d\n\n" % number)
            if number % 7 == 0:
                await asyncio.sleep(0)

    async with serving({"GET /": written(produce)}) as (_, address), httpx.AsyncClient() as client:
        async with client.stream("GET", f"http://{address}/") as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines == [f"data: {number}" for number in range(50)]
        assert (await client.get(f"http://{address}/")).status_code == 200


# --- errors


@pytest.mark.parametrize(("error", "status"), [(Overloaded("full"), 429), (RuntimeError("oops"), 500)])
async def test_an_error_before_the_head_gets_its_own_status(error: Exception, status: int) -> None:
    async def produce(writer: ResponseWriter) -> None:
        await asyncio.sleep(0)
        raise error

    async with serving({"GET /": written(produce)}) as (_, address), raw(address) as client:
        client.send(get("/") + get("/"))
        for _ in range(2):
            answer = await client.answer()
            assert answer.status == status
            assert b"oops" not in answer.body


async def test_an_error_after_the_head_cuts_the_connection() -> None:
    async def produce(writer: ResponseWriter) -> None:
        writer.write(b"half")
        await asyncio.sleep(0.01)
        raise Overloaded("too late for a status")

    async with serving({"GET /": written(produce)}) as (_, address), raw(address) as client:
        client.send(get("/"))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await client.answer()


async def test_a_header_that_would_break_out_is_a_500() -> None:
    async def produce(writer: ResponseWriter) -> None:
        raise AssertionError("must not run")

    answer = await ask(produce, headers={"x-a": "b\r\nx-evil: 1"})
    assert answer.status == 500
    assert "x-evil" not in answer.headers


async def test_stopping_the_server_ends_it() -> None:
    story: list[str] = []

    async def produce(writer: ResponseWriter) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            story.append("ended")

    async def begun(writer: ResponseWriter) -> None:
        writer.write(b"half")
        await produce(writer)

    handlers = {"GET /quiet": written(produce), "GET /begun": written(begun)}
    async with serving(handlers) as (server, address), raw(address) as quiet, raw(address) as talking:
        quiet.send(get("/quiet"))
        talking.send(get("/begun"))
        await asyncio.wait_for(talking.reader.readuntil(b"half"), MUST_HAPPEN_S)
        await server.close()
        assert (await quiet.answer()).status == 503
        assert await talking.rest() == b"\r\n"  # no last chunk: it is not complete
    assert story == ["ended", "ended"]


# --- clients that leave, and clients that do not read


async def test_hanging_up_sets_gone_and_cancels() -> None:
    story: list[str] = []
    kept: list[ResponseWriter] = []

    async def handler(request: HttpRequest) -> WrittenResponse:
        async def produce(writer: ResponseWriter) -> None:
            kept.append(writer)
            request.on_disconnect(lambda: story.append("told"))
            writer.write(b"begun")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                assert writer.disconnected
                writer.write(b"into the void")
                story.append("cancelled")
                raise

        return WrittenResponse(produce)

    statuses: list[int] = []
    async with serving({"GET /": handler}) as (server, address):
        server._observe = lambda method, status, seconds: statuses.append(status)
        async with raw(address) as client:
            client.send(get("/"))
            await asyncio.wait_for(client.reader.readuntil(b"begun"), MUST_HAPPEN_S)
        await until(lambda: server.num_connections == 0 and bool(statuses))
        assert story == ["told", "cancelled"]
        assert statuses == [499]
        kept[0].write(b"later still")  # harmless
        kept[0].end()
        await asyncio.sleep(0)


async def test_the_producer_is_notified_of_a_client_that_does_not_read() -> None:
    story: list[str] = []
    done = asyncio.Event()

    async def produce(writer: ResponseWriter) -> None:
        writer.on_pause = lambda: story.append("pause")
        writer.on_resume = lambda: (story.append("resume"), done.set())[0]
        while not story:
            writer.write(b"x" * 65_536)
            await asyncio.sleep(0)
        await done.wait()
        writer.write(b"end")

    async with serving({"GET /": written(produce)}) as (_, address):
        with socket.create_connection(split_address(address)) as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, get("/"))
            await until(lambda: story == ["pause"])
            received = b""
            while not received.endswith(b"3\r\nend\r\n0\r\n\r\n"):
                received += await asyncio.wait_for(loop.sock_recv(client, 1 << 20), MUST_HAPPEN_S)
        assert story == ["pause", "resume"]


async def test_a_client_that_never_reads_is_cut_off() -> None:
    ended = asyncio.Event()

    async def produce(writer: ResponseWriter) -> None:
        paused: list[bool] = []
        writer.on_pause = lambda: paused.append(True)
        try:
            while not paused:
                writer.write(b"x" * 65_536)
                await asyncio.sleep(0)
            await asyncio.sleep(60)
        finally:
            ended.set()

    limits = HttpLimits(write_timeout_s=0.1)
    async with serving({"GET /": written(produce)}, limits) as (server, address):
        with socket.create_connection(split_address(address)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            client.sendall(get("/"))
            await asyncio.wait_for(ended.wait(), MUST_HAPPEN_S)
            await until(lambda: server.num_connections == 0)


# --- every response has an id


def is_made_up(request_id: str) -> bool:
    return len(request_id) >= 16 and all(character in "0123456789abcdef" for character in request_id)


async def ids(client: RawClient, *requests: bytes) -> list[tuple[int, str]]:
    told = []
    for request in requests:
        client.send(request)
        answer = await client.answer(has_body=not request.startswith(b"HEAD"))
        told.append((answer.status, answer.headers["x-request-id"]))
    return told


async def whole(request: HttpRequest) -> Response:
    return Response(200, request.id.encode())


async def failing(request: HttpRequest) -> Response:
    raise Overloaded("full")


async def test_a_client_s_own_id_comes_back() -> None:
    async def produce(writer: ResponseWriter) -> None:
        writer.write(b"a")

    handlers = {"GET /": whole, "GET /failing": failing, "GET /written": written(produce)}
    async with serving(handlers) as (_, address), raw(address) as client:
        own = "x-request-id: my-own.id/7"
        told = await ids(
            client,
            get("/", own),
            get("/failing", own),
            get("/written", own),
            get("/missing", own),
            b"POST / HTTP/1.1\r\ncontent-length: 0\r\n" + own.encode() + b"\r\n\r\n",
            b"HEAD / HTTP/1.1\r\n" + own.encode() + b"\r\n\r\n",
        )
        assert told == [(status, "my-own.id/7") for status in (200, 429, 200, 404, 405, 200)]
        client.send(get("/", own))
        assert (await client.answer()).body == b"my-own.id/7"  # the handler knows it


@pytest.mark.parametrize("bad", ["", "two words", "x" * 129, "umlaut-\xe9", "tab\tinside"])
async def test_a_bad_id_is_replaced(bad: str) -> None:
    async with serving({"GET /": whole}) as (_, address), raw(address) as client:
        client.send(b"GET / HTTP/1.1\r\nx-request-id: " + bad.encode("latin-1") + b"\r\n\r\n")
        answer = await client.answer()
        assert is_made_up(answer.headers["x-request-id"])
        assert answer.body.decode() == answer.headers["x-request-id"]


async def test_without_one_each_gets_its_own() -> None:
    async with serving({"GET /": whole, "GET /failing": failing}) as (_, address), raw(address) as client:
        told = await ids(client, get("/"), get("/"), get("/failing"), get("/missing"))
        assert len({request_id for _, request_id in told}) == 4
        assert all(is_made_up(request_id) for _, request_id in told)


@on_virtual_time
async def test_refusals_have_one_too(host: VirtualHost) -> None:
    limits = HttpLimits(max_body_bytes=10, header_timeout_s=0.05, max_connections=2)
    async with serving({"GET /": whole}, limits, host) as (server, address):
        for request, status in (
            (b"nonsense\r\n\r\n", 400),
            (b"POST / HTTP/1.1\r\ncontent-length: 99\r\n\r\n", 413),
            (b"GET / HT", 408),
        ):
            async with raw(address, host) as client:
                client.send(request)
                answer = await client.answer()
                assert answer.status == status
                assert is_made_up(answer.headers["x-request-id"])
            await until(lambda: server.num_connections == 0)
        async with raw(address, host) as first, raw(address, host) as second:
            for client in (first, second):
                client.send(get("/"))
                await client.answer()
            async with raw(address, host) as third:
                answer = await third.answer()
                assert answer.status == 503
                assert is_made_up(answer.headers["x-request-id"])


async def test_last_words_of_a_stopping_server_have_the_request_s() -> None:
    running = asyncio.Event()

    async def slow(request: HttpRequest) -> Response:
        running.set()
        await asyncio.sleep(60)
        return Response(200)

    async with serving({"GET /": slow}) as (server, address), raw(address) as client:
        client.send(get("/", "x-request-id: mine"))
        await running.wait()
        await server.close()
        answer = await client.answer()
        assert (answer.status, answer.headers["x-request-id"]) == (503, "mine")
        assert isinstance(server, HttpServer)
