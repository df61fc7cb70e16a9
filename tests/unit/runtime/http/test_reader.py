"""Bytes to requests with no socket: the parser's limits, and any input at all."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvolt.runtime.http.protocol import HttpLimits
from kvolt.runtime.http.reader import BodyBudget, ReadPhase, RequestReader


def test_phase_names_what_comes_next() -> None:
    reader = RequestReader(HttpLimits(), "")
    assert reader.phase is ReadPhase.IDLE
    reader.feed(b"POST / HTTP/1.1\r\n")
    assert reader.phase is ReadPhase.HEAD
    reader.feed(b"content-length: 2\r\n\r\n")
    assert reader.phase is ReadPhase.BODY
    reader.feed(b"ab")
    assert reader.phase is ReadPhase.IDLE


def test_endless_trailers_and_chunk_extensions_are_refused() -> None:
    for start in (b"0\r\nt: ", b"3;x="):
        reader = RequestReader(HttpLimits(max_header_bytes=2000), "")
        reader.feed(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        reader.feed(start)
        for _ in range(30):
            reader.feed(b"a" * 100)
        assert reader.refusal is not None
        assert reader.refusal.status == 431


def test_zeros_before_a_length_are_only_zeros() -> None:
    reader = RequestReader(HttpLimits(max_body_bytes=5), "")
    reader.feed(b"POST / HTTP/1.1\r\ncontent-length: " + b"0" * 5000 + b"3\r\n\r\nabc")
    assert [request.body for request in reader.requests] == [b"abc"]
    reader.feed(b"POST / HTTP/1.1\r\ncontent-length: " + b"0" * 5000 + b"6\r\n\r\nabc")
    assert reader.refusal is not None
    assert reader.refusal.status == 413


def test_very_many_very_small_chunks_are_refused() -> None:
    head = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
    reader = RequestReader(HttpLimits(), "")
    reader.feed(head + b"1\r\nx\r\n" * 16_000 + b"0\r\n\r\n")
    reader.feed(head + (b"40\r\n" + b"x" * 64 + b"\r\n") * 20_000 + b"0\r\n\r\n")
    assert [len(request.body) for request in reader.requests] == [16_000, 64 * 20_000]
    reader.feed(head + b"1\r\nx\r\n" * 17_000)
    assert reader.refusal is not None
    assert reader.refusal.status == 400


def test_what_cannot_be_read_safely_is_refused_with_the_headers() -> None:
    for line, status in (
        (b"transfer-encoding: gzip, chunked", 501),
        (b"host: b", 400),
        (b"host: a, b", 400),
    ):
        reader = RequestReader(HttpLimits(), "")
        reader.feed(b"POST / HTTP/1.1\r\nhost: a\r\n" + line + b"\r\n\r\n")
        assert reader.refusal is not None, line
        assert (reader.refusal.status, reader.done, list(reader.requests)) == (status, True, [])


def test_all_bodies_together_are_bounded() -> None:
    limits, budget = HttpLimits(max_buffered_bytes=100), BodyBudget(100)
    head = b"POST / HTTP/1.1\r\ncontent-length: 60\r\n\r\n"
    first, second = RequestReader(limits, "", budget), RequestReader(limits, "", budget)
    first.feed(head + b"x" * 59)
    second.feed(head + b"x" * 41)
    assert budget.available_bytes == 0
    third = RequestReader(limits, "", budget)
    third.feed(head + b"x")
    assert third.refusal is not None
    assert (third.refusal.status, third.refusal.headers["retry-after"]) == (503, "1")
    second.release()
    first.feed(b"x" + head + b"x" * 40)  # complete, and the next one behind it
    assert budget.available_bytes == 0
    assert first.next_request().body == b"x" * 60
    assert budget.available_bytes == 60
    first.release()
    third.release()
    assert budget.available_bytes == 100


METHODS = [b"GET ", b"POST ", b"HEAD ", b"CONNECT ", b"PRI ", b"OPTIONS "]
PIECES = st.one_of(
    st.sampled_from(
        [
            *METHODS,
            b"/ HTTP/1.1\r\n",
            b"* HTTP/1.0\r\n",
            b"http://h/p?q HTTP/1.1\r\n",
            b"content-length: 5\r\n",
            b"transfer-encoding: chunked\r\n",
            b"connection: upgrade\r\nupgrade: x\r\n",
            b"connection: close\r\n",
            b"expect: 100-continue\r\n",
            b"\r\n",
            b"5\r\nhello\r\n",
            b"0\r\n\r\n",
        ]
    ),
    st.binary(max_size=40),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=12))
def test_the_reader_takes_any_bytes(pieces: list[bytes]) -> None:
    """Every input ends as requests, a refusal, or a wait that has a deadline; cutting it changes nothing."""
    limits = HttpLimits(max_body_bytes=20, max_header_bytes=200)
    budget = BodyBudget(limits.max_buffered_bytes)
    whole = RequestReader(limits, "", budget)
    whole.feed(b"".join(pieces))
    cut = RequestReader(limits, "")
    for byte in b"".join(pieces):
        cut.feed(bytes([byte]))
    assert _facts(whole) == _facts(cut)
    for request in whole.requests:
        assert len(request.body) <= 20
    if whole.refusal is not None:
        assert 400 <= whole.refusal.status <= 505
        assert whole.done
    whole.release()
    assert budget.available_bytes == limits.max_buffered_bytes


def _facts(reader: RequestReader) -> object:
    requests = [(r.method, r.path, r.query_string, r.headers, r.body, r.keep_alive) for r in reader.requests]
    return requests, reader.done, reader.refusal is not None, reader.done or reader.phase
