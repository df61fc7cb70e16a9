"""Compressed request bodies: served like others, never expanded beyond the limit, damaged ones refused."""

from __future__ import annotations

import gzip
import json
import threading
import tracemalloc
import zlib
from typing import Any

import pytest
from tests.unit.engines.lab import MODEL, Frontend, Lab, RunningWorker
from tests.unit.frontend.serving import served

from kvolt.core.errors import InvalidRequest, PayloadTooLarge
from kvolt.frontend import request_body
from kvolt.frontend.off_loop import OffLoop
from kvolt.frontend.openai_api.errors import UnsupportedMediaType
from kvolt.frontend.request_body import BodyParser
from kvolt.runtime.clock import ThreadBlocking
from kvolt.runtime.http.protocol import HttpLimits, HttpRequest

MIB = 1 << 20


async def parsed(body: bytes, encoding: str | None = "gzip", limit: int = MIB, **headers: str) -> bytes:
    """The body as a parser gets it."""
    parser = BodyParser(OffLoop(ThreadBlocking(1)), limit)
    if encoding is not None:
        headers["content-encoding"] = encoding
    request = HttpRequest("POST", "/", headers, body)
    result = await parser.parse(request, lambda whole: whole)
    assert request.body == b"", "the request keeps its body"
    return result


@pytest.mark.parametrize("size", [0, 9, 65_536, 65_537, MIB])
@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("X-GZip", gzip.compress), ("deflate", zlib.compress)]
)
async def test_bodies_up_to_the_limit_arrive_whole(encoding: str, compress: Any, size: int) -> None:
    body = bytes(number * 7 % 251 for number in range(size))
    assert await parsed(compress(body), encoding) == body


@pytest.mark.parametrize("encoding", [None, "identity", "Identity"])
async def test_other_bodies_are_as_they_were(encoding: str | None) -> None:
    assert await parsed(b"{}", encoding) == b"{}"


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "gzip, identity", "x" * 30_000])
async def test_unknown_encodings_are_refused_by_name(encoding: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="gzip or as deflate") as caught:
        await parsed(gzip.compress(b"{}"), encoding)
    assert len(caught.value.message) < 300


async def test_the_content_type_counts_before_the_encoding() -> None:
    with pytest.raises(UnsupportedMediaType, match="content type"):
        await parsed(gzip.compress(b"{}"), **{"content-type": "text/plain"})


async def test_a_byte_over_the_limit_is_too_much() -> None:
    assert len(await parsed(gzip.compress(bytes(MIB)))) == MIB
    with pytest.raises(PayloadTooLarge, match=f"{MIB} bytes when it is expanded"):
        await parsed(gzip.compress(bytes(MIB + 1)))


async def test_a_bomb_is_not_expanded() -> None:
    bomb = gzip.compress(bytes(256 * MIB))
    tracemalloc.start()
    try:
        with pytest.raises(PayloadTooLarge):
            await parsed(bomb)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * MIB


async def test_large_compressed_bodies_are_expanded_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty blocks cost time and expand to nothing."""
    threads: list[int] = []
    expand = request_body._expand

    def recorded(body: bytes, window_bits: int, limit: int) -> bytes | None:
        threads.append(threading.get_ident())
        return expand(body, window_bits, limit)

    monkeypatch.setattr(request_body, "_expand", recorded)
    empty_stored_block = b"\0\0\0\xff\xff"
    nothing = zlib.compress(b"")
    body = nothing[:2] + empty_stored_block * 20_000 + nothing[2:]
    assert await parsed(body, "deflate") == b""
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("size", [9, 200_000])
@pytest.mark.parametrize(
    "damage",
    [
        lambda body: body[:-1],
        lambda body: body[: len(body) // 2],
        lambda body: body[:12] + bytes([body[12] ^ 0xFF]) + body[13:],
        lambda body: body[:-8] + bytes(8),
        lambda body: body + b"more",
        lambda body: body + gzip.compress(b"more"),
        lambda body: b"{}",
        lambda body: b"",
    ],
    ids=["cut", "half", "flipped", "checksum", "more", "two members", "plain", "empty"],
)
async def test_damaged_bodies_are_invalid_requests(damage: Any, size: int) -> None:
    body = bytes(number * number % 241 for number in range(size))
    with pytest.raises(InvalidRequest) as caught:
        await parsed(damage(gzip.compress(body)))
    assert not isinstance(caught.value, PayloadTooLarge)


def test_all_routes_take_compressed_bodies() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi " * 400}], "max_tokens": 3}
        bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": chat,
            "/v1/completions": {"model": MODEL, "prompt": "hi", "max_tokens": 3},
            "/tokenize": {"model": MODEL, "prompt": "hi"},
            "/detokenize": {"model": MODEL, "tokens": [70]},
            "/busy_threshold": {"model": MODEL},
        }
        for path, fields in bodies.items():
            packed = gzip.compress(json.dumps(fields).encode())
            answer = await edge.ask(path, packed, {"content-encoding": "gzip"})
            assert answer.status == 200, (path, answer.body)
        refused = await edge.ask("/v1/completions", b"no gzip", {"content-encoding": "gzip"})
        assert (refused.status, refused.json["error"]["type"]) == (400, "invalid_request_error")
        refused = await edge.ask("/v1/completions", b"{}", {"content-encoding": "br"})
        assert refused.status == 415
        bomb = await edge.ask("/v1/completions", gzip.compress(bytes(3 * MIB)), {"content-encoding": "gzip"})
        assert bomb.status == 413
        assert (await edge.chat(max_tokens=1)).status == 200

    served(body, limits=HttpLimits(max_body_bytes=2 * MIB))
