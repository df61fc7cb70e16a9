"""The client against a real server on loopback that streams, breaks off, refuses and babbles."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from contextlib import aclosing

import pytest
from tests.unit.cli.chat_lab import CERTIFICATE, DONE, Script, Server, event, refusal, usage, whole

from kvolt.cli.chat.client import ChatClient
from kvolt.cli.chat.stream import CallPiece, ChatUsage, ChunkReader, Piece, one_line
from kvolt.core.errors import (
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    InvalidRequest,
    KvoltError,
    NotFound,
    Overloaded,
    ProtocolError,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from kvolt.runtime.http.server_url import ServerUrl

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def client_of(url: str, api_key: str | None = None, timeout_s: float = 300.0) -> ChatClient:
    return ChatClient(ServerUrl.parse(url, api_key).of_api(), timeout_s)


def models_of(client: ChatClient) -> list[str]:
    return asyncio.run(client.models())


async def pieces_of(client: ChatClient) -> list[Piece]:
    async with aclosing(client.stream(BODY)) as pieces:
        return [piece async for piece in pieces]


def text_of(server: Server, timeout_s: float = 300.0) -> str:
    pieces = asyncio.run(pieces_of(client_of(server.url, timeout_s=timeout_s)))
    return "".join(piece.content for piece in pieces)


# --- chunks


def test_pieces() -> None:
    reader = ChunkReader()

    def read(chunk: object) -> Piece:
        return reader.read(json.dumps(chunk).encode())

    assert read({"choices": []}) == Piece()
    assert read({"choices": None, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}) == Piece(
        usage=ChatUsage(3, 2)
    )
    other = {"choices": [{"index": 1, "delta": {"content": "other"}}]}
    assert read(other) == Piece()
    for name in ("reasoning_content", "reasoning"):
        assert read({"choices": [{"delta": {name: "hm", "content": None}}]}) == Piece(reasoning="hm")
    assert not reader.finished
    assert read({"choices": [{"message": {"content": "all"}, "finish_reason": "stop"}]}) == Piece(
        content="all", finish="stop"
    )
    assert reader.finished


def test_calls_are_numbered_where_a_server_does_not() -> None:
    reader = ChunkReader()
    calls = [{"id": "a", "function": {"name": "f", "arguments": "{"}}, {"function": {"arguments": "}"}}]
    calls += [{"id": "b", "function": {"name": "g"}}, {"index": 7, "function": None}]
    piece = reader.read(json.dumps({"choices": [{"delta": {"tool_calls": calls}}]}).encode())
    assert piece.calls == (
        CallPiece(0, "a", "f", "{"),
        CallPiece(0, "", "", "}"),
        CallPiece(1, "b", "g"),
        CallPiece(7),
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "invalid JSON: {"),
        (b"[" * 100_000, "invalid JSON"),
        (b"[]", "invalid chat chunk"),
        (b'{"choices": [{"delta": {"content": 3}}]}', "invalid chat chunk"),
        (b'{"error": {"message": "engine\\n died", "code": 500}}', "server error: engine died"),
        (b'{"error": "plain"}', "server error: plain"),
        (b'{"object": "error", "message": "old"}', "server error: old"),
        (b'{"error": {"odd": 1}}', r'server error: \{"error": \{"odd": 1\}\}'),
    ],
)
def test_what_is_no_chunk(data: bytes, message: str) -> None:
    with pytest.raises(KvoltError, match=message):
        ChunkReader().read(data)


def test_broken_text_does_no_harm() -> None:
    assert (
        ChunkReader().read(b'{"choices": [{"delta": {"content": "\\ud83d\xff"}}]}').content == "\ud83d\ufffd"
    )
    assert one_line("a\x1b[31m\r\n b\u202e") == "a [31m b"
    assert len(one_line("x" * 10_000)) == 500


# --- over the wire


def test_an_answer_comes_whole_however_it_is_split() -> None:
    text = "héllo wörld 🎉"
    stream = b"".join([event(text), event(finish="stop"), usage(1, 2), DONE])
    scripts = [Script([stream[i : i + size] for i in range(0, len(stream), size)]) for size in (1, 3, 4096)]
    with Server(*scripts) as server:
        for _ in scripts:
            pieces = asyncio.run(pieces_of(client_of(server.url)))
            assert pieces == [Piece(content=text), Piece(finish="stop"), Piece(usage=ChatUsage(1, 2))]
        assert server.asked[0].body == BODY


def test_the_content_type_has_no_case() -> None:
    with Server(Script([event("a"), event(finish="stop"), DONE], content_type="Text/Event-Stream")) as server:
        assert text_of(server) == "a"


async def test_pieces_come_as_they_are_sent() -> None:
    hold = threading.Event()
    script = Script([event("first"), hold, event("second"), event(finish="stop"), DONE])
    with Server(script) as server:
        async with aclosing(client_of(server.url).stream(BODY)) as pieces:
            assert (await anext(pieces)).content == "first"
            hold.set()
            assert (await anext(pieces)).content == "second"


async def test_closing_ends_the_request() -> None:
    with Server(Script([event("first"), threading.Event()])) as server:
        async with aclosing(client_of(server.url).stream(BODY)) as pieces:
            await anext(pieces)
        assert await asyncio.to_thread(server.gone.wait, 5)


@pytest.mark.parametrize(
    ("given_path", "asked_path"),
    [
        ("", "/v1"),
        ("/", "/v1"),
        ("/v1", "/v1"),
        ("/v1/", "/v1"),
        ("/v1/chat/completions", "/v1"),
        ("/openai", "/openai/v1"),
        ("/api/paas/v4/", "/api/paas/v4"),
        ("/v1beta/openai/", "/v1beta/openai"),
    ],
)
def test_base_urls(given_path: str, asked_path: str) -> None:
    with Server(models=["a", "b"]) as server:
        for scheme in ("http://", ""):
            client = client_of(f"{scheme}{server.address}{given_path}")
            assert client.url == f"{server.url}{asked_path}"
            assert models_of(client) == ["a", "b"]
        assert {asked.path for asked in server.asked} == {f"{asked_path}/models"}


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://",
        "ftp://a",
        "http://a b",
        "http://h:99999",
        "http://h:0",
        "http://[::1",
        "http://ü",
        "h?a=1",
    ],
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        client_of(url)
    assert "http://HOST:PORT" in str(caught.value.fields["remedy"])


def test_a_password_in_the_url_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        client_of("http://me:secret@host")
    assert "secret" not in repr(caught.value)


def test_the_key() -> None:
    with Server() as server:
        models_of(client_of(server.url))
        models_of(client_of(server.url, " k-1\n"))
        assert [asked.headers.get("authorization") for asked in server.asked] == [None, "Bearer k-1"]
    with pytest.raises(ConfigError) as caught:
        client_of(server.url, "se\ncret")
    assert "cret" not in caught.value.message


def test_a_server_that_does_not_stream() -> None:
    body = json.dumps({"choices": [{"message": {"content": "all"}, "finish_reason": "stop"}]}).encode()
    with Server(Script([body], content_type="application/json; charset=utf-8")) as server:
        assert text_of(server) == "all"


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (400, InvalidRequest, "the server responded 400: it is wrong"),
        (401, InvalidRequest, "401"),
        (404, NotFound, "404"),
        (408, DeadlineExceeded, "408"),
        (429, Overloaded, r"429: it is wrong \(try again in 3 s\)"),
        (500, KvoltError, "500"),
        (501, Unsupported, "501"),
        (503, Unavailable, "503"),
        (302, InvalidRequest, "the server redirects to http://elsewhere"),
    ],
)
def test_refusals(status: int, kind: type[KvoltError], message: str) -> None:
    body = json.dumps({"error": {"message": "it is\nwrong", "type": "t"}}).encode()
    script = refusal(status, body, retry_after="3", location="http://elsewhere")
    with Server(script) as server, pytest.raises(kind, match=message) as caught:
        text_of(server)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"detail": "no"}', "no"),
        (b"<h1>Bad\x1b</h1>", "<h1>Bad </h1>"),
        (b"", "Bad Gateway"),
        (b'"x"', "x"),
    ],
)
def test_refusals_in_other_words(body: bytes, said: str) -> None:
    with Server(refusal(502, body)) as server, pytest.raises(KvoltError) as caught:
        text_of(server)
    assert caught.value.message == f"the server responded 502: {said}"


@pytest.mark.parametrize(
    "script",
    [
        Script([event("half")]),
        Script([event("half")], breaks_off=True),
        Script([event("half")[:-5]], breaks_off=True),
    ],
    ids=["no end mark", "connection lost", "within an event"],
)
def test_an_answer_that_breaks_off(script: Script) -> None:
    with Server(script) as server, pytest.raises(WorkerLost, match="the answer was cut off"):
        text_of(server)


def test_a_finished_answer_needs_no_end_mark() -> None:
    with Server(Script([event("all"), event(finish="stop")])) as server:
        assert text_of(server) == "all"


def test_silence_has_an_end() -> None:
    with (
        Server(Script([event("first"), threading.Event()])) as server,
        pytest.raises(DeadlineExceeded, match=r"for 0.05 s"),
    ):
        text_of(server, timeout_s=0.05)


def test_nobody_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(ConnectFailed, match=f"cannot connect to 127.0.0.1:{port}: connection refused"):
            models_of(client_of(f"127.0.0.1:{port}"))


def test_somebody_else_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def babble() -> None:
            for answer in (b"SSH-2.0-OpenSSH\r\n\r\n", b""):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=babble)
        thread.start()
        client = client_of(f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ProtocolError, match="is not an OpenAI-compatible server: invalid HTTP response"):
            models_of(client)
        with pytest.raises(WorkerLost, match="closed the connection"):
            models_of(client)
        thread.join()
    with Server() as server:
        server.models = b'{"models": []}'
        with pytest.raises(ProtocolError, match="invalid model list"):
            models_of(client_of(server.url))


def test_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(whole("a", "b"), tls=True) as server:
        client = client_of(f"https://{server.address}/v1")
        with pytest.raises(ConnectFailed, match=r"certificate .* is not trusted") as caught:
            models_of(client)
        assert "SSL_CERT_FILE" in str(caught.value.fields["remedy"])
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        assert models_of(client) == ["m"]
        assert [piece.content for piece in asyncio.run(pieces_of(client))][1:3] == ["a", "b"]
    with Server() as server, pytest.raises(ConnectFailed, match="does not speak TLS") as caught:
        models_of(client_of(f"https://{server.address}"))
    assert caught.value.fields["remedy"] == "try http://"


def test_names_of_models_do_not_include_aliases() -> None:
    listed = [{"id": "chat"}, {"id": "chat-fast", "alias_of": "chat"}, {"id": "b", "alias_of": "gone"}]
    listed += [{"id": "c", "alias_of": ["chat"]}, {"id": "sql", "root": "chat", "parent": "chat"}]
    with Server() as server:
        server.models = json.dumps({"data": listed}).encode()
        assert models_of(client_of(server.url)) == ["chat", "b", "c", "sql"]
