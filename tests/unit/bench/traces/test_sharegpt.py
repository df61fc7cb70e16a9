"""Chats become records: one per answer, with the chat so far as its prompt; arrays are read item by item."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.bench.traces.trace_lab import shared_blocks

from kvolt.bench.traces import ReadOptions, lines, read_trace
from kvolt.bench.traces.sharegpt import estimate_tokens
from kvolt.core.errors import ConfigError


def words(text: str) -> int:
    return len(text.split())


def chat(*turns: str, name: str | None = None) -> dict[str, Any]:
    """`human: text` and `gpt: text` as ShareGPT has them."""
    pairs = [turn.split(": ", 1) for turn in turns]
    said = [{"from": speaker, "value": text} for speaker, text in pairs]
    return {"conversations": said} if name is None else {"id": name, "conversations": said}


def read(tmp_path: Path, text: str, block_size: int = 2) -> list[Any]:
    path = tmp_path / "chats.json"
    path.write_text(text)
    return list(read_trace(path, ReadOptions(block_size=block_size, count_tokens=words)))


CHAT = chat("system: be good", "human: a b c", "gpt: d e", "human: f", "gpt: g h i", name="x")


@pytest.mark.parametrize("form", ["array", "lines", "indented"])
def test_each_answer_is_a_record(tmp_path: Path, form: str) -> None:
    text = {
        "array": json.dumps([CHAT]),
        "lines": json.dumps(CHAT) + "\n",
        "indented": json.dumps([CHAT], indent=2),
    }[form]
    first, second = read(tmp_path, text)
    assert (first.input_length, first.output_length, first.session, first.delay) == (5, 2, "x", None)
    assert (second.input_length, second.output_length, second.delay) == (8, 3, 0.0)
    assert (len(first.hash_ids), len(second.hash_ids)) == (3, 4)
    assert shared_blocks(first.hash_ids, second.hash_ids) == 2, (
        "the partial third is another one when it is full"
    )


def test_chats_share_what_they_begin_with(tmp_path: Path) -> None:
    one = chat("system: be good now then", "human: a b", "gpt: c")
    other = chat("system: be good now then", "human: z b", "gpt: c")
    same = chat("system: be good now then", "human: a b", "gpt: c")
    by_user = chat("human: be good now then", "human: a b", "gpt: c")
    first, second, third, fourth = read(tmp_path, json.dumps([one, other, same, by_user]))
    assert shared_blocks(first.hash_ids, second.hash_ids) == 2
    assert first.hash_ids == third.hash_ids
    assert shared_blocks(first.hash_ids, fourth.hash_ids) == 0, "who says it counts"
    assert [each.session for each in (first, second, third)] == ["chat-0", "chat-1", "chat-2"]


def test_what_cannot_be_asked_is_left_out(tmp_path: Path) -> None:
    chats = [chat("gpt: hello"), chat("human: a"), chat("human: a", "gpt: "), chat("human: a", "gpt: b")]
    chats[2]["conversations"][1]["value"] = ""
    assert [each.session for each in read(tmp_path, json.dumps(chats))] == ["chat-3"]


def test_the_default_counter_is_a_rule_of_thumb() -> None:
    assert [estimate_tokens(text) for text in ("", "one", "one two three", "a b c d")] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("[]", 1, "no requests"),
        ("[\n\n" + json.dumps(CHAT), 3, "bad JSON: unexpected end of file"),
        ("[\n" + json.dumps(CHAT) + ",\n{", 3, "bad JSON: Expecting property name enclosed in double quotes"),
        ("[\n" + json.dumps(CHAT) + ",\n\n" + json.dumps(CHAT)[:40], 4, None),
        ("[\n" + json.dumps(CHAT) + "\n" + json.dumps(CHAT) + "]", 3, "bad JSON: expected ']', got '{'"),
        ("[" + json.dumps(CHAT) + "]\n\n[", 3, "data after the array"),
        ('[\n{"conversations":\n\n [nonsense' + " " * 50 + "]}]", 4, "bad JSON: Expecting value"),
        ('[\n{"id": "a"}]', 2, "object missing required field conversations"),
        (
            '[\n{"conversations": [{"from": "human"}]}]',
            2,
            "conversations[0]: object missing required field value",
        ),
        (
            '[\n{"conversations": [{"from": 1, "value": "a"}]}]',
            2,
            "conversations[0].from: expected str, got int",
        ),
        ("[\n1]", 2, "expected object, got int"),
        ("[" * 100_000, 1, "bad JSON: nested too deeply"),
        (json.dumps(CHAT) + '\n{"conversations": 3}', 2, "conversations: expected array, got int"),
    ],
)
def test_broken_chats_have_a_line_and_a_reason(
    tmp_path: Path, text: str, line: int, reason: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    fields = caught.value.fields
    assert fields["line"] == line
    assert fields["reason"] == reason or (reason is None and str(fields["reason"]).startswith("bad JSON"))


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 64])
def test_items_may_be_cut_anywhere_by_a_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    chats = [chat(f'human: "é\\ {number} \u2028', "gpt: ü [ ] { } , ok") for number in range(5)]
    chats[1]["numbers"] = [1.5e-10, -3, True, None, "\\u00e9"]
    text = json.dumps(chats, indent=1)
    whole = read(tmp_path, text)
    monkeypatch.setattr(lines, "_CHUNK_BYTES", chunk_bytes)
    assert read(tmp_path, text) == whole
    assert read(tmp_path, json.dumps(chats, ensure_ascii=False)) == whole
    assert len(whole) == 5


def test_an_item_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 200)
    monkeypatch.setattr(lines, "_CHUNK_BYTES", 50)
    with pytest.raises(ConfigError, match=":1: an item exceeds"):
        read(tmp_path, json.dumps([chat("human: " + "a " * 500, "gpt: b")]))
