"""Tokenization of texts of any length, bounded in tokens and in time under the interpreter lock.

A tokenizer call releases the interpreter lock, but its ids become Python objects, and its encoding is freed, with the
lock held: about 50 ns per token. A long text is therefore tokenized in slices, and rejected as soon as it certainly
has more tokens than allowed.

The joined ids of the slices equal those of the whole text. A byte-level BPE tokenizer splits text into words by
regular expressions and merges each word separately. If all alternatives of these expressions are in `_ALTERNATIVES`,
no word contains a lowercase ASCII letter followed by a space, every such letter is part of a word, and no alternative
looks behind or, after a letter, ahead: so every tokenization has a boundary between that letter and the space. No
Unicode normal form changes across it. Texts for other tokenizers, and texts without such a position, are tokenized
whole.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Encoding, Tokenizer

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.tokenization.word_encoder import is_plain_bpe, normal_forms, word_patterns

_SLICE_CHARACTERS = 64 * 1024
_COUNTED_CHARACTERS = 32 * 1024
_TOKENS_PER_CUT = 256
"""Maximum number of additional tokens caused by a cut at any position."""
_BYTES_PER_TOKEN = 2
"""A text with more bytes per allowed token is probably too long, and is counted first."""

_BOUNDARY = re.compile("[a-z](?= )")

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_WORDS = {
    r" ?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    _CASED[0],
    f"{_CASED[0]}{_CONTRACTION}?",
}
"""Each matches at every lowercase ASCII letter, whatever is next to it."""
_ALTERNATIVES = _WORDS | {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _CONTRACTION),
    _CASED[1],
    f"{_CASED[1]}{_CONTRACTION}?",
    *(r"\p{N}", r"\p{N}{1,3}", r"\p{N}+", r" ?\p{N}+"),
    r"[^\p{N}]+",  # of Digits, which cuts only at digits: a later stage cuts its text again
    r" ?[^\s\p{L}\p{N}]+",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    *(r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"),
}
_ALTERNATIVE = re.compile(r"(?:\\.|\[(?:\\.|[^\]])*\]|\((?:\\.|[^()])*\)|[^|])+", re.DOTALL)


class TooManyTokens(Exception):
    """A text has more tokens than allowed."""


class BoundedTokenizer:
    """A tokenizer; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, document: dict[str, Any] | None) -> None:
        """`document`: its `tokenizer.json`; None for a tokenizer that changes whole texts, such as by truncation."""
        self._tokenizer = tokenizer
        self.takes_slices = document is not None and _has_boundaries(document)

    def tokenize(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Ids of each text. Raises TooManyTokens if they have more than `max_tokens` in total."""
        all_ids: list[list[int]] = []
        for group in _groups(texts):
            if len(group[0]) > _SLICE_CHARACTERS:
                ids = [self._tokenize_long(group[0], max_tokens)]
            else:
                encodings = self._encode(group)
                if sum(map(len, encodings)) > max_tokens:
                    raise TooManyTokens
                ids = [encoding.ids for encoding in encodings]
            max_tokens -= sum(map(len, ids))
            all_ids += ids
        return all_ids

    def _tokenize_long(self, text: str, max_tokens: int) -> list[int]:
        if self.takes_slices and self._is_long_for(text, max_tokens):
            _check_boundaries(text, max_tokens)
        ids: list[int] = []
        for part in _slices(text) if self.takes_slices else (text,):
            num_left = max_tokens - len(ids)
            if len(part) > _SLICE_CHARACTERS and self._is_long_for(part, num_left):
                self._check_count(part, num_left)
            [encoding] = self._encode([part])
            if len(encoding) > num_left:
                raise TooManyTokens
            ids += encoding.ids
        return ids

    def _is_long_for(self, text: str, max_tokens: int) -> bool:
        num_bytes = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
        return num_bytes > _BYTES_PER_TOKEN * max_tokens

    def _check_count(self, text: str, max_tokens: int) -> None:
        num_tokens = 0
        for start in range(0, len(text), _COUNTED_CHARACTERS):
            [part] = self._encode([text[start : start + _COUNTED_CHARACTERS]])
            num_tokens += max(len(part) - _TOKENS_PER_CUT, 0)
            if num_tokens > max_tokens:
                raise TooManyTokens

    def _encode(self, texts: Sequence[str]) -> list[Encoding]:
        # The batch call even for one text: only it releases the interpreter lock, and it skips the offsets.
        try:
            return self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise InvalidRequest("the text contains an unpaired surrogate") from error


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Group texts, in order, into `_SLICE_CHARACTERS` at a time; a longer text is a group of its own."""
    group: list[str] = []
    num_characters = 0
    for text in texts:
        if group and num_characters + len(text) > _SLICE_CHARACTERS:
            yield group
            group, num_characters = [], 0
        group.append(text)
        num_characters += len(text)
    if group:
        yield group


def _slices(text: str) -> Iterator[str]:
    """Cut at boundaries; each slice has `_SLICE_CHARACTERS`, plus the distance to the next boundary."""
    start = 0
    while (end := _next_boundary(text, start + _SLICE_CHARACTERS)) is not None:
        yield text[start:end]
        start = end
    yield text[start:]


def _next_boundary(text: str, start: int) -> int | None:
    """First boundary at or after `start`. Searches in parts, because one search holds the interpreter lock."""
    for part in range(start, len(text), _SLICE_CHARACTERS):
        if boundary := _BOUNDARY.search(text, part, part + _SLICE_CHARACTERS + 1):
            return boundary.end()
    return None


def _check_boundaries(text: str, max_tokens: int) -> None:
    """Count boundaries, each of which ends a token: much faster than tokenizing."""
    num_tokens = 0
    for start in range(0, len(text), _SLICE_CHARACTERS):
        num_tokens += len(_BOUNDARY.findall(text, start, start + _SLICE_CHARACTERS))
        if num_tokens > max_tokens:
            raise TooManyTokens


def _has_boundaries(document: dict[str, Any]) -> bool:
    """Whether every `_BOUNDARY` in a text is a word boundary of this tokenizer."""
    patterns = word_patterns(document.get("pre_tokenizer"))
    if (
        not is_plain_bpe(document["model"])
        or normal_forms(document.get("normalizer")) is None
        or not patterns
    ):
        return False
    for token in document["added_tokens"]:
        strips = token["lstrip"] or token["rstrip"] or token["single_word"]
        if strips or " " in unicodedata.normalize("NFKD", token["content"]):
            return False  # it could match across a boundary
    written = [pattern.replace("\r", r"\r").replace("\n", r"\n") for pattern in patterns]
    alternatives = [set(_ALTERNATIVE.findall(pattern)) for pattern in written]
    return all(each <= _ALTERNATIVES for each in alternatives) and any(each & _WORDS for each in alternatives)
