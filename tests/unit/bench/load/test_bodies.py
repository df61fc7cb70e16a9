"""Requests as servers get them."""

from __future__ import annotations

import json
from typing import Any

from kvolt.bench.load.bodies import Endpoint, RequestMaker
from kvolt.bench.load.workloads import Message, Prompt

ASK = Prompt(
    (Message("system", [1, 2]), Message("user", [3]), Message("assistant", "so"), Message("user", [4])), 5, 6
)


def sent(
    endpoint: Endpoint, fields: dict[str, Any] | None = None, ignore_eos: bool = True
) -> tuple[str, Any]:
    path, body = RequestMaker("m", endpoint, fields or {}, ignore_eos).request(ASK)
    return path, json.loads(body)


def test_a_chat() -> None:
    path, body = sent(Endpoint.CHAT)
    assert path == "/chat/completions"
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
    path, body = sent(Endpoint.COMPLETIONS)
    assert path == "/completions"
    assert len(body["prompt"].split()) == 5
    assert sent(Endpoint.TOKENS)[1]["prompt"] == [1, 2, 3, 4]


def test_fields_of_the_user_win() -> None:
    _, body = sent(Endpoint.CHAT, {"max_tokens": 1, "temperature": 0}, ignore_eos=False)
    assert (body["max_tokens"], body["temperature"], "ignore_eos" in body) == (1, 0, False)
