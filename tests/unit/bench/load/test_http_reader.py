"""HTTP responses in any pieces are the same responses."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.bench.load.http_reader import MAX_HEAD_BYTES, ResponseReader
from kvolt.core.errors import ProtocolError

BODY_PARTS = st.lists(st.binary(min_size=1, max_size=40), max_size=8)
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges) if begin < end]


def read(pieces: list[bytes]) -> tuple[ResponseReader, bytes]:
    reader = ResponseReader()
    return reader, b"".join(part for piece in pieces for part in reader.feed(piece))


def chunked(parts: list[bytes]) -> bytes:
    return (
        CHUNKED + b"".join(b"%X;x=1\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\nA: b\r\n\r\n"
    )


@given(BODY_PARTS, st.lists(st.integers(0, 10_000), max_size=12))
def test_chunks_in_any_pieces(parts: list[bytes], cuts: list[int]) -> None:
    reader, body = read(in_pieces(chunked(parts), cuts))
    assert body == b"".join(parts)
    assert reader.done
    assert reader.reusable
    assert reader.status == 200


@given(BODY_PARTS, st.lists(st.integers(0, 10_000), max_size=12))
def test_a_length_in_any_pieces(parts: list[bytes], cuts: list[int]) -> None:
    body = b"".join(parts)
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 No\r\nX: y\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader, found = read(in_pieces(head + body, cuts))
    assert (found, reader.done, reader.status, reader.headers[b"x"]) == (body, True, 404, b"y")


@given(BODY_PARTS)
def test_one_read_per_chunk_as_servers_write_them(parts: list[bytes]) -> None:
    pieces = [CHUNKED, *(b"%x\r\n%s\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]
    reader = ResponseReader()
    assert [reader.feed(piece) for piece in pieces] == [[], *([part] for part in parts), []]
    assert reader.done


@given(
    st.lists(st.binary(min_size=1, max_size=40) | st.just(b"x" * 5000), max_size=8),
    st.booleans(),
    st.lists(st.integers(0, 50_000), max_size=6),
)
def test_many_chunks_in_one_read(parts: list[bytes], capitals: bool, cuts: list[int]) -> None:
    line = b"%X\r\n%s\r\n" if capitals else b"%x\r\n%s\r\n"
    data = CHUNKED + b"".join(line % (len(part), part) for part in parts) + b"0\r\n\r\n"
    reader = ResponseReader()
    assert reader.feed(data) == parts
    assert reader.done
    in_any_cut, body = read(in_pieces(data, cuts))
    assert (body, in_any_cut.done) == (b"".join(parts), True)


def test_after_a_chunk_that_was_cut_the_others_are_whole() -> None:
    reader = ResponseReader()
    assert reader.feed(CHUNKED + b"3\r\nab") == [b"ab"]
    assert reader.feed(b"c\r\n2\r\nde\r\n2\r\nfg\r\n1") == [b"c", b"de", b"fg"]
    assert reader.feed(b"\r\nh\r\n0\r\n\r\n") == [b"h"]
    assert reader.done


def test_a_chunk_whose_text_looks_like_the_end() -> None:
    text = b"a\r\n0\r\n\r\n"
    reader, body = read([CHUNKED, b"8\r\n" + text + b"\r\n", b"0\r\n\r\n"])
    assert body == text
    assert reader.done


def test_without_a_length_the_end_is_the_connections() -> None:
    reader, body = read([b"HTTP/1.1 200 OK\r\n\r\n", b"all ", b"of it"])
    assert (body, reader.done, reader.reusable) == (b"all of it", False, False)
    reader.end()
    assert reader.done


@pytest.mark.parametrize(
    ("head", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n", True),
    ],
)
def test_whether_the_connection_can_be_used_again(head: bytes, reusable: bool) -> None:
    reader, _ = read([head + b"Content-Length: 0\r\n\r\n"])
    assert reader.done
    assert reader.reusable is reusable


def test_a_second_response_begins_anew() -> None:
    reader, _ = read([chunked([b"x"])])
    reader.begin()
    assert b"".join(reader.feed(b"HTTP/1.1 500 E\r\nContent-Length: 2\r\n\r\nno")) == b"no"
    assert (reader.status, reader.done) == (500, True)


def test_no_body_where_there_is_none() -> None:
    assert read([b"HTTP/1.1 204 None\r\n\r\n"])[0].done


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
        b"x" * (MAX_HEAD_BYTES + 1),
        CHUNKED + b"0\r\n\r\nmore",
    ],
)
def test_what_is_no_http_is_an_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        read([data])


def test_the_end_in_the_middle_is_an_error() -> None:
    reader, _ = read([CHUNKED + b"5\r\nab"])
    with pytest.raises(ProtocolError):
        reader.end()
