"""ShareGPT chats: a JSON array, or lines, of `{"id", "conversations": [{"from", "value"}]}`.

Every answer becomes a record whose prompt is the history before it. The format has no times: timestamps are 0, and
later turns have a delay of 0, so they follow when the previous turn has ended. Text is counted and hashed but not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest as xxh3

from kvolt.bench.traces.json_lines import plain_reason
from kvolt.bench.traces.lines import trace_error
from kvolt.bench.traces.prefixes import Segment, block_ids
from kvolt.core.trace import TraceRecord

TokenCounter = Callable[[str], int]

BLOCK_SIZE = 16
"""Small blocks, since turns are short and larger blocks would hide shared prefixes."""

_ANSWERS = {"gpt", "assistant", "chatgpt", "model", "bing", "bard", "claude"}


def estimate_tokens(text: str) -> int:
    """Approximate token count of English text: four tokens per three words."""
    return math.ceil(len(text.split()) * 4 / 3)


class _Turn(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Chat(msgspec.Struct):
    conversations: list[_Turn]
    id: str | int | None = None


def read_sharegpt_lines(
    lines: Iterable[tuple[int, bytes]], file: str, count_tokens: TokenCounter, block_size: int
) -> Iterator[tuple[int, TraceRecord]]:
    decoder = msgspec.json.Decoder(_Chat)
    for index, (number, line) in enumerate(lines):
        try:
            chat = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise trace_error(file, number, plain_reason(error)) from error
        for record in _records(chat, index, count_tokens, block_size):
            yield number, record


def read_sharegpt_array(
    items: Iterable[tuple[int, Any]], file: str, count_tokens: TokenCounter, block_size: int
) -> Iterator[tuple[int, TraceRecord]]:
    for index, (number, item) in enumerate(items):
        try:
            chat = msgspec.convert(item, _Chat)
        except msgspec.ValidationError as error:
            raise trace_error(file, number, plain_reason(error)) from error
        for record in _records(chat, index, count_tokens, block_size):
            yield number, record


def _records(chat: _Chat, index: int, count_tokens: TokenCounter, block_size: int) -> Iterator[TraceRecord]:
    session = f"chat-{index}" if chat.id is None else str(chat.id)
    segments: list[Segment] = []
    input_length = 0
    delay: float | None = None
    for turn in chat.conversations:
        length = count_tokens(turn.value)
        if turn.speaker.lower() in _ANSWERS and input_length and length:
            yield TraceRecord(
                timestamp=0.0,
                input_length=input_length,
                output_length=length,
                hash_ids=block_ids(segments, block_size),
                block_size=block_size,
                session=session,
                delay=delay,
            )
            delay = 0.0
        if length:
            # The role is part of the prompt.
            segments.append((xxh3(f"{turn.speaker}\0{turn.value}".encode("utf-8", "surrogatepass")), length))
            input_length += length
