"""How answers are worded: the fast way says the same as the slow one, and the schema's structs can read both."""

from __future__ import annotations

import json
from functools import cache
from itertools import count
from typing import Any

import msgspec
import pytest

from kvolt.core.delta import TokenLogprobs
from kvolt.engines.sim.model import tokenizer_json
from kvolt.frontend.detokenizer.detokenizer import Vocabulary
from kvolt.frontend.detokenizer.tokens import PlacedToken
from kvolt.frontend.openai_api.responses import ChatCompletion, ChatCompletionChunk, Completion
from kvolt.frontend.openai_api.serializer import (
    ChatSerializer,
    CompletionSerializer,
    Envelope,
    ResponseSerializer,
    ToolCall,
    WholeChoice,
)
from kvolt.frontend.parsers.port import Content, Reasoning, ToolArguments, ToolStart

FIELDS = {"id": 'x"', "object": "o", "created": 1, "model": "m/é"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer_json())


def chat() -> ChatSerializer:
    numbers = count()
    return ChatSerializer(lambda: f"call_{next(numbers)}")


def read(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"}\n\n")
    return json.loads(event[6:])


@pytest.mark.parametrize("with_usage", [False, True])
@pytest.mark.parametrize("serializer", [chat(), CompletionSerializer()], ids=["chat", "completion"])
def test_a_plain_event_is_the_same_by_both_ways(serializer: ResponseSerializer, with_usage: bool) -> None:
    envelope = Envelope(FIELDS, with_usage)
    for text in ("a", 'say "no"\n\\', "é€😀", "\x00\x1f\x7f"):
        before, after = envelope.plain(serializer, 3)
        fast = before + msgspec.json.encode(text)[1:-1] + after
        slow = envelope.event(serializer.text_choice(3, text, None, None, False))
        assert fast == slow
        assert read(fast)["choices"][0]["index"] == 3
        assert ("usage" in read(fast)) is with_usage


def test_the_envelope() -> None:
    envelope = Envelope(FIELDS, True)
    event = read(envelope.event({"index": 0}))
    assert event == {**FIELDS, "choices": [{"index": 0}], "usage": None}
    assert read(envelope.event({"index": 0}, {"usage": USAGE}))["usage"] == USAGE
    more = read(envelope.event({"index": 0}, {"nvext": {"a": 1}}))
    assert (more["usage"], more["nvext"]) == (None, {"a": 1})
    assert read(envelope.last_event({"usage": USAGE})) == {**FIELDS, "choices": [], "usage": USAGE}
    assert "usage" not in read(Envelope(FIELDS, False).event({"index": 0}))
    body = json.loads(envelope.body([{"index": 0}], USAGE, {"nvext": {}}))
    assert body == {**FIELDS, "choices": [{"index": 0}], "usage": USAGE, "nvext": {}}


def test_role_and_pieces_of_a_chat() -> None:
    serializer = chat()
    first = serializer.text_choice(0, "", None, None, True)
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert serializer.text_choice(0, "", "stop", None, False)["delta"] == {}
    assert serializer.piece_choice(0, Content("a"), False)["delta"] == {"content": "a"}
    assert serializer.piece_choice(0, Reasoning("r"), True)["delta"] == {
        "role": "assistant",
        "reasoning_content": "r",
    }
    call = serializer.piece_choice(0, ToolStart(1, "f"), False)["delta"]["tool_calls"][0]
    assert call == {
        "index": 1,
        "id": "call_0",
        "type": "function",
        "function": {"name": "f", "arguments": ""},
    }
    part = serializer.piece_choice(0, ToolArguments(1, "{"), False)["delta"]["tool_calls"][0]
    assert part == {"index": 1, "function": {"arguments": "{"}}


def test_a_whole_chat() -> None:
    serializer = chat()
    plain = serializer.whole_choice(WholeChoice(index=0, text="", finish="stop"))
    assert plain["message"]["content"] == ""  # said nothing, which is not the same as null
    called = serializer.whole_choice(
        WholeChoice(index=1, calls=[ToolCall("id", "f", "{}")], finish="tool_calls", extra={"stop_reason": 3})
    )
    assert called["message"]["content"] is None
    assert called["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert (called["index"], called["stop_reason"]) == (1, 3)
    thought = serializer.whole_choice(WholeChoice(index=0, reasoning="hm", text="ok"))
    assert (thought["message"]["reasoning_content"], thought["message"]["content"]) == ("hm", "ok")


LOGPROBS = (
    PlacedToken(0, 300, TokenLogprobs(300, -0.5, ((300, -0.5), (301, -2.0)))),
    PlacedToken(7, 301, TokenLogprobs(301, float("-inf"))),
)


def test_log_probabilities_of_a_chat() -> None:
    told = chat().logprobs(vocabulary(), LOGPROBS, 0)
    first, second = told["content"]
    assert first["token"] == vocabulary().token_text(300)
    assert bytes(first["bytes"]).decode() == first["token"]
    assert [top["logprob"] for top in first["top_logprobs"]] == [-0.5, -2.0]
    assert second["logprob"] == -9999.0  # JSON has no infinity
    assert second["top_logprobs"] == []


def test_log_probabilities_of_a_completion() -> None:
    texts = [vocabulary().token_text(token) for token in (300, 301)]
    told = CompletionSerializer().logprobs(vocabulary(), LOGPROBS, 5)
    assert told["tokens"] == texts
    assert told["token_logprobs"] == [-0.5, -9999.0]
    assert told["text_offset"] == [5, 12]
    assert told["top_logprobs"] == [{texts[0]: -0.5, texts[1]: -2.0}, {}]


def test_a_token_without_a_log_probability_keeps_its_place() -> None:
    told = CompletionSerializer().logprobs(vocabulary(), [PlacedToken(0, 302, None), *LOGPROBS], 0)
    assert told["tokens"][0] == vocabulary().token_text(302)
    assert told["token_logprobs"] == [None, -0.5, -9999.0]
    assert told["top_logprobs"][0] is None


def test_the_structs_of_the_schema_can_read_it() -> None:
    fields = {"id": "x", "created": 1, "model": "m"}
    serializer = chat()
    chunks = Envelope({**fields, "object": serializer.chunk}, True)
    logprobs = serializer.logprobs(vocabulary(), LOGPROBS, 0)
    for choice in (
        serializer.text_choice(0, "a", None, logprobs, True),
        serializer.text_choice(0, "", "stop", None, False),
        serializer.piece_choice(0, ToolStart(0, "f"), False),
        serializer.piece_choice(0, ToolArguments(0, "{"), False),
        serializer.piece_choice(0, Reasoning("r"), False),
    ):
        msgspec.json.decode(chunks.event(choice)[6:], type=ChatCompletionChunk)
    msgspec.json.decode(chunks.last_event({"usage": USAGE})[6:], type=ChatCompletionChunk)
    whole = serializer.whole_choice(
        WholeChoice(index=0, calls=[ToolCall("i", "f")], logprobs=logprobs, finish="stop")
    )
    body = Envelope({**fields, "object": serializer.whole}, False).body([whole], USAGE, {})
    msgspec.json.decode(body, type=ChatCompletion)
    text = CompletionSerializer()
    envelope = Envelope({**fields, "object": text.chunk}, False)
    told = text.logprobs(vocabulary(), [PlacedToken(0, 1, None), *LOGPROBS], 0)
    event = envelope.event(text.text_choice(0, "a", "length", told, True))
    msgspec.json.decode(event[6:], type=Completion)
    choice = text.whole_choice(WholeChoice(index=0, text="a", finish="stop", logprobs=told))
    msgspec.json.decode(envelope.body([choice], USAGE, {}), type=Completion)


def test_completions_have_no_parsers() -> None:
    assert CompletionSerializer().piece_choice(0, Content("a"), True)["text"] == "a"
    with pytest.raises(AssertionError):
        CompletionSerializer().piece_choice(0, Reasoning("a"), True)


def test_incomplete_characters_are_distinguishable() -> None:
    first, second = vocabulary().tokenizer.encode("é", add_special_tokens=False).ids
    likely = TokenLogprobs(first, -0.5, ((first, -0.5), (second, -2.0)))
    told = CompletionSerializer().logprobs(vocabulary(), [PlacedToken(0, first, likely)], 0)
    assert told["tokens"] == ["bytes:\\xc3"]
    assert told["top_logprobs"] == [{"bytes:\\xc3": -0.5, "bytes:\\xa9": -2.0}]


def test_tokens_named_by_their_ids() -> None:
    in_chat = ChatSerializer(lambda: "", tokens_as_ids=True).logprobs(vocabulary(), LOGPROBS, 0)
    first = in_chat["content"][0]
    assert first["token"] == "token_id:300"
    assert bytes(first["bytes"]).decode() == vocabulary().token_text(300), "the bytes stay the token's own"
    assert [top["token"] for top in first["top_logprobs"]] == ["token_id:300", "token_id:301"]
    in_completion = CompletionSerializer(tokens_as_ids=True).logprobs(vocabulary(), LOGPROBS, 5)
    assert in_completion["tokens"] == ["token_id:300", "token_id:301"]
    assert in_completion["top_logprobs"] == [{"token_id:300": -0.5, "token_id:301": -2.0}, {}]
    assert in_completion["text_offset"] == [5, 12]
