"""What an answer's events say, decoded or recognised by their bytes."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.runtime.http.test_client import in_pieces

from kvolt.bench.load import answer as answer_module
from kvolt.bench.load.answer import AnswerReader, error_message
from kvolt.core.errors import ProtocolError


def chat(text: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def completion(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}


def encode(chunk: dict[str, Any], spaced: bool = False, ascii_only: bool = False) -> bytes:
    return json.dumps(chunk, separators=None if spaced else (",", ":"), ensure_ascii=ascii_only).encode()


def sse(event: bytes, line_end: bytes = b"\n") -> bytes:
    return b"data: " + event + 2 * line_end


def new_reader(keep_text: bool = False) -> tuple[AnswerReader, list[float]]:
    gaps: list[float] = []

    def on_gap(gap: float, times: int) -> None:
        gaps.extend([gap] * times)

    return AnswerReader(on_gap, keep_text), gaps


def read(
    events: list[bytes], keep_text: bool = False, line_end: bytes = b"\n"
) -> tuple[AnswerReader, list[float]]:
    """An event each second, each a piece of its own."""
    reader, gaps = new_reader(keep_text)
    for number, event in enumerate(events):
        reader.feed([sse(event, line_end)], float(number))
    return reader, gaps


TEXT = st.text(st.characters(codec="utf-8"), max_size=12)


@given(st.lists(TEXT, max_size=12), st.booleans(), st.booleans(), st.booleans())
def test_events_with_text_are_counted_whatever_the_text(
    texts: list[str], chats: bool, spaced: bool, ascii_only: bool
) -> None:
    make = chat if chats else completion
    events = [encode(make(text), spaced, ascii_only) for text in texts]
    times = [float(at) for at, text in enumerate(texts) if text]
    reader, gaps = read(events)
    assert reader.num_events == len(times)
    assert gaps == [after - before for before, after in pairwise(times)]
    if times:
        assert (reader.first_s, reader.last_s) == (times[0], times[-1])
        assert reader.max_gap_s == max(gaps, default=0.0)
    if len(times) > 1:
        assert reader.second_s == times[1]
    kept, _ = read(events, keep_text=True)
    assert kept.num_events == len(times)
    assert kept.text == "".join(texts)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was decoded."""
    found: list[bytes] = []
    real = answer_module._decode
    monkeypatch.setattr(answer_module, "_decode", lambda data: found.append(data) or real(data))
    return found


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_most_events_are_not_decoded(decoded: list[bytes], line_end: bytes) -> None:
    role = {
        "id": "x",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}],
    }
    last = chat("", "stop")
    usage = {"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 100}}
    events = [role, *(chat(f' "w{number}\n') for number in range(100)), last, usage]
    reader, _ = read([*(encode(event) for event in events), b"[DONE]"], line_end=line_end)
    assert reader.num_events == 100
    assert len(decoded) == 4  # the role, the first token, the finish, the usage
    assert reader.usage is not None
    assert (reader.usage.completion_tokens, reader.finish_reason, reader.done) == (100, "stop", True)


def test_events_that_come_together_have_no_time_between_them(decoded: list[bytes]) -> None:
    reader, gaps = new_reader()
    tokens = [sse(encode(chat(f"w{number}"))) for number in range(6)]
    reader.feed(tokens[:1], 1.0)
    reader.feed(tokens[1:4], 3.0)
    reader.feed(tokens[4:], 4.0)
    assert gaps == [2.0, 0.0, 0.0, 1.0, 0.0]
    assert (reader.num_events, reader.first_s, reader.second_s, reader.last_s) == (6, 1.0, 3.0, 4.0)
    assert (reader.max_gap_s, len(decoded)) == (2.0, 1)


def test_the_first_and_the_second_may_come_together() -> None:
    reader, gaps = new_reader()
    token = sse(encode(chat("a")))
    reader.feed([token, token, token], 2.0)
    assert (gaps, reader.first_s, reader.second_s) == ([0.0, 0.0], 2.0, 2.0)


def test_several_events_in_one_piece_are_several(decoded: list[bytes]) -> None:
    reader, gaps = new_reader()
    token = sse(encode(chat("a")))
    reader.feed([token], 0.0)
    reader.feed([token + token], 1.0)
    assert (reader.num_events, gaps, len(decoded)) == (3, [1.0, 0.0], 1)


@given(st.lists(st.integers(0, 2000), max_size=8))
def test_events_in_any_pieces(cuts: list[int]) -> None:
    events = [chat("a"), chat("b c"), chat(""), chat('"'), chat("d", "stop")]
    body = b"".join(sse(encode(event)) for event in events) + b"data: [DONE]"
    reader, _ = new_reader()
    for piece in in_pieces(body, cuts):
        reader.feed([piece], 1.0)
    reader.end(2.0)
    assert (reader.num_events, reader.finish_reason, reader.done) == (4, "stop", True)


def test_a_server_that_changes_its_events_is_still_understood() -> None:
    events = [encode(chat("a", created=number // 3)) for number in range(12)]
    reader, _ = read(events)
    assert reader.num_events == 12


def test_a_finish_with_text_counts_and_is_the_finish() -> None:
    reader, gaps = read([encode(chat("a")), encode(chat("b")), encode(chat("c", "length"))])
    assert (reader.num_events, reader.finish_reason, reader.is_complete) == (3, "length", True)
    assert gaps == [1.0, 1.0]


def test_thoughts_and_tool_calls_are_tokens_too_but_no_text() -> None:
    thought = {"choices": [{"delta": {"reasoning_content": "hm"}}]}
    call = {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}]}
    events = [encode(thought), encode(thought), encode(call), encode(call), encode(chat("a"))]
    assert read(events)[0].num_events == 5
    assert read(events, keep_text=True)[0].text == "a"


def test_an_error_in_the_stream_is_kept() -> None:
    reader, _ = read([encode(chat("a")), encode({"error": {"message": "no  room", "code": 500}})])
    assert reader.error == "no room"
    assert not reader.is_complete


def test_what_is_no_chunk_breaks_the_protocol() -> None:
    for data in (b"{", b"[]", b'{"choices":[{"delta":{"content":3}}]}'):
        with pytest.raises(ProtocolError):
            read([data])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error":{"message":"a\\nb"}}', "a b"),
        (b'{"error":"plain"}', "plain"),
        (b'{"message":"top"}', "top"),
        (b"<html>\n no", "<html> no"),
        (b"\xff", "\ufffd"),
        (b"", ""),
    ],
)
def test_the_message_of_an_error(body: bytes, message: str) -> None:
    assert error_message(body) == message
