"""Bodies of too many parts are refused before they are decoded; what stands in strings is text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.openai_api import structure
from kvolt.frontend.openai_api.checks import parse_chat, parse_completion
from kvolt.frontend.openai_api.structure import check_structure, not_utf8_at

HEAD = b'{"model":"m","messages":[{"role":"user","content":"hi"}]'
MIB = 1024 * 1024


def refusal(body: bytes, check: Callable[[bytes], Any] = check_structure) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check(body)
    return caught.value


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        (b"[]," * 600_000, "more than 100000 lists and objects"),
        (b"{" + b'"a":1,' * 201_000 + b'"a":1},', "more than 100000 names"),
        (b"1," * 1_300_000, "more than 1100000 values"),
        (b'"",' * 1_300_000, "more than 1100000 values"),
    ],
    ids=["lists", "names", "numbers", "strings"],
)
def test_millions_of_parts_are_refused_before_they_are_decoded(inside: bytes, words: str) -> None:
    error = refusal(HEAD + b',"chat_template_kwargs":{"a":[' + inside + b"1]}}", parse_chat)
    assert words in error.message
    assert error.fields["param"] is None
    refusal(HEAD + b',"nobody_knows":[' + inside + b"1]}", parse_chat)


def test_a_prompt_of_a_million_ids_is_taken() -> None:
    body = b'{"model":"m","prompt":[' + b"7," * 1_048_575 + b"7]}"
    assert len(parse_completion(body).request.prompt) == 1_048_576


@pytest.mark.parametrize("mark", [",", ":", "[", "{", '\\",', "\\\\,", '\\\\\\",', "😀,"])
def test_marks_in_texts_do_not_count(mark: str) -> None:
    text = mark.encode() * (1_400_000 // len(mark.encode())) * 2
    body = b'{"model":"m","prompt":"' + text + b'"}'
    check_structure(body)
    assert parse_completion(body).request.prompt


def calls(*arguments: str) -> bytes:
    made = [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": each}} for each in arguments
    ]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": made}]
    return json.dumps({"model": "m", "messages": messages}).encode()


def test_the_arguments_of_all_tool_calls_count_together() -> None:
    many = '{"a": [' + "{},      " * 30_000 + "1]}"
    parse_chat(calls(many, many, many))
    error = refusal(calls(many, many, '"', many, many), parse_chat)
    assert "tool call arguments have more than 100000 lists" in error.message
    assert error.fields["param"] == "messages"
    text = json.dumps({"file": '{[,:"]}' * 100_000})
    parse_chat(calls(text, text))


values = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a,:[{}]"\\\n é'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a,:[{"\\'), inner),
)


@settings(max_examples=50, deadline=None)
@given(values, st.integers(1, 9))
def test_exactly_what_is_outside_of_strings_is_seen(value: object, slice_bytes: int) -> None:
    def without_texts(value: object) -> object:
        if isinstance(value, dict):
            return {str(number): without_texts(each) for number, each in enumerate(value.values())}
        if isinstance(value, list):
            return [without_texts(each) for each in value]
        return "" if isinstance(value, str) else value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(structure, "_SLICE_BYTES", slice_bytes)
        body = json.dumps(value, ensure_ascii=False).encode()
        seen = b"".join(structure._outside_strings(body))
    plain = json.dumps(without_texts(value)).encode()
    assert structure._marks(seen) == structure._marks(plain)


@pytest.mark.parametrize("bad", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xe2\x82", b"\xf5\x80\x80\x80"])
def test_a_field_that_is_skipped_must_be_utf8_too(bad: bytes) -> None:
    error = refusal(HEAD + b',"other":{"a":["' + bad + b'"]}}', parse_chat)
    assert "not valid UTF-8" in error.message
    assert error.fields["param"] == "other.a[0]"


def test_utf8_is_checked_across_slices() -> None:
    for shift in range(4):
        text = b"x" * shift + "😀é€".encode() * 20_000
        assert not_utf8_at(text) is None
        assert not_utf8_at(text[:-1]) == len(text) - 3
        assert not_utf8_at(text + b"\xff" + text) == len(text)


def test_escapes_are_bounded_and_a_body_of_characters_by_number_passes() -> None:
    assert "more than 3000000 backslashes" in refusal(b'{"a":"' + b"\\n" * 3_000_001 + b'"}').message
    check_structure(b'{"a":"' + b"\\u6c34" * (16 * 1024 * 1024 // 6) + b'"}')
