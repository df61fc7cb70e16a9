"""Tokenizer with a cache of the text pieces between special tokens.

A chat returns with each turn, extended by an answer and a question. Special tokens are matched before all other
processing, so the text between two of them has the same ids in every prompt. The text is cut before each special
token, known pieces are looked up, and only the others are tokenized, by words if `word_encoder` supports it.

The cache has pieces rather than prefixes: a prefix entry would contain the whole chat again for each turn, and would
be useless when a template rewrites an earlier turn (as when reasoning is dropped).

Whether cutting is exact for a tokenizer is determined once. If it is not certain, nothing is cut or cached.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from sys import getsizeof, maxsize
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

from kvolt.frontend.tokenization.bounded_tokenizer import BoundedTokenizer
from kvolt.frontend.tokenization.word_encoder import WordEncoder

_MAX_CUTS = 4096
"""Limit of cuts per text; the rest is one piece, so that a text of special tokens does not fill the cache."""

_MAX_SHARE = 8
"""Maximum fraction of the cache that one text may add."""

_ENTRY_BYTES = 200
"""Memory of the tables and the entry's tuple, besides text and ids."""

_PACKED_BYTES = array("I").itemsize

_MAX_CUT_CHARS = 256


@dataclass(slots=True)
class EncoderStats:
    """Counters since the start, in pieces and tokens, and the current size.

    The few words between two markers are a piece too, so the hit rate of pieces is too optimistic; use tokens.
    """

    hits: int = 0
    misses: int = 0
    cached_tokens: int = 0
    uncached_tokens: int = 0
    evictions: int = 0
    entries: int = 0
    bytes: int = 0


class CachedEncoder:
    """A tokenizer with a cache of text pieces. Thread-safe.

    A lock is held for lookups and insertions, never while tokenizing, which also releases the interpreter lock. Two
    threads that miss the same piece concurrently both tokenize it.

    A piece is cached at its first use, but can only evict pieces that were used once. At its second use it moves to a
    separate part, of up to half the bytes, whose least recently used pieces move back: prompts that never repeat
    cannot evict the chats and system prompts that do.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int, by_words: bool = True) -> None:
        self._tokenizer = tokenizer
        self.note = reason_against_cutting(tokenizer)
        """Why nothing is cut or cached, or None."""
        self.exact = self.note is None
        """Whether cutting at special tokens is exact; otherwise each text is tokenized whole."""
        self._cut = re.compile(longest_of(_cut_tokens(tokenizer))) if self.exact else None
        document = json.loads(tokenizer.to_str()) if self.exact else None
        self._words = (
            WordEncoder.from_tokenizer(tokenizer, document) if document is not None and by_words else None
        )
        self._bounded = BoundedTokenizer(tokenizer, document)
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._once: OrderedDict[str, tuple[array[int], int]] = OrderedDict()
        """Packed ids and accounted bytes of pieces used once, most of which are never used again."""
        self._again: OrderedDict[str, tuple[tuple[int, ...], int]] = OrderedDict()
        """Unpacked ids of pieces used again; joining them is three times as fast."""
        self._again_bytes = 0
        self.stats = EncoderStats()

    def encode(self, text: str, by_words: bool = True, max_tokens: int = maxsize) -> tuple[int, ...]:
        """Ids of `tokenizer.encode(text, add_special_tokens=False)`.

        `by_words` is cheaper but holds the interpreter lock: do not use it for long texts in a thread. Raises
        TooManyTokens if more than `max_tokens` would be created.
        """
        if self._cut is None:
            return self._encode_whole(text, max_tokens)
        starts = [match.start() for match in islice(self._cut.finditer(text), _MAX_CUTS)]
        if not starts or starts[0]:
            starts.insert(0, 0)
        pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
        with self._lock:
            cached = [self._look_up(piece) for piece in pieces]
            self.stats.cached_tokens += sum(map(len, filter(None, cached)))
            self._evict()
        if None not in cached:
            return _joined(cached)  # type: ignore[arg-type]
        missing = [piece for piece, ids in zip(pieces, cached, strict=True) if ids is None]
        new = self._encode_new(missing, by_words, max_tokens)
        return _joined(new[piece] if ids is None else ids for piece, ids in zip(pieces, cached, strict=True))

    def clear(self) -> None:
        """Drop all pieces and keep the counters."""
        with self._lock:
            self._once.clear()
            self._again.clear()
            self._again_bytes = 0
            self.stats.entries = self.stats.bytes = 0

    def _encode_whole(self, text: str, max_tokens: int) -> tuple[int, ...]:
        (ids,) = self._bounded.tokenize([text], max_tokens)
        with self._lock:
            self.stats.misses += 1
            self.stats.uncached_tokens += len(ids)
        return tuple(ids)

    def _encode_new(
        self, missing: Sequence[str], by_words: bool, max_tokens: int
    ) -> dict[str, tuple[int, ...]]:
        distinct = list(dict.fromkeys(missing))
        tokenize = self._tokenize if by_words else self._bounded.tokenize
        new = dict(zip(distinct, map(tuple, tokenize(distinct, max_tokens)), strict=True))
        num_new = sum(map(len, new.values()))
        num_repeated = sum(len(new[piece]) for piece in missing) - num_new
        with self._lock:
            self.stats.misses += len(distinct)
            self.stats.hits += len(missing) - len(distinct)
            self.stats.uncached_tokens += num_new
            self.stats.cached_tokens += num_repeated
            self._keep(new)
            self._evict()
        return new

    def _tokenize(self, texts: list[str], max_tokens: int) -> list[list[int]]:
        if self._words is None:
            return self._bounded.tokenize(texts, max_tokens)
        cached = [self._look_up_words(text) for text in texts]
        if None not in cached:
            return cached  # type: ignore[return-value]
        missing_texts = [text for text, ids in zip(texts, cached, strict=True) if ids is None]
        others = iter(self._bounded.tokenize(missing_texts, max_tokens))
        return [next(others) if ids is None else ids for ids in cached]

    def _look_up_words(self, text: str) -> list[int] | None:
        """Ids of a piece by words, if supported: optionally a special token, then plain text."""
        assert self._words is not None
        assert self._cut is not None
        special = self._cut.match(text)
        if special is None:
            return self._words.encode(text)
        special_id = self._tokenizer.token_to_id(special[0])
        ids = self._words.encode(text[special.end() :])
        return None if ids is None or special_id is None else [special_id, *ids]

    @cached_property
    def _shared(self) -> list[int]:
        """One int object per id, so that an id in an entry or a prompt takes 8 bytes instead of 36."""
        added = self._tokenizer.get_added_tokens_decoder()
        return list(range(max(self._tokenizer.get_vocab_size(), *(1 + token_id for token_id in added))))

    def _look_up(self, piece: str) -> tuple[int, ...] | None:
        entry = self._again.get(piece)
        if entry is not None:
            self._again.move_to_end(piece)
        elif piece in self._once:
            entry = self._promote(piece)
        else:
            return None
        self.stats.hits += 1
        return entry[0]

    def _promote(self, piece: str) -> tuple[tuple[int, ...], int]:
        packed, packed_bytes = self._once.pop(piece)
        try:
            ids = tuple(map(self._shared.__getitem__, packed))
        except IndexError:  # a vocabulary with holes has ids beyond its size
            ids = tuple(packed)
        num_bytes = _cost(piece, ids)
        self._again[piece] = ids, num_bytes
        self._again_bytes += num_bytes
        self.stats.bytes += num_bytes - packed_bytes
        while self._again_bytes > self._max_bytes // 2:
            oldest, (demoted, demoted_bytes) = self._again.popitem(last=False)
            self._again_bytes -= demoted_bytes
            self.stats.bytes -= demoted_bytes
            self._add(oldest, array("I", demoted))
        return ids, num_bytes

    def _keep(self, new: dict[str, tuple[int, ...]]) -> None:
        allowance = self._max_bytes // _MAX_SHARE
        for piece, ids in new.items():
            if _PACKED_BYTES * len(ids) > allowance:
                break  # unpacking millions of ids would hold the interpreter lock
            packed = array("I", ids)
            allowance -= _cost(piece, packed)
            if allowance < 0:
                break
            if piece not in self._once and piece not in self._again:
                self._add(piece, packed)

    def _add(self, piece: str, packed: array[int]) -> None:
        num_bytes = _cost(piece, packed)
        self._once[piece] = packed, num_bytes
        self.stats.bytes += num_bytes

    def _evict(self) -> None:
        stats = self.stats
        while stats.bytes > self._max_bytes:
            _, (_, num_bytes) = self._once.popitem(last=False)
            stats.bytes -= num_bytes
            stats.evictions += 1
        stats.entries = len(self._once) + len(self._again)


def _cost(piece: str, ids: array[int] | tuple[int, ...]) -> int:
    # Accurate only after tokenizing, which adds a UTF-8 copy to a non-ASCII text.
    return getsizeof(piece) + getsizeof(ids) + _ENTRY_BYTES


def _joined(pieces: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    ids: list[int] = []
    for piece in pieces:
        ids += piece
    return tuple(ids)


def _cut_tokens(tokenizer: Tokenizer) -> list[str]:
    """Special tokens that are matched before all else, everywhere, without stripping preceding text."""
    return [
        token.content
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.special and not (token.normalized or token.lstrip or token.single_word) and token.content
    ]


def longest_of(tokens: Iterable[str]) -> str:
    """Pattern for the longest token at a position; a trie, so that a text full of "<" costs one step at each."""
    by_first: dict[str, list[str]] = {}
    ends_here = False
    for token in tokens:
        if token:
            by_first.setdefault(token[0], []).append(token[1:])
        else:
            ends_here = True
    branches = [re.escape(first) + longest_of(rest) for first, rest in by_first.items()]
    if not branches or (len(branches) == 1 and not ends_here):
        return "".join(branches)
    return f"(?:{'|'.join(branches)}){'?' if ends_here else ''}"


_PIECEWISE_PRE_TOKENIZERS = {
    "BertPreTokenizer",
    "ByteLevel",
    "CharDelimiterSplit",
    "Digits",
    "FixedLength",
    "Metaspace",
    "Punctuation",
    "Sequence",
    "Split",
    "UnicodeScripts",
    "Whitespace",
    "WhitespaceSplit",
}
"""Pre-tokenizers that process one piece at a time. Metaspace depends on whether a piece is the first of its text: all
our pieces but the first start with their special token, and the text after it is not the first there either."""

_IDLE_PROCESSORS = {"BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"}
"""Post-processors that do not change the ids when no special tokens are requested."""


def reason_against_cutting(tokenizer: Tokenizer) -> str | None:
    """Why `encode(a + b)` may differ from `encode(a) + encode(b)` where b starts with a special token; None: it
    cannot.

    A normalizer is applied to one piece between special tokens at a time.
    """
    if tokenizer.truncation is not None or tokenizer.padding is not None:
        return "it truncates or pads"
    if tokenizer.encode_special_tokens:
        return "it treats special tokens as text"
    if getattr(tokenizer.model, "dropout", None) or getattr(tokenizer.model, "alpha", None):
        return "its model samples"
    return _reason_in_tokens(tokenizer) or _reason_in_stages(tokenizer) or _reason_by_trial(tokenizer)


def _reason_in_tokens(tokenizer: Tokenizer) -> str | None:
    cuts = _cut_tokens(tokenizer)
    if not cuts:
        return "it has no special token to cut at"
    if max(map(len, cuts)) > _MAX_CUT_CHARS:
        return f"it has a special token of more than {_MAX_CUT_CHARS} characters"
    cut, heads = re.compile(longest_of(cuts)), {token[:end] for token in cuts for end in range(1, len(token))}
    for token in tokenizer.get_added_tokens_decoder().values():
        text = token.content
        if token.normalized or not text:
            continue  # matched only within a piece
        if token.rstrip and any(token[0].isspace() for token in cuts):
            return f"its token {text!r} strips white space, which may include the start of a special token"
        if token.single_word and any(token[0].isalnum() or token[0] == "_" for token in cuts):
            return f"its token {text!r} is a single word, which depends on the start of a special token"
        # The leftmost token wins, then the longest: a special token can only be replaced by a token that starts
        # earlier, or that starts with it.
        if text not in cuts and (cut.search(text) or any(text[n:] in heads for n in range(len(text)))):
            return f"its token {text!r} can include the start of a special token"
    return None


def _reason_in_stages(tokenizer: Tokenizer) -> str | None:
    try:
        _state(tokenizer.normalizer)
        pre_tokenizers = list(_parts(_state(tokenizer.pre_tokenizer), "pretokenizers"))
        processors = list(_parts(_state(tokenizer.post_processor), "processors"))
    except Exception as error:  # the library raises nothing more specific for a stage written in Python
        return f"a stage cannot be read: {error}"
    for stage in pre_tokenizers:
        if stage["type"] not in _PIECEWISE_PRE_TOKENIZERS:
            return f"its pre-tokenizer {stage['type']} is unknown"
    for stage in processors:
        if stage["type"] not in _IDLE_PROCESSORS:
            return f"its post-processor {stage['type']} is unknown"
        if stage["type"] == "TemplateProcessing" and sum("Sequence" in part for part in stage["single"]) != 1:
            return "its post-processor repeats or drops the text"
    return None


def _state(stage: Any) -> dict[str, Any] | None:
    return None if stage is None else json.loads(stage.__getstate__())


def _parts(stage: dict[str, Any] | None, children: str) -> Iterable[dict[str, Any]]:
    if stage is not None:
        yield stage
        for child in stage.get(children, ()):
            yield from _parts(child, children)


def _reason_by_trial(tokenizer: Tokenizer) -> str | None:
    """Test by example: the rules above are for one version of the library, newer ones are tested."""
    for token in _cut_tokens(tokenizer)[:16]:
        for before in ("", "a", "a ", "1\n", "é"):
            for after in ("", "a", " a", "\n\na", token):
                whole, left, right = (
                    tokenizer.encode(text, add_special_tokens=False).ids
                    for text in (before + token + after, before, token + after)
                )
                if whole != left + right:
                    return f"cutting {before + token + after!r} changed its tokens"
    return None
