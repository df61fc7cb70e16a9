"""Bytes to requests with no socket: the parser's limits, and any input at all."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvolt.runtime.http_protocol import HttpLimits, Phase, RequestReader


def test_phase_names_what_comes_next() -> None:
    reader = RequestReader(HttpLimits(), "")
    assert reader.phase is Phase.IDLE
    reader.feed(b"POST / HTTP/1.1\r\n")
    assert reader.phase is Phase.HEAD
    reader.feed(b"content-length: 2\r\n\r\n")
    assert reader.phase is Phase.BODY
    reader.feed(b"ab")
    assert reader.phase is Phase.IDLE


def test_endless_trailers_and_chunk_extensions_are_refused() -> None:
    for start in (b"0\r\nt: ", b"3;x="):
        reader = RequestReader(HttpLimits(max_header_bytes=2000), "")
        reader.feed(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
        reader.feed(start)
        for _ in range(30):
            reader.feed(b"a" * 100)
        assert reader.refusal is not None
        assert reader.refusal.status == 431


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
    whole = RequestReader(limits, "")
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


def _facts(reader: RequestReader) -> object:
    requests = [(r.method, r.path, r.query_string, r.headers, r.body, r.keep_alive) for r in reader.requests]
    return requests, reader.done, reader.refusal is not None, reader.done or reader.phase
