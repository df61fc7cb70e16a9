"""Byte-level BPE of plain ASCII text by looking up words.

Such a tokenizer cuts text into words by a regular expression and merges each word for itself, so a word
has the same ids wherever it stands. Most words of a prompt have been seen before: finding them in a table
takes a small part of the time that merging takes.

Only ASCII: there the classes of a pattern (letters, numbers, spaces) are the same in every version of
Unicode and in every regular expression engine. Anything else is left to the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

MAX_CHARACTERS = 16 * 1024
"""Longer texts are for the tokenizer, which works without the interpreter lock."""

_MAX_WORDS = 32_768
_MAX_WORD_CHARACTERS = 64

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_ASCII_CLASSES = {
    "L": "A-Za-z",
    "Lu": "A-Z",
    "Ll": "a-z",
    "Lt": "",
    "Lm": "",
    "Lo": "",
    "M": "",
    "N": "0-9",
    "Nd": "0-9",
}
"""What the properties that patterns use are in ASCII; a pattern with any other is not taken."""

_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
"""Those that leave ASCII alone."""


class WordEncoder:
    """One tokenizer's. Threads may share it: what two learn at once is the same."""

    def __init__(
        self, tokenizer: Tokenizer, splitters: Sequence[re.Pattern[str]], added: Sequence[str]
    ) -> None:
        self._model: Any = tokenizer.model
        self._first, *self._rest = splitters
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        self._symbols = _byte_symbols()
        self._words: dict[str, tuple[int, ...]] = {}
        """The oldest go first when it is full."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> WordEncoder | None:
        """None when it is not certain that words are all there is to this tokenizer."""
        document = json.loads(tokenizer.to_str())
        if not _is_plain_bpe(document["model"]) or not _keeps_ascii(document.get("normalizer")):
            return None
        splitters = _splitters(document.get("pre_tokenizer"))
        if splitters is None:
            return None
        if any(
            token["lstrip"] or token["rstrip"] or token["single_word"] for token in document["added_tokens"]
        ):
            return None  # such a token takes of the words beside it
        added = sorted((token["content"] for token in document["added_tokens"]), key=len, reverse=True)
        return cls(tokenizer, splitters, added)

    def encode(self, text: str) -> list[int] | None:
        """The ids of a text without special tokens; None when that is the tokenizer's to say."""
        if len(text) > MAX_CHARACTERS or not text.isascii():
            return None
        if self._added is not None and self._added.search(text) is not None:
            return None
        words: list[str] = self._first.findall(text)
        for splitter in self._rest:
            words = [part for word in words for part in splitter.findall(word)]
        if sum(map(len, words)) != len(text):
            return None  # a pattern that leaves something between its matches
        ids: list[int] = []
        extend, known = ids.extend, self._words.get
        for word in words:
            extend(known(word) or self._learn(word))
        return ids

    def _learn(self, word: str) -> tuple[int, ...]:
        ids = tuple(token.id for token in self._model.tokenize(word.translate(self._symbols)))
        if len(word) <= _MAX_WORD_CHARACTERS:
            if len(self._words) >= _MAX_WORDS:
                self._words.pop(next(iter(self._words), ""), None)
            self._words[word] = ids
        return ids


def _is_plain_bpe(model: dict[str, Any]) -> bool:
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and not model.get("byte_fallback")
    )


def _keeps_ascii(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None:
        return True
    if normalizer["type"] == "Sequence":
        return all(_keeps_ascii(each) for each in normalizer["normalizers"])
    return normalizer["type"] in _NORMALIZERS


def _splitters(pre_tokenizer: dict[str, Any] | None) -> list[re.Pattern[str]] | None:
    """The patterns that cut a text into words, in order; None for cuts of another kind."""
    if pre_tokenizer is None:
        return None
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    patterns: list[str] = []
    for number, step in enumerate(steps):
        match step["type"]:
            case "ByteLevel" if number == len(steps) - 1 and not step["add_prefix_space"]:
                if step.get("use_regex", True):
                    patterns.append(_GPT2)
            case "Split" if (
                step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]
            ):
                patterns.append(step["pattern"]["Regex"])
            case "Digits":
                patterns.append(r"\p{N}|[^\p{N}]+" if step["individual_digits"] else r"\p{N}+|[^\p{N}]+")
            case _:
                return None
    if not patterns or steps[-1]["type"] != "ByteLevel":
        return None
    compiled = [_compile(pattern) for pattern in patterns]
    return [pattern for pattern in compiled if pattern is not None] if None not in compiled else None


def _compile(pattern: str) -> re.Pattern[str] | None:
    """A pattern as it works on ASCII; None when it has something that we cannot say in ASCII."""
    parts: list[str] = []
    in_class = False
    position = 0
    while position < len(pattern):
        found = re.compile(r"\\p\{(\w+)\}").match(pattern, position)
        if found is not None:
            members = _ASCII_CLASSES.get(found[1])
            if members is None:
                return None
            parts.append(members if in_class else f"[{members}]" if members else "(?!)")
            position = found.end()
            continue
        character = pattern[position]
        if character == "\\":
            parts.append(pattern[position : position + 2])
            position += 2
            continue
        if character == "[":
            if in_class:
                return None  # sets within sets are written differently
            in_class = True
        elif character == "]":
            in_class = False
        parts.append(character)
        position += 1
    text = "".join(parts)
    if "[]" in text or "[^]" in text or "\\P" in text or "&&" in text:
        return None
    try:
        compiled = re.compile(text, re.ASCII)
    except re.error:
        return None
    return compiled if compiled.groups == 0 else None


def _byte_symbols() -> dict[int, str]:
    """The printable stand-ins of byte-level BPE for the characters of ASCII."""
    symbols = {byte: chr(byte) for byte in range(33, 127)}
    for shift, byte in enumerate([*range(33), 127]):
        symbols[byte] = chr(256 + shift)
    return symbols
