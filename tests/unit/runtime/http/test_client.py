"""HttpClient: URLs, and responses in any pieces, over a scripted network."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.waits import MUST_HAPPEN_S

from kvolt.core.errors import (
    ConfigError,
    ConnectFailed,
    InvalidRequest,
    KvoltError,
    ProtocolError,
    WorkerLost,
)
from kvolt.runtime.http.client import HttpClient
from kvolt.runtime.http.client_call import Timeouts
from kvolt.runtime.http.server_url import ServerUrl

BODY_PARTS = st.lists(st.binary(min_size=1, max_size=40), max_size=8)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
URL = ServerUrl.parse("server:80", "k")


class Transport(asyncio.Transport):
    """Answers each request with the next response, in pieces; closes after the last piece if told so."""

    def __init__(self, network: ScriptedNetwork, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.network, self.protocol = network, protocol

    def write(self, data: bytes) -> None:
        self.network.requests.append(data)
        loop = asyncio.get_running_loop()
        for piece in self.network.responses.pop(0):
            loop.call_soon(self.protocol.connection_lost, None) if piece is None else loop.call_soon(
                self.protocol.data_received, piece
            )

    def abort(self) -> None:
        self.network.num_aborted += 1


class ScriptedNetwork:
    def __init__(self, *responses: list[bytes | None]) -> None:
        self.responses = list(responses)
        self.requests: list[bytes] = []
        self.num_connects = self.num_aborted = 0

    async def connect(self, address: str, factory: Any, timeout_s: float) -> asyncio.Protocol:
        self.num_connects += 1
        protocol: asyncio.Protocol = factory()
        protocol.connection_made(Transport(self, protocol))
        return protocol


class Recorder:
    """A receiver that keeps everything."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.batches: list[list[bytes]] = []
        self.error: KvoltError | None = None
        self.over = asyncio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(piece for pieces in self.batches for piece in pieces)

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers

    def data(self, pieces: list[bytes], now: float) -> None:
        self.batches.append(pieces)

    def end(self, now: float) -> None:
        self.over.set()

    def fail(self, error: KvoltError) -> None:
        self.error = error
        self.over.set()


def exchanged(*responses: list[bytes | None], num_calls: int = 1) -> tuple[ScriptedNetwork, list[Recorder]]:
    async def main() -> tuple[ScriptedNetwork, list[Recorder]]:
        network = ScriptedNetwork(*responses)
        recorders = []
        async with HttpClient(URL, network=network) as client:
            for _ in range(num_calls):
                recorder = Recorder()
                client.send("/v1/models", None, recorder)
                await asyncio.wait_for(recorder.over.wait(), MUST_HAPPEN_S)
                recorders.append(recorder)
        return network, recorders

    return asyncio.run(main())


def received(*pieces: bytes | None) -> Recorder:
    return exchanged(list(pieces))[1][0]


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges) if begin < end]


def chunked(parts: list[bytes]) -> bytes:
    return (
        CHUNKED + b"".join(b"%X;x=1\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\nA: b\r\n\r\n"
    )


@given(BODY_PARTS, st.lists(st.integers(0, 10_000), max_size=12))
def test_chunks_in_any_pieces(parts: list[bytes], cuts: list[int]) -> None:
    response = received(*in_pieces(chunked(parts), cuts))
    assert (response.status, response.body, response.error) == (200, b"".join(parts), None)


@given(BODY_PARTS, st.lists(st.integers(0, 10_000), max_size=12))
def test_a_length_in_any_pieces(parts: list[bytes], cuts: list[int]) -> None:
    body = b"".join(parts)
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 No\r\nX: y\r\nContent-Length: %d\r\n\r\n" % len(body)
    response = received(*in_pieces(head + body, cuts))
    assert (response.status, response.headers["x"], response.body) == (404, "y", body)


@given(BODY_PARTS)
def test_parts_arrive_as_they_were_read(parts: list[bytes]) -> None:
    response = received(CHUNKED, *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n")
    assert response.batches == [[part] for part in parts]


def test_a_request() -> None:
    network, _ = exchanged([chunked([b"x"])])
    head = network.requests[0].decode().split("\r\n")
    assert head[:2] == ["GET /v1/models HTTP/1.1", "host: server:80"]
    assert "authorization: Bearer k" in head


def test_without_a_length_the_end_of_the_connection_is_the_end() -> None:
    response = received(b"HTTP/1.1 200 OK\r\n\r\n", b"all ", b"of it", None)
    assert (response.body, response.error) == (b"all of it", None)


@pytest.mark.parametrize(
    ("head", "is_reused"),
    [
        (b"HTTP/1.1 200 OK\r\n", True),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", True),
    ],
)
def test_whether_the_connection_is_used_again(head: bytes, is_reused: bool) -> None:
    response = head + b"Content-Length: 0\r\n\r\n"
    network, _ = exchanged([response], [response], num_calls=2)
    assert network.num_connects == (1 if is_reused else 2)


def test_bytes_after_the_response_close_the_connection() -> None:
    network, [first, second] = exchanged([chunked([b"a"]) + b"more"], [chunked([b"b"])], num_calls=2)
    assert (first.body, second.body, network.num_connects) == (b"a", b"b", 2)


def test_a_call_on_a_connection_that_the_server_closed_is_sent_again() -> None:
    network, [_, second] = exchanged([chunked([b"a"])], [None], [chunked([b"b"])], num_calls=2)
    assert (second.body, second.error, network.num_connects) == (b"b", None, 2)


def test_no_body_where_there_is_none() -> None:
    assert received(b"HTTP/1.1 204 None\r\n\r\n").status == 204


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        CHUNKED + b"xyz\r\n",
        CHUNKED + b"+5\r\nab",
        CHUNKED + b"1\r\nab\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"x" * (65 << 10),
    ],
)
def test_an_invalid_response_is_an_error(data: bytes) -> None:
    assert isinstance(received(data).error, ProtocolError)


@pytest.mark.parametrize("pieces", [[CHUNKED + b"5\r\nab", None], [None]])
def test_an_end_in_the_middle_is_an_error(pieces: list[bytes | None]) -> None:
    error = received(*pieces).error
    assert isinstance(error, WorkerLost)
    assert "closed the connection before the response was complete" in error.message


async def test_a_call_abandoned_at_its_head_gets_nothing_more() -> None:
    class Leaver(Recorder):
        def head(self, status: int, headers: Mapping[str, str]) -> None:
            calls[0].abandon()
            left.set()

    left = asyncio.Event()
    network = ScriptedNetwork([chunked([b"a", b"b"])])
    async with HttpClient(URL, network=network) as client:
        receiver = Leaver()
        calls = [client.send("/v1/models", None, receiver)]
        await asyncio.wait_for(left.wait(), MUST_HAPPEN_S)
        await asyncio.sleep(0)
    assert (receiver.batches, receiver.over.is_set(), network.num_aborted) == ([], False, 1)


class Refusing(Recorder):
    def data(self, pieces: list[bytes], now: float) -> None:
        raise InvalidRequest("not this")


@pytest.mark.parametrize("last", [b"0\r\n\r\n", b""], ids=["complete", "incomplete"])
async def test_an_error_of_a_receiver_ends_its_call(last: bytes) -> None:
    network = ScriptedNetwork([CHUNKED + b"2\r\nab\r\n" + last])
    async with HttpClient(URL, network=network) as client:
        receiver = Refusing()
        client.send("/v1/models", None, receiver)
        await asyncio.wait_for(receiver.over.wait(), MUST_HAPPEN_S)
        assert isinstance(receiver.error, InvalidRequest)
        assert client.num_connections == 0


async def test_a_coroutine_reads_a_response() -> None:
    network = ScriptedNetwork([CHUNKED, b"1\r\na\r\n", b"1\r\nb\r\n0\r\n\r\n"], [chunked([b"x" * 9])])
    async with HttpClient(URL, network=network) as client:
        async with client.open("/v1/models", None, Timeouts(5.0, 5.0)) as response:
            assert response.status == 200
            assert [piece async for piece in response] == [b"a", b"b"]
        async with client.open("/v1/models", b"{}", Timeouts(5.0, 5.0)) as response:
            with pytest.raises(ProtocolError, match="exceeds 8 bytes"):
                await response.read(8)


async def test_it_does_not_talk_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may give an unused port to the connecting client, which would keep the server from listening on it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def from_there(*given, **more):
        return await connect(*given, **more, local_addr=("127.0.0.1", port))

    monkeypatch.setattr(loop, "create_connection", from_there)
    async with HttpClient(ServerUrl.parse(f"http://127.0.0.1:{port}")) as client:
        with pytest.raises(ConnectFailed, match="connection refused"):
            await client.fetch("/health", 5.0)
        assert client.num_connections == 0


@pytest.mark.parametrize(
    ("url", "api", "server"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("http://h/", "http://h/v1", "http://h"),
        ("https://h/api/v2/", "https://h/api/v2", "https://h/api/v2"),
        ("http://h:1/v1/chat/completions", "http://h:1/v1", "http://h:1/v1/chat/completions"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_urls(url: str, api: str, server: str) -> None:
    parsed = ServerUrl.parse(url)
    assert (parsed.of_api().text, parsed.of_server().text) == (api, server)


@pytest.mark.parametrize(
    "url", ["", "ftp://h", "http://", "http://h:x", "http://h:0", "http://a b", "http://u@h", "h?a=1"]
)
def test_invalid_urls(url: str) -> None:
    with pytest.raises(ConfigError):
        ServerUrl.parse(url)


def test_a_key_with_a_line_end_is_no_key() -> None:
    with pytest.raises(ConfigError):
        ServerUrl.parse("h", "a\nHost: evil")
