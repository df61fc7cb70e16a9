"""CORS: what browsers are told about pages of allowed and of other origins."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kvolt.core.errors import Overloaded
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.http.cors import CorsPolicy
from kvolt.runtime.http.server import HttpRequest, HttpServer, Response, Routes, WrittenResponse
from kvolt.runtime.http.writer import ResponseWriter
from kvolt.runtime.network import SocketNetwork

PAGE = "https://chat.example.com"


async def plain(request: HttpRequest) -> Response:
    return Response(200, b"{}", {"x-kvolt-warning": "none"})


async def stream(request: HttpRequest) -> WrittenResponse:
    async def produce(writer: ResponseWriter) -> None:
        writer.write(b"data: 1\n\n")

    return WrittenResponse(produce)


async def failing_stream(request: HttpRequest) -> WrittenResponse:
    async def produce(writer: ResponseWriter) -> None:
        raise Overloaded("the queue is full", queue="router", limit=1)

    return WrittenResponse(produce)


@asynccontextmanager
async def client(*origins: str) -> AsyncIterator[httpx.AsyncClient]:
    routes = Routes()
    routes.add("POST", "/v1/chat", plain)
    routes.add("POST", "/v1/stream", stream)
    routes.add("POST", "/v1/failing", failing_stream)
    cors = CorsPolicy(origins) if origins else None
    server = HttpServer(SocketNetwork(), routes, SystemClock(), cors=cors)
    address = await server.start("127.0.0.1:0")
    async with httpx.AsyncClient(base_url=f"http://{address}") as browser:
        yield browser
    await server.close()


def preflight(origin: str, **headers: str) -> dict[str, str]:
    return {"origin": origin, "access-control-request-method": "POST", **headers}


async def test_by_default_no_origin_is_allowed() -> None:
    async with client() as browser:
        answer = await browser.options("/v1/chat", headers=preflight(PAGE))
        assert answer.status_code == 405
        actual = await browser.post("/v1/chat", headers={"origin": PAGE})
        assert [
            name for name in (*answer.headers, *actual.headers) if name.startswith("access-control")
        ] == []


@pytest.mark.parametrize("path", ["/v1/chat", "/v1/stream"])
async def test_a_page_of_a_named_origin_may_call_and_read(path: str) -> None:
    async with client("http://localhost:3000", PAGE.upper()) as browser:
        wanted = "authorization,content-type,x-stainless-os"
        answer = await browser.options(
            path, headers=preflight(PAGE, **{"access-control-request-headers": wanted})
        )
        assert (answer.status_code, answer.content) == (204, b"")
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-headers"] == wanted
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-credentials"] == "true"
        actual = await browser.post(path, headers={"origin": PAGE})
        assert actual.status_code == 200
        assert actual.headers["access-control-allow-origin"] == PAGE
        assert actual.headers["vary"] == "origin"
        readable = actual.headers["access-control-expose-headers"]
        assert readable == ("x-request-id, x-kvolt-warning" if path == "/v1/chat" else "x-request-id")


async def test_errors_can_be_read_too() -> None:
    async with client(PAGE) as browser:
        for method, path, status in (("GET", "/v1/chat", 405), ("GET", "/nothing", 404)):
            answer = await browser.request(method, path, headers={"origin": PAGE})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example.com",
        "https://chat.example.com.evil.com",
        "http://chat.example.com",
        "https://chat.example.com:8443",
        "https://chat.example.com/",
        "null",
        "*",
        "",
        "https://chat.example.com, https://evil.example.com",
        "a" * 20_000,
    ],
)
async def test_other_origins_are_refused(origin: str) -> None:
    async with client(PAGE) as browser:
        answer = await browser.options("/v1/chat", headers=preflight(origin))
        assert answer.status_code == 403
        assert "frontend.cors_origins" in answer.json()["error"]["message"]
        assert len(answer.content) < 400
        actual = await browser.post("/v1/chat", headers={"origin": origin})
        for each in (answer, actual):
            assert [name for name in each.headers if name.startswith("access-control")] == []


@pytest.mark.parametrize("origin", [PAGE, "null", "anything"])
async def test_any_origin_is_allowed_without_credentials(origin: str) -> None:
    async with client("*") as browser:
        for answer in (
            await browser.options("/v1/chat", headers=preflight(origin)),
            await browser.post("/v1/chat", headers={"origin": origin}),
        ):
            assert answer.is_success
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "access-control-allow-credentials" not in answer.headers


@pytest.mark.parametrize("names", ["x" * 5000, "x-a: 1", "x-a;y", "é"])
async def test_names_that_are_no_headers_are_not_repeated(names: str) -> None:
    headers = [
        (name.encode(), value.encode("latin-1"))
        for name, value in preflight(PAGE, **{"access-control-request-headers": names}).items()
    ]
    async with client(PAGE) as browser:
        answer = await browser.options("/v1/chat", headers=headers)
        if answer.status_code == 204:
            assert "access-control-allow-headers" not in answer.headers
        else:
            assert answer.status_code == 400


async def test_requests_without_an_origin_are_unchanged() -> None:
    async with client(PAGE) as browser:
        answer = await browser.post("/v1/chat")
        assert [name for name in answer.headers if name.startswith("access-control")] == []
        assert (await browser.options("/v1/chat", headers={"origin": PAGE})).status_code == 405


async def test_a_page_may_read_the_error_of_a_stream_that_has_not_begun() -> None:
    async with client(PAGE) as browser:
        answer = await browser.post("/v1/failing", headers={"origin": PAGE})
        assert answer.status_code == 429
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "retry-after" in answer.headers["access-control-expose-headers"]
