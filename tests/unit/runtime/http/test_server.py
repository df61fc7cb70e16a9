"""The HTTP server over real sockets: what clients may do, and what they may not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import httpx
import pytest
import uvloop
from tests.waits import MUST_HAPPEN_S

from kvolt.core import errors
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.http.server import (
    AnyResponse,
    HttpLimits,
    HttpRequest,
    HttpServer,
    Response,
    Routes,
    WrittenResponse,
    error_response,
)
from kvolt.runtime.http.writer import ResponseWriter
from kvolt.runtime.network import SocketNetwork, split_address
from kvolt.testing.virtual.loop import VirtualClock, run_virtual
from kvolt.testing.virtual.network import VirtualHost, VirtualNetwork


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class RawClient:
    """Bytes in, responses out: what a polite client library would not let us send."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, has_body: bool = True) -> Answer:
        async with asyncio.timeout(MUST_HAPPEN_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status_line, *lines = head.strip().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            body = await self._body(headers) if has_body else b""
            return Answer(int(status_line.split(" ")[1]), headers, body)

    async def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            body = bytearray()
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
            return bytes(body)
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        return b""

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        async with asyncio.timeout(MUST_HAPPEN_S):
            return await self.reader.read()

    async def closed(self) -> bool:
        return await self.rest() == b""


Handle = Callable[[HttpRequest], Awaitable[AnyResponse]]


@asynccontextmanager
async def serving(
    handlers: dict[str, Handle], limits: HttpLimits | None = None, host: VirtualHost | None = None
) -> AsyncIterator[tuple[HttpServer, str]]:
    """A server for handlers keyed "METHOD /path", on a virtual host or on loopback."""
    routes = Routes()
    for key, handler in handlers.items():
        method, path = key.split(" ")
        routes.add(method, path, handler)
    network, clock = (SocketNetwork(), SystemClock()) if host is None else (host, VirtualClock())
    server = HttpServer(network, routes, clock, limits)
    address = await server.start("127.0.0.1:0")
    try:
        yield server, address
    finally:
        await server.close()
        assert server.num_connections == 0


@asynccontextmanager
async def raw(address: str, host: VirtualHost | None = None) -> AsyncIterator[RawClient]:
    if host is None:
        reader, writer = await asyncio.open_connection(*split_address(address))
    else:
        reader, writer = await open_virtual(address, host)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()


async def open_virtual(address: str, host: VirtualHost) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As `asyncio.open_connection`, from a virtual host."""
    opened: asyncio.Future[asyncio.Transport] = asyncio.get_running_loop().create_future()

    class Protocol(asyncio.StreamReaderProtocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            opened.set_result(cast("asyncio.Transport", transport))

    reader = asyncio.StreamReader()
    protocol = Protocol(reader)
    await host.connect(address, lambda: protocol, MUST_HAPPEN_S)
    return reader, asyncio.StreamWriter(await opened, protocol, reader, asyncio.get_running_loop())


def on_virtual_time(scenario: Callable[[VirtualHost], Coroutine[None, None, None]]) -> Callable[[], None]:
    """A test that runs in virtual time on one virtual host: time limits expire however slow the machine is."""

    def run() -> None:
        run_virtual(lambda: scenario(VirtualNetwork(random.Random(1)).host("test")), until_s=600)

    run.__name__ = scenario.__name__
    return run


async def echo(request: HttpRequest) -> Response:
    return Response(200, request.body or request.path.encode(), content_type="text/plain")


def get(path: str, *lines: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: t", *lines, "", ""]).encode()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(MUST_HAPPEN_S):
        while not condition():
            await asyncio.sleep(0.005)


# what works


async def test_a_real_client_reuses_one_connection() -> None:
    async with serving({"GET /a": echo, "POST /b": echo}) as (server, address), httpx.AsyncClient() as client:
        first = await client.get(f"http://{address}/a")
        second = await client.post(f"http://{address}/b", content=b"x" * 100_000)
        assert (first.status_code, first.content) == (200, b"/a")
        assert second.content == b"x" * 100_000
        assert "date" in first.headers
        assert server.num_connections == 1


async def test_requests_carry_query_params_headers_and_peer() -> None:
    seen: list[HttpRequest] = []

    async def handler(request: HttpRequest) -> Response:
        seen.append(request)
        return Response(204)

    async with serving({"GET /models/{name}": handler, "GET /files/{rest:path}": handler}) as (_, address):
        async with httpx.AsyncClient() as client:
            url = f"http://{address}/models/a%2Fb?x=1&y=%20z"
            none = await client.get(url, headers={"X-Thing": b"\xe9"})
            await client.get(f"http://{address}/files/meta/llama")
        assert none.status_code == 204
        assert "content-length" not in none.headers
        assert seen[0].params == {"name": "a/b"}
        assert seen[0].query == {"x": "1", "y": " z"}
        assert seen[0].headers["host"] == address
        assert seen[0].headers["x-thing"] == "é"
        assert seen[0].peer.startswith("127.0.0.1:")
        assert seen[1].params == {"rest": "meta/llama"}


async def test_pipelined_requests_are_answered_in_order() -> None:
    async def handler(request: HttpRequest) -> Response:
        delay_s = float(request.query["s"])
        await asyncio.sleep(delay_s)
        return Response(200, request.query["s"].encode())

    async with serving({"GET /": handler}) as (_, address), raw(address) as client:
        delays = ["0.05", "0", "0.01"]
        client.send(b"".join(get(f"/?s={delay}") for delay in delays))
        assert [(await client.answer()).body.decode() for _ in delays] == delays


async def test_reading_pauses_at_the_pipelining_bound() -> None:
    gate = asyncio.Event()

    async def handler(request: HttpRequest) -> Response:
        await gate.wait()
        return Response(200, request.query["n"].encode())

    num_requests = 4000
    limits = HttpLimits(max_pipelined=4)
    async with serving({"GET /": handler}, limits) as (server, address), raw(address) as client:
        sent = [get(f"/?n={n}", "x: " + "y" * 1000) for n in range(num_requests)]
        client.send(b"".join(sent))
        await until(lambda: server.num_connections == 1)
        with contextlib.suppress(TimeoutError):  # the kernel's buffers may hold all of it
            async with asyncio.timeout(0.3):
                await client.writer.drain()
                await asyncio.sleep(1)
        (connection,) = server._connections
        assert len(connection._reader.requests) < 4 + 20  # at most one slice past the bound
        gate.set()
        answers = [int((await client.answer()).body) for _ in range(num_requests)]
        assert answers == list(range(num_requests))


async def test_chunked_upload_and_download() -> None:
    async def handler(request: HttpRequest) -> WrittenResponse:
        async def produce(writer: ResponseWriter) -> None:
            for part in (b"", request.body, b"z" * 200_000):
                writer.write(part)

        return WrittenResponse(produce, headers={"x-a": "b"}, content_type="text/plain")

    async def upload() -> AsyncIterator[bytes]:
        yield b"ab"
        yield b"cd" * 1000

    async with serving({"POST /": handler}) as (_, address), httpx.AsyncClient() as client:
        for _ in range(2):
            answer = await client.post(f"http://{address}/", content=upload())
            assert answer.content == b"ab" + b"cd" * 1000 + b"z" * 200_000
            assert answer.headers["transfer-encoding"] == "chunked"
            assert answer.headers["x-a"] == "b"


async def test_http_1_0_streams_until_close() -> None:
    async def handler(request: HttpRequest) -> WrittenResponse:
        async def produce(writer: ResponseWriter) -> None:
            writer.write(b"one ")
            writer.write(b"two")

        return WrittenResponse(produce)

    async with serving({"GET /": handler, "GET /whole": echo}) as (_, address), raw(address) as client:
        client.send(b"GET /whole HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert (await client.answer()).headers["connection"] == "keep-alive"
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        answer = await client.answer(has_body=False)
        assert "transfer-encoding" not in answer.headers
        assert await client.rest() == b"one two"


async def test_head_has_the_head_of_get_and_no_body() -> None:
    async def stream(request: HttpRequest) -> WrittenResponse:
        async def produce(writer: ResponseWriter) -> None:
            writer.write(b"nothing of this")

        return WrittenResponse(produce)

    async with serving({"GET /whole": echo, "GET /stream": stream}) as (_, address), raw(address) as client:
        client.send(b"HEAD /whole HTTP/1.1\r\n\r\nHEAD /stream HTTP/1.1\r\n\r\nGET /whole HTTP/1.1\r\n\r\n")
        whole = await client.answer(has_body=False)
        assert (whole.status, whole.headers["content-length"]) == (200, "6")
        assert (await client.answer(has_body=False)).status == 200
        assert (await client.answer()).body == b"/whole"


async def test_expect_100_continue() -> None:
    limits = HttpLimits(max_body_bytes=10)
    async with serving({"POST /": echo}, limits) as (_, address), raw(address) as client:
        client.send(b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n")
        assert (await client.answer()).status == 100
        client.send(b"abc")
        assert (await client.answer()).body == b"abc"
        client.send(b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 30\r\n\r\n")
        assert (await client.answer()).status == 413


async def test_100_continue_waits_for_the_response_before_it() -> None:
    gate = asyncio.Event()

    async def slow(request: HttpRequest) -> Response:
        await gate.wait()
        return Response(200, b"slow")

    async with serving({"GET /slow": slow, "POST /": echo}) as (_, address), raw(address) as client:
        client.send(get("/slow") + b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n")
        await asyncio.sleep(0.02)
        gate.set()
        assert (await client.answer()).body == b"slow"
        assert (await client.answer()).status == 100
        client.send(b"abc")
        assert (await client.answer()).body == b"abc"


async def test_an_upgrade_offer_is_ignored_and_the_body_is_kept() -> None:
    async with serving({"POST /": echo}) as (_, address), raw(address) as client:
        offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        client.send(
            b"POST / HTTP/1.1\r\n" + offer + b"Content-Length: 5\r\n\r\nhello" + b"POST / HTTP/1.1\r\n\r\n"
        )
        assert (await client.answer()).body == b"hello"
        assert (await client.answer()).body == b"/"


async def test_connection_close_is_honoured() -> None:
    async with serving({"GET /": echo}) as (_, address), raw(address) as client:
        client.send(get("/", "connection: close") + get("/"))
        assert (await client.answer()).headers["connection"] == "close"
        assert await client.closed()


# routes and errors


async def test_unknown_paths_and_methods() -> None:
    async with serving({"GET /a": echo, "POST /a": echo}) as (_, address), httpx.AsyncClient() as client:
        missing = await client.get(f"http://{address}/b")
        assert missing.status_code == 404
        assert missing.json() == {
            "error": {
                "message": "unknown path /b",
                "type": "invalid_request_error",
                "param": None,
                "code": "not_found",
            }
        }
        wrong = await client.delete(f"http://{address}/a")
        assert wrong.status_code == 405
        assert wrong.headers["allow"] == "GET, POST, HEAD"
        assert wrong.json()["error"]["code"] == "method_not_allowed"


def test_a_route_is_added_once() -> None:
    routes = Routes()
    routes.add("GET", "/x/{a}", echo)
    with pytest.raises(errors.ConfigError):
        routes.add("GET", "/x/{a}", echo)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidRequest("no", param="n"), 400),
        (errors.NotFound("no"), 404),
        (errors.PayloadTooLarge("no"), 413),
        (errors.Unsupported("no"), 501),
        (errors.Overloaded("no", retry_after_s=2.4), 429),
        (errors.Unavailable("no"), 503),
        (errors.DeadlineExceeded("no"), 504),
        (errors.WorkerLost("no"), 502),
        (errors.VersionMismatch("no"), 502),
        (errors.EngineFailed("no"), 500),
        (errors.KvoltError("no"), 500),
    ],
)
def test_error_mapping(error: errors.KvoltError, status: int) -> None:
    response = error_response(error)
    assert response.status == status
    body = json.loads(response.body)["error"]
    assert body["code"] == error.code
    assert body["param"] == error.fields.get("param")
    assert response.headers == ({"retry-after": "3"} if status == 429 else {})


async def test_a_handler_error_is_mapped_and_the_connection_goes_on() -> None:
    async def handler(request: HttpRequest) -> Response:
        raise errors.Overloaded("queue is full")

    async with serving({"GET /": handler}) as (_, address), raw(address) as client:
        for _ in range(2):
            client.send(get("/"))
            answer = await client.answer()
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")


async def test_an_unexpected_exception_leaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def crash(request: HttpRequest) -> Response:
        raise RuntimeError("secret of the house")

    async def split(request: HttpRequest) -> Response:
        return Response(200, headers={"x": "a\r\nset-cookie: b"})

    async def cancelled_inside(request: HttpRequest) -> Response:
        raise asyncio.CancelledError

    handlers = {"GET /crash": crash, "GET /split": split, "GET /cancelled": cancelled_inside}
    async with serving(handlers) as (_, address), raw(address) as client:
        for path in ("/crash", "/split", "/cancelled"):
            client.send(get(path))
            answer = await client.answer()
            assert answer.status == 500
            assert json.loads(answer.body)["error"]["message"] == "internal error"
            assert "set-cookie" not in answer.headers
    assert "secret of the house" in caplog.text
    assert all(record.exc_info for record in caplog.records if record.levelno == logging.ERROR)


# limits


async def test_a_body_over_the_limit_is_413_and_closes() -> None:
    limits = HttpLimits(max_body_bytes=1000)
    async with serving({"POST /": echo}, limits) as (server, address):
        async with raw(address) as client:
            client.send(b"POST / HTTP/1.1\r\ncontent-length: 1001\r\n\r\n" + b"x" * 1001)
            answer = await client.answer()
            assert (answer.status, answer.headers["connection"]) == (413, "close")
            assert await client.closed()
        async with raw(address) as client:
            client.send(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
            client.send(b"1f4\r\n" + b"x" * 500 + b"\r\n1f5\r\n" + b"x" * 501 + b"\r\n")
            assert (await client.answer()).status == 413
            assert await client.closed()
        async with httpx.AsyncClient() as client_library:
            answer_read = await client_library.post(f"http://{address}/", content=b"x" * 5_000_000)
            assert answer_read.status_code == 413
        await until(lambda: server.num_connections == 0)


async def test_bodies_over_what_all_may_take_together_are_503() -> None:
    limits = HttpLimits(max_buffered_bytes=1000)
    head = b"POST / HTTP/1.1\r\ncontent-length: 600\r\n\r\n"
    async with serving({"POST /": echo}, limits) as (server, address), raw(address) as first:
        first.send(head + b"x" * 599)
        await until(lambda: server.bodies.available_bytes == 401)
        async with raw(address) as second:
            second.send(head + b"x" * 600)
            answer = await second.answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert await second.closed()
        first.send(b"x")
        assert (await first.answer()).status == 200
        async with raw(address) as gone:
            gone.send(head + b"x" * 500)
            await until(lambda: server.bodies.available_bytes == 500)
        await until(lambda: server.bodies.available_bytes == 1000)


async def test_a_long_path_is_truncated() -> None:
    async with serving({"GET /": echo, "POST /{name}": echo}) as (_, address), raw(address) as client:
        client.send(get("/a/" + "b" * 20_000) + get("/" + "b" * 20_000))
        for status in (404, 405):
            answer = await client.answer()
            assert (answer.status, len(answer.body) < 500) == (status, True)


@pytest.mark.parametrize("prefix", [b"GET /", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\n", b"\r\n"])
@pytest.mark.parametrize("piece", [b"a" * 100, b"a: b\r\n"])
async def test_endless_headers_are_431(prefix: bytes, piece: bytes) -> None:
    limits = HttpLimits(max_header_bytes=2000)
    async with serving({"GET /": echo}, limits) as (_, address), raw(address) as client:
        client.send(prefix)
        for _ in range(500):
            await asyncio.sleep(0)
            client.send(piece)
        assert (await client.answer()).status in {431, 400}
        assert await client.closed()


@on_virtual_time
async def test_a_slow_head_is_408_even_when_bytes_keep_coming(host: VirtualHost) -> None:
    limits = HttpLimits(header_timeout_s=0.15)
    async with serving({"GET /": echo}, limits, host) as (_, address), raw(address, host) as client:
        client.send(get("/"))
        assert (await client.answer()).status == 200
        answer = asyncio.ensure_future(client.answer())
        for byte in get("/", "x: y"):
            if answer.done():
                break
            client.send(bytes([byte]))
            await asyncio.sleep(0.02)
        assert (await answer).status == 408
        assert await client.closed()


@on_virtual_time
async def test_a_slow_body_is_408(host: VirtualHost) -> None:
    limits = HttpLimits(body_timeout_s=0.1)
    async with serving({"POST /": echo}, limits, host) as (_, address), raw(address, host) as client:
        client.send(b"POST / HTTP/1.1\r\ncontent-length: 10\r\n\r\nabc")
        assert (await client.answer()).status == 408
        assert await client.closed()


@on_virtual_time
async def test_a_slow_head_behind_a_running_request_waits_its_turn(host: VirtualHost) -> None:
    async def slow(request: HttpRequest) -> Response:
        await asyncio.sleep(0.2)
        return Response(200, b"slow")

    limits = HttpLimits(header_timeout_s=0.05)
    async with serving({"GET /": slow}, limits, host) as (_, address), raw(address, host) as client:
        client.send(get("/") + b"GET / HT")
        assert (await client.answer()).body == b"slow"
        assert (await client.answer()).status == 408


@on_virtual_time
async def test_idle_connections_are_closed_without_a_word(host: VirtualHost) -> None:
    limits = HttpLimits(idle_timeout_s=0.05, header_timeout_s=0.05)
    async with serving({"GET /": echo}, limits, host) as (_, address):
        async with raw(address, host) as client:
            assert await client.closed()
        async with raw(address, host) as client:
            client.send(get("/"))
            assert (await client.answer()).status == 200
            assert await client.closed()


@on_virtual_time
async def test_a_long_request_is_not_idle(host: VirtualHost) -> None:
    async def slow(request: HttpRequest) -> Response:
        await asyncio.sleep(0.2)
        return Response(200)

    limits = HttpLimits(idle_timeout_s=0.05, header_timeout_s=0.05, body_timeout_s=0.05)
    async with serving({"GET /": slow}, limits, host) as (_, address), raw(address, host) as client:
        client.send(get("/"))
        assert (await client.answer()).status == 200


async def test_connections_over_the_limit_get_503() -> None:
    async with serving({"GET /": echo}, HttpLimits(max_connections=1)) as (_, address), raw(address) as first:
        first.send(get("/"))
        assert (await first.answer()).status == 200
        async with raw(address) as second:
            assert (await second.answer()).status == 503
            assert await second.closed()
        first.send(get("/"))
        assert (await first.answer()).status == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_malformed_requests_are_400_and_close(data: bytes) -> None:
    async with serving({"GET /": echo, "POST /": echo}) as (_, address), raw(address) as client:
        client.send(get("/") + data)
        assert (await client.answer()).status == 200
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert await client.closed()


# disconnects, back-pressure, stopping


async def test_a_disconnect_cancels_the_handler() -> None:
    story: list[str] = []

    async def handler(request: HttpRequest) -> Response:
        request.on_disconnect(lambda: story.append("told"))
        story.append("began")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            story.append("cancelled")
            request.on_disconnect(lambda: story.append("told late"))
            raise
        return Response(200)

    async with serving({"GET /": handler}) as (server, address):
        async with raw(address) as client:
            client.send(get("/") + get("/"))
            await until(lambda: story == ["began"])
        await until(lambda: server.num_connections == 0 and len(story) == 4)
        assert story == ["began", "told", "cancelled", "told late"]


async def test_what_waits_for_a_disconnect_is_freed_with_the_answer() -> None:
    class Held:
        pass

    held: list[weakref.ref[Held]] = []

    async def handler(request: HttpRequest) -> Response:
        here = Held()
        held.append(weakref.ref(here))
        request.on_disconnect(lambda: print(here, request))
        return Response(200)

    gc.collect()
    gc.disable()
    try:
        async with serving({"GET /": handler}) as (_, address), raw(address) as client:
            client.send(get("/"))
            assert (await client.answer()).status == 200
            await until(lambda: held[0]() is None)
    finally:
        gc.enable()


async def test_close_lets_running_requests_end_and_refuses_others() -> None:
    gate = asyncio.Event()
    running = asyncio.Event()

    async def slow(request: HttpRequest) -> Response:
        running.set()
        await gate.wait()
        return Response(200, b"done")

    handlers = {"GET /slow": slow, "GET /": echo}
    async with serving(handlers) as (server, address), raw(address) as busy, raw(address) as idle:
        idle.send(get("/"))
        await idle.answer()
        busy.send(get("/slow"))
        await running.wait()
        closing = asyncio.ensure_future(server.close(drain_s=MUST_HAPPEN_S))
        assert await idle.closed()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*split_address(address))
        assert not closing.done()
        gate.set()
        answer = await busy.answer()
        assert (answer.body, answer.headers["connection"]) == (b"done", "close")
        await closing
        assert server.num_connections == 0


async def test_close_cancels_at_its_deadline() -> None:
    async def whole(request: HttpRequest) -> Response:
        await asyncio.sleep(60)
        return Response(200)

    async def stream(request: HttpRequest) -> WrittenResponse:
        async def produce(writer: ResponseWriter) -> None:
            writer.write(b"begun")
            await asyncio.sleep(60)

        return WrittenResponse(produce)

    handlers = {"GET /whole": whole, "GET /stream": stream}
    async with (
        serving(handlers) as (server, address),
        raw(address) as first,
        raw(address) as second,
        raw(address) as half,
    ):
        first.send(get("/whole"))
        second.send(get("/stream"))
        half.send(b"GET / HT")
        assert (await second.answer(has_body=False)).status == 200
        await until(lambda: server.num_connections == 3)
        await asyncio.sleep(0.02)
        await server.close(drain_s=0.05)
        assert (await first.answer()).status == 503
        assert b"0\r\n\r\n" not in await second.rest()
        assert server.num_connections == 0


async def test_every_response_is_observed() -> None:
    seen: list[tuple[str, int]] = []
    routes = Routes()
    routes.add("GET", "/", echo)
    server = HttpServer(
        SocketNetwork(),
        routes,
        SystemClock(),
        observe=lambda method, status, _: seen.append((method, status)),
    )
    address = await server.start("127.0.0.1:0")
    async with raw(address) as client:
        client.send(get("/") + get("/missing") + b"nonsense\r\n\r\n")
        for _ in range(3):
            await client.answer()
    await server.close()
    assert seen == [("GET", 200), ("GET", 404), ("unread", 400)]


# any bytes at all


async def test_any_bytes_end_in_an_answer_or_a_close() -> None:
    """The same over sockets: with short timeouts, no input leaves a connection hanging."""
    limits = HttpLimits(
        max_body_bytes=20,
        max_header_bytes=200,
        header_timeout_s=0.05,
        body_timeout_s=0.05,
        idle_timeout_s=0.05,
    )
    rng = random.Random(7)
    methods = [b"GET ", b"POST ", b"HEAD ", b"CONNECT ", b"OPTIONS "]
    pieces = [*methods, b"/ HTTP/1.1\r\n", b"content-length: 5\r\n", b"\r\n", b"hello", b"\0", b"\xff" * 30]

    async def attack(address: str, data: bytes) -> None:
        async with raw(address) as client:
            client.send(data)
            received = await client.rest()
            assert received == b"" or received.startswith(b"HTTP/1.1 ")

    async with serving({"GET /": echo, "POST /": echo}, limits) as (server, address):
        inputs = [b"".join(rng.choices(pieces, k=rng.randrange(8))) for _ in range(80)]
        inputs += [rng.randbytes(rng.randrange(300)) for _ in range(40)]
        for start in range(0, len(inputs), 40):
            await asyncio.gather(*(attack(address, data) for data in inputs[start : start + 40]))
        await until(lambda: server.num_connections == 0)


# other loops and networks


def test_the_same_on_uvloop() -> None:
    async def scenario() -> None:
        await test_pipelined_requests_are_answered_in_order()
        await test_chunked_upload_and_download()
        await test_a_body_over_the_limit_is_413_and_closes()
        await test_a_disconnect_cancels_the_handler()
        await test_close_lets_running_requests_end_and_refuses_others()
        await test_close_cancels_at_its_deadline()
        await test_connections_over_the_limit_get_503()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_on_the_virtual_network_timeouts_cost_no_time() -> None:
    class Client(asyncio.Protocol):
        def __init__(self) -> None:
            self.received = b""
            self.closed_at: float | None = None

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            transport.write(get("/a") + b"GET /half HT")

        def data_received(self, data: bytes) -> None:
            self.received += data

        def connection_lost(self, error: Exception | None) -> None:
            self.closed_at = asyncio.get_running_loop().time()

    async def scenario() -> None:
        network = VirtualNetwork(random.Random(1))
        routes = Routes()
        routes.add("GET", "/a", echo)
        server = HttpServer(network.host("server"), routes, VirtualClock(), HttpLimits(header_timeout_s=10))
        address = await server.start("server:80")
        client = Client()
        await network.host("client").connect(address, lambda: client, 5.0)
        await asyncio.sleep(30)
        assert client.received.startswith(b"HTTP/1.1 200 OK")
        assert b"HTTP/1.1 408 " in client.received
        assert client.closed_at is not None
        assert 10 <= client.closed_at <= 12
        await server.close()

    run_virtual(scenario)
