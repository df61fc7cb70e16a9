"""Chat requests as bytes on the wire, built before the measurement.

Two kinds of prompts, all different from each other. Of few words: random ones out of twelve, as load
generators like them; a tokenizer that remembers words has seen all of them. Of text: passages of Python's
own documentation in which every twentieth word was never seen before, and every fourth passage
has a character in it that is not ASCII.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pydoc_data import topics

from benchmarks.frontend import tiny_model

_FEW_WORDS = (
    *("import", "return", "class", "function", "value", "error"),
    *("string", "object", "module", "result", "index", "buffer"),
)
_NEW_WORD_EVERY = 20
_NOT_ASCII_EVERY = 4
_PROMPT_WORDS = 200

Writer = Callable[[int, random.Random], str]
"""Writes so many words."""


def few_words(count: int, rng: random.Random) -> str:
    return " ".join(rng.choices(_FEW_WORDS, k=count))


def passage(count: int, rng: random.Random) -> str:
    text = _documentation()
    start = rng.randrange(len(text) - count)
    words = list(text[start : start + count])
    for at in range(rng.randrange(_NEW_WORD_EVERY), count, _NEW_WORD_EVERY):
        words[at] = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(5, 10)))
    if rng.randrange(_NOT_ASCII_EVERY) == 0:
        words[rng.randrange(count)] += "\N{RIGHT SINGLE QUOTATION MARK}s"
    return " ".join(words)


@cache
def _documentation() -> list[str]:
    text = " ".join(topics.topics.values())
    return [word for word in text.split() if word.isascii()]


def chat_body(messages: Sequence[dict[str, str]], max_tokens: int, **more: object) -> bytes:
    """Body of a streamed chat request, with further fields."""
    fields = {"model": tiny_model.NAME, "stream": True, "max_tokens": max_tokens, "ignore_eos": True, **more}
    return json.dumps({**fields, "messages": messages}, ensure_ascii=False).encode()


def chat_request(messages: Sequence[dict[str, str]], max_tokens: int, head: str = "") -> bytes:
    """A whole HTTP request, with further lines of its head."""
    body = chat_body(messages, max_tokens)
    start = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{start}{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def prompt_requests(
    count: int, max_tokens: int, seed: int, write: Writer = few_words, head: str = ""
) -> list[bytes]:
    rng = random.Random(seed)
    return [
        chat_request([{"role": "user", "content": write(_PROMPT_WORDS, rng)}], max_tokens, head)
        for _ in range(count)
    ]
