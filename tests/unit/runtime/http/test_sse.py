"""Events in any pieces are the same events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.runtime.http.test_client import in_pieces

from kvolt.core.errors import ProtocolError
from kvolt.runtime.http import sse
from kvolt.runtime.http.sse import EventReader

DATA = st.binary(max_size=30).map(lambda data: data.replace(b"\n", b"").replace(b"\r", b""))


@given(
    st.lists(
        st.tuples(DATA, st.sampled_from([b"data: ", b"data:", b": ping\ndata: ", b"event: x\ndata: "])),
        max_size=8,
    ),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 1000), max_size=12),
)
def test_any_pieces(events: list[tuple[bytes, bytes]], line_end: bytes, cuts: list[int]) -> None:
    text = b"".join(head + data + b"\n\n" for data, head in events).replace(b"\n", line_end)
    scanner = EventReader()
    found = [data for piece in in_pieces(text, cuts) for data in scanner.feed(piece)] + scanner.end()
    assert found == [data.removeprefix(b" ") if head == b"data:" else data for data, head in events]


def test_comments_are_no_events() -> None:
    scanner = EventReader()
    assert scanner.feed(b": keep-alive\n\n") == []
    assert scanner.feed(b"data: x\n\n: keep-alive\n\ndata: y\n\n") == [b"x", b"y"]


def test_data_of_several_lines_is_one_event() -> None:
    assert EventReader().feed(b"data: a\ndata: b\n\n") == [b"a\nb"]


def test_the_last_blank_line_may_be_missing() -> None:
    scanner = EventReader()
    assert scanner.feed(b"data: [DONE]\n") == []
    assert scanner.end() == [b"[DONE]"]
    assert scanner.end() == []


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    scanner = EventReader()
    with pytest.raises(ProtocolError):
        scanner.feed(b"data: " + b"x" * 101)
