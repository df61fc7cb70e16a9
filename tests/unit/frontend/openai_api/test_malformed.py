"""Bodies that are no request: always a refusal with plain words, and with the field where it can be found."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.openai_api.checks import parse_chat, parse_completion

HEAD = b'{"model":"m","messages":[{"role":"user","content":"hi"}]'


def refusal(body: bytes, parse: Callable[[bytes], Any] = parse_chat) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    return caught.value


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        (b"", "the body is empty", None),
        (b" \n ", "the body is empty", None),
        (b"null", "must be a JSON object: Expected an object, got null", None),
        (b"[]", "must be a JSON object", None),
        (b'"text"', "must be a JSON object", None),
        (b"{", "unexpected end of JSON", None),
        (b"nul", "unexpected end of JSON", None),
        (b'{"model":"m",}', "trailing comma", None),
        (HEAD + b"} x", "trailing characters", None),
        (HEAD, "unexpected end of JSON", "messages"),
        (
            b'{"model":"m","messages":[{"role":"user","content":"hi',
            "unexpected end of JSON",
            "messages[0].content",
        ),
        (b'{"model":"m","messages":[{"role":"user"},{"role":', "content is required", "messages[0].content"),
        (HEAD + b',"temperature":NaN}', "invalid character", "temperature"),
        (HEAD + b',"temperature":1e999}', "out of range", "temperature"),
        (HEAD + b',"seed":' + b"9" * 5000 + b"}", "out of range", "seed"),
        (HEAD + b',"n":1.0}', "expected an integer or null, got a decimal number", "n"),
        (HEAD + b',"n":"2"}', "got a string", "n"),
        (HEAD + b',"stop":"\x01"}', "malformed", "stop"),
        (b"\xef\xbb\xbf" + HEAD + b"}", "malformed", None),
        (b"\x00" * 100, "malformed", None),
    ],
    ids=lambda value: value[-30:] if isinstance(value, bytes) else None,
)
def test_words_and_place(body: bytes, words: str, param: str | None) -> None:
    error = refusal(body)
    assert words in error.message
    assert error.fields["param"] == param


@pytest.mark.parametrize(
    "escape",
    ["\\ud800", "\\udc00", "\\uDBFF", "\\ud800\\ud800", "\\udc00\\ud800", "\\ud800x", "x\\ud83d"],
)
@pytest.mark.parametrize("rest", ["", " and many more words after it", "\\n"])
def test_half_a_surrogate_pair_is_no_character(escape: str, rest: str) -> None:
    message = b'{"role":"user","content":"' + (escape + rest).encode() + b'"}'
    error = refusal(b'{"model":"m","messages":[' + message + b"]}")
    assert "unpaired surrogate" in error.message
    assert error.fields["param"] == "messages[0].content"


def test_whole_surrogate_pairs_are_characters() -> None:
    body = b'{"model":"m","prompt":"\\ud83d\\ude00 \\\\ud800"}'
    assert parse_completion(body).request.prompt == "😀 \\ud800"


@pytest.mark.parametrize("bad", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"a\x80"])
def test_bytes_that_are_not_utf8(bad: bytes) -> None:
    body = HEAD[:-1] + b',{"role":"user","content":"' + bad + b'"}]}'
    error = refusal(body)
    assert "not valid UTF-8" in error.message
    assert error.fields["param"] == "messages[1].content"
    assert "not valid UTF-8" in refusal(HEAD + b',"' + bad + b'":1}').message


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"a":'])
@pytest.mark.parametrize("name", ["prediction", "no_such_field", "chat_template_kwargs"])
def test_deep_nesting(opening: bytes, name: str) -> None:
    body = HEAD + b',"' + name.encode() + b'":' + opening * 40_000
    error = refusal(body)
    assert error.fields["param"] == name
    assert "nested too deeply" in error.message or "expected an object" in error.message


@pytest.mark.parametrize("name", ["chat_template_kwargs", "chat_template_args", "documents"])
def test_nesting_that_only_the_decoder_could_take(name: str) -> None:
    deep = '{"a":' * 100 + "1" + "}" * 100
    value = f"[{deep}]" if name == "documents" else deep
    error = refusal(HEAD + f',"{name}":{value}}}'.encode())
    assert "nested deeper than 64 levels" in error.message
    assert error.fields["param"] == name


@pytest.mark.parametrize("name", ["model", "n", "messages", "other"])
def test_a_field_given_twice(name: str) -> None:
    value = json.dumps({"model": "m", "n": 1, "messages": [{"role": "user", "content": "x"}]}.get(name, 0))
    field = f'"{name}":{value}'
    error = refusal(HEAD + f",{field},{field}}}".encode())
    assert "duplicate field" in error.message
    assert error.fields["param"] == name


def test_a_field_given_twice_in_a_long_body() -> None:
    error = refusal(b'{"model":"m","model":"m","prompt":"' + b"x" * 100_000 + b'"}', parse_completion)
    assert error.fields["param"] == "model"


def test_unknown_fields_are_named_fit_for_a_header() -> None:
    body = HEAD + ',"top_q":1,"é\\n":[{"a":1}],"messages2":"x"}'.encode()
    assert parse_chat(body).unknown == ("top_q", "\\xe9\\n", "messages2")
    long = {"x" * 1000: 1, **{f"field{number}": number for number in range(100)}}
    unknown = parse_chat(HEAD + b"," + json.dumps(long).encode()[1:]).unknown
    assert len(unknown) == 32
    assert unknown[0] == "x" * 64


def test_millions_of_fields_are_refused_early() -> None:
    body = HEAD + b"".join(b',"%d":0' % number for number in range(20_000)) + b"}"
    assert "more than 1024 fields" in refusal(body).message


def test_messages_about_long_values_stay_short() -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "x" * 10**6, "content": "a"}]}).encode()
    error = refusal(body)
    assert len(error.message) < 500
    assert "known: system, developer" in error.message
    deep = b'{"model":"m","messages":[{"role":"user","' + b"k" * 10**5 + b'":"\\ud800 some more words"}]}'
    error = refusal(deep)
    assert len(str(error.fields["param"])) <= 256


def test_a_mistake_far_behind_is_still_refused() -> None:
    body = b'{"model":"m","prompt":"' + b"x" * (2 * 1024 * 1024) + b'\\ud800 and so on"}'
    error = refusal(body, parse_completion)
    assert "surrogate" in error.message
    assert error.fields["param"] is None
    many = b'{"model":"m","prompt":[' + b"1," * 300_000 + b"x]}"
    assert "malformed" in refusal(many, parse_completion).message
