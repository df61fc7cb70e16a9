"""What clients saw of answers whose worker was killed, read out of the bytes that came."""

from __future__ import annotations

import json

from benchmarks.frontend.migration import Reading, chat

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str, **more: object) -> bytes:
    body = {"choices": [{"delta": {"content": text}}], **more}
    return chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


def reading(*reads: tuple[float, bytes]) -> Reading:
    return Reading(chat("hello", 3), list(reads))


def test_a_whole_answer_and_its_worst_gap() -> None:
    last = event("c", usage={"completion_tokens": 3})
    done = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    torn = event("b")
    seen = reading(
        (1.0, HEAD + event("a")), (1.5, torn[:20]), (1.6, torn[20:]), (3.0, last), (3.1, done)
    ).seen()
    assert (seen.is_whole, seen.num_tokens, seen.text, seen.error) == (True, 3, "abc", None)
    assert seen.worst_gap_s == 1.5


def test_an_answer_that_broke_off() -> None:
    failure = chunk(b'data: {"error": {"message": "lost"}}\n\n') + b"0\r\n\r\n"
    seen = reading((1.0, HEAD + event("a")), (1.2, failure)).seen()
    assert not seen.is_whole
    assert "lost" in (seen.error or "")
    hung_up = reading((1.0, HEAD + event("a"))).seen()
    assert (hung_up.is_whole, hung_up.text, hung_up.error) == (False, "a", None)


def test_a_refusal() -> None:
    head = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 30\r\n\r\n"
    assert "busy" in (reading((1.0, head + b'{"error": {"message": "busy"}}')).seen().error or "")
    assert not reading((1.0, head)).seen().is_whole


def test_requests_are_whole_http_requests() -> None:
    head, _, body = chat("hello", 3).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body)["stream_options"] == {"include_usage": True}
