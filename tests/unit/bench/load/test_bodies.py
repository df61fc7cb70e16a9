"""Requests as servers get them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvolt.bench.load.bodies import Endpoint, RequestMaker, Target, parse_target
from kvolt.bench.load.workloads import Message, Prompt
from kvolt.core.errors import ConfigError

TARGET = Target(host="h", port=8000, path="/v1", api_key="k")
ASK = Prompt(
    (Message("system", [1, 2]), Message("user", [3]), Message("assistant", "so"), Message("user", [4])), 5, 6
)


def sent(
    endpoint: Endpoint, fields: dict[str, Any] | None = None, ignore_eos: bool = True
) -> tuple[str, Any]:
    head, _, body = (
        RequestMaker(TARGET, "m", endpoint, fields or {}, ignore_eos).request(ASK).partition(b"\r\n\r\n")
    )
    assert f"Content-Length: {len(body)}" in head.decode().split("\r\n")
    return head.decode(), json.loads(body)


def test_a_chat() -> None:
    head, body = sent(Endpoint.CHAT)
    assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\nHost: h:8000\r\n")
    assert "Authorization: Bearer k" in head
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert [len(message["content"].split()) for message in body["messages"]] == [2, 1, 1, 1]
    assert {name: body[name] for name in ("model", "stream", "max_tokens", "ignore_eos")} == {
        "model": "m",
        "stream": True,
        "max_tokens": 6,
        "ignore_eos": True,
    }
    assert body["stream_options"] == {"include_usage": True}


def test_a_completion_of_text_or_of_tokens() -> None:
    head, body = sent(Endpoint.COMPLETIONS)
    assert head.startswith("POST /v1/completions ")
    assert len(body["prompt"].split()) == 5
    assert sent(Endpoint.TOKENS)[1]["prompt"] == [1, 2, 3, 4]


def test_fields_of_the_user_win() -> None:
    _, body = sent(Endpoint.CHAT, {"max_tokens": 1, "temperature": 0}, ignore_eos=False)
    assert (body["max_tokens"], body["temperature"], "ignore_eos" in body) == (1, 0, False)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://h/", "http://h:80/v1"),
        ("https://h/api/v2/", "https://h:443/api/v2"),
        ("http://h:1/v1/chat/completions", "http://h:1/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_urls(url: str, expected: str) -> None:
    assert parse_target(url).url == expected


@pytest.mark.parametrize(
    "url", ["", "ftp://h", "http://", "http://h:x", "http://h:0", "http://a b", "http://u@h"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_target(url)


def test_a_key_with_a_line_end_is_no_key() -> None:
    with pytest.raises(ConfigError):
        parse_target("h", "a\nHost: evil")
