"""Byte-level BPE by looking up words.

Such a tokenizer splits text into words by a regular expression and merges each word separately, so a word has the
same ids everywhere. Most words of a prompt are known: looking them up takes a small part of the time of merging.

The expression is evaluated by Python's engine here, and by another one in the tokenizer. They agree where a
character's class is certain: characters of the basic plane that are assigned in Python's version of Unicode, whose
classes do not change. Texts with other characters are left to the tokenizer.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Any

from tokenizers import Tokenizer

MAX_CHARACTERS = 16 * 1024
"""Longer texts are left to the tokenizer, which releases the interpreter lock."""

_MAX_WORDS = 8192
"""Words per generation."""
_MAX_WORD_CHARACTERS = 64

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_CATEGORIES = {
    "L": ("Lu", "Ll", "Lt", "Lm", "Lo"),
    "M": ("Mn", "Mc", "Me"),
    "N": ("Nd", "Nl", "No"),
    **{each: (each,) for each in ("Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No")},
}
"""Supported properties of patterns; a pattern with others is not supported."""

_SPACES = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""White space as defined by Unicode, which is less than Python's."""

_FOLDED = "\u017f\u212a"
"""Not ASCII, but equal to an ASCII letter when case is ignored."""

_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")


class _Words(dict[str, tuple[int, ...]]):
    """Ids by word; missing words are merged on lookup.

    Two generations: a full generation becomes the old one. Words that are used again move to the new generation, the
    others are dropped with the old one, without a search.
    """

    def __init__(self, merge: Callable[[str], tuple[int, ...]]) -> None:
        super().__init__()
        self._merge = merge
        self.old: dict[str, tuple[int, ...]] = {}

    def __missing__(self, word: str) -> tuple[int, ...]:
        ids = self.old.get(word) or self._merge(word)
        if len(word) <= _MAX_WORD_CHARACTERS:
            if len(self) >= _MAX_WORDS:
                self.old = self.copy()
                self.clear()
            self[word] = ids
        return ids


class WordEncoder:
    """Word encoder of one tokenizer. Thread-safe: concurrent threads compute the same ids."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        splitters: Sequence[re.Pattern[str]],
        added: Sequence[str],
        forms: Sequence[str],
    ) -> None:
        self._model: Any = tokenizer.model
        self._first, *self._rest = splitters
        self._added = re.compile("|".join(map(re.escape, added))) if added else None
        self._forms = forms
        """Normal forms that a text must already have."""
        self._symbols = _byte_symbols()
        self._words = _Words(self._merge)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, document: dict[str, Any]) -> WordEncoder | None:
        """Create an encoder; None unless the tokenizer certainly works by words. `document` is its JSON."""
        forms = normal_forms(document.get("normalizer"))
        if not is_plain_bpe(document["model"]) or forms is None:
            return None
        splitters = _splitters(document.get("pre_tokenizer"))
        if splitters is None:
            return None
        if any(
            token["lstrip"] or token["rstrip"] or token["single_word"] for token in document["added_tokens"]
        ):
            return None  # such a token may strip adjacent words
        added = sorted((token["content"] for token in document["added_tokens"]), key=len, reverse=True)
        return cls(tokenizer, splitters, added, forms)

    def encode(self, text: str) -> list[int] | None:
        """Ids of a text without special tokens; None if it must be left to the tokenizer."""
        if len(text) > MAX_CHARACTERS or not (text.isascii() or self._is_certain(text)):
            return None
        if self._added is not None and self._added.search(text) is not None:
            return None
        words: list[str] = self._first.findall(text)
        for splitter in self._rest:
            words = [part for word in words for part in splitter.findall(word)]
        if len("".join(words)) != len(text):
            return None  # the pattern does not cover the whole text
        return list(chain.from_iterable(map(self._words.__getitem__, words)))

    def _is_certain(self, text: str) -> bool:
        return _doubtful().search(text) is None and all(
            unicodedata.is_normalized(form, text)  # type: ignore[arg-type]
            for form in self._forms
        )

    def _merge(self, word: str) -> tuple[int, ...]:
        symbols = "".join(map(self._symbols.__getitem__, word.encode()))
        return tuple(token.id for token in self._model.tokenize(symbols))


@cache
def _plane() -> dict[str, str]:
    """Characters of each category in the basic plane, as ranges of a character class."""
    ranges: dict[str, list[str]] = {}
    start, previous = 0, unicodedata.category("\0")
    for code in range(1, 0x10001):
        category = unicodedata.category(chr(code)) if code < 0x10000 else ""
        if category != previous:
            ranges.setdefault(previous, []).append(f"\\u{start:04x}-\\u{code - 1:04x}")
            start, previous = code, category
    return {category: "".join(characters) for category, characters in ranges.items()}


@cache
def _doubtful() -> re.Pattern[str]:
    """A character whose class may differ in the tokenizer."""
    unsure = "".join(_plane().get(category, "") for category in ("Cn", "Co", "Cs"))
    return re.compile(f"[{unsure}{_FOLDED}\\U00010000-\\U{sys.maxunicode:08x}]")


def is_plain_bpe(model: dict[str, Any]) -> bool:
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and not model.get("byte_fallback")
    )


def normal_forms(normalizer: dict[str, Any] | None) -> list[str] | None:
    """Normal forms produced by a normalizer; None if it does anything else."""
    if normalizer is None:
        return []
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    names = [step["type"] for step in steps]
    return names if all(name in _NORMALIZERS for name in names) else None


def _splitters(pre_tokenizer: dict[str, Any] | None) -> list[re.Pattern[str]] | None:
    """`word_patterns` compiled for Python's engine; None if one is not supported."""
    compiled = [_compile(pattern) for pattern in word_patterns(pre_tokenizer) or ()]
    return (
        [pattern for pattern in compiled if pattern is not None]
        if compiled and None not in compiled
        else None
    )


def word_patterns(pre_tokenizer: dict[str, Any] | None) -> list[str] | None:
    """Patterns that split a text into words, in order; None for other pre-tokenizers."""
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
    return patterns if patterns and steps[-1]["type"] == "ByteLevel" else None


_ESCAPE = re.compile(r"\\p\{\w+\}|\\.")


def _compile(pattern: str) -> re.Pattern[str] | None:
    """Compile a pattern for Python's engine; None if it is not supported."""
    parts: list[str] = []
    in_class = False
    position = 0
    while position < len(pattern):
        escape = _ESCAPE.match(pattern, position)
        if escape is not None:
            members = _members(escape[0])
            if members is None or (members.startswith("^") and in_class):
                return None
            parts.append(members if in_class else f"[{members}]")
            position = escape.end()
            continue
        character = pattern[position]
        if character == "[":
            if in_class:
                return None  # nested sets have another syntax
            in_class = True
        elif character == "]":
            in_class = False
        parts.append(character)
        position += 1
    text = "".join(parts)
    if "&&" in text:
        return None
    try:
        compiled = re.compile(text)
    except re.error:
        return None
    return compiled if compiled.groups == 0 else None


def _members(escape: str) -> str | None:
    """Members of a character class for an escape; starts with ^ if the class is to be negated."""
    if escape.startswith(r"\p{"):
        categories = _CATEGORIES.get(escape[3:-1])
        return None if categories is None else "".join(_plane().get(each, "") for each in categories)
    if escape == r"\s":
        return _SPACES
    if escape == r"\S":
        return "^" + _SPACES
    if escape[1] in "rnt" or not escape[1].isalnum():
        return escape
    return None


def _byte_symbols() -> list[str]:
    """Printable symbols of byte-level BPE for the 256 bytes."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
