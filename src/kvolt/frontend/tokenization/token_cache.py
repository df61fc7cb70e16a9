"""Text to token ids, with every piece between special tokens remembered.

A chat comes back with each turn, longer by an answer and a question. Special tokens are taken out of a
text before anything else is done with it, so what lies between two of them has the same ids in every
text. The text is cut before each special token, known pieces are looked up by their text, and only the
others are tokenized, by their words where `word_encoder` can do that.

Pieces and not prefixes: an entry for a prefix would hold the whole chat again for each turn, and would be
worth nothing when a template rewrites an earlier turn (dropped reasoning does that).

Whether the cut is exact for a tokenizer is decided once. Where it is not certain, nothing is cut or kept.
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
"""In a text of more special tokens the rest is one piece: a text of nothing else must not fill the cache."""

_MAX_SHARE = 8
"""No text may bring in more than this part of the cache."""

_ENTRY_BYTES = 200
"""What the two tables and the entry's own tuple take beside the text and the ids."""

_PACKED_BYTES = array("I").itemsize

_MAX_CUT_CHARS = 256


@dataclass(slots=True)
class EncoderStats:
    """Counters since the start, in pieces and in tokens, and what is held now.

    The few words between two markers are a piece as well, so pieces flatter: tokens say what was saved.
    """

    hits: int = 0
    misses: int = 0
    cached_tokens: int = 0
    uncached_tokens: int = 0
    evictions: int = 0
    entries: int = 0
    bytes: int = 0


class CachedEncoder:
    """A tokenizer that does not do the same piece of text twice while it remembers it.

    Any thread may call it: a lock is held while pieces are looked up and kept, never while tokenizing,
    and tokenizing itself goes without the interpreter lock. Two threads that miss the same piece at the
    same moment both tokenize it.

    A piece seen once is kept for the next turn, but can only push out others seen once. At its second use
    it moves to a part of its own, of up to half the bytes, where the least recently used goes back among
    the others: prompts that never come again cannot displace the chats and system prompts that do.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int, by_words: bool = True) -> None:
        self._tokenizer = tokenizer
        self.note = reason_against_cutting(tokenizer)
        """Why nothing is cut and kept, or None."""
        self.exact = self.note is None
        """Cutting at special tokens gives what the whole text gives; if not, each text is tokenized whole."""
        self._cut = re.compile(longest_of(_cut_tokens(tokenizer))) if self.exact else None
        document = json.loads(tokenizer.to_str()) if self.exact else None
        self._words = WordEncoder.of(tokenizer, document) if document is not None and by_words else None
        self._bounded = BoundedTokenizer(tokenizer, document)
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._once: OrderedDict[str, tuple[array[int], int]] = OrderedDict()
        """Packed ids and the bytes they are booked with: most are never asked for again."""
        self._again: OrderedDict[str, tuple[tuple[int, ...], int]] = OrderedDict()
        """Ids ready to be joined, three times as fast as packed ones."""
        self._again_bytes = 0
        self.stats = EncoderStats()

    def encode(self, text: str, by_words: bool = True, max_tokens: int = maxsize) -> tuple[int, ...]:
        """The ids of `tokenizer.encode(text, add_special_tokens=False)`.

        By words is cheaper, but holds the interpreter lock: not for long texts in a thread. TooManyTokens when more
        than `max_tokens` would have to be made.
        """
        if self._cut is None:
            return self._encode_whole(text, max_tokens)
        starts = [match.start() for match in islice(self._cut.finditer(text), _MAX_CUTS)]
        if not starts or starts[0]:
            starts.insert(0, 0)
        pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
        with self._lock:
            found = [self._look_up(piece) for piece in pieces]
            self.stats.cached_tokens += sum(map(len, filter(None, found)))
            self._evict()
        if None not in found:
            return _joined(found)  # type: ignore[arg-type]
        missing = [piece for piece, ids in zip(pieces, found, strict=True) if ids is None]
        new = self._encode_new(missing, by_words, max_tokens)
        return _joined(new[piece] if ids is None else ids for piece, ids in zip(pieces, found, strict=True))

    def clear(self) -> None:
        """Forget all pieces; the counters stay."""
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
        found = [self._look_up_words(text) for text in texts]
        if None not in found:
            return found  # type: ignore[return-value]
        unknown = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        others = iter(self._bounded.tokenize(unknown, max_tokens))
        return [next(others) if ids is None else ids for ids in found]

    def _look_up_words(self, text: str) -> list[int] | None:
        """A piece by its words, if it is one that can be: a special token, if there is one, then plain text."""
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
        """One int object per id, so that an id in an entry or a prompt takes eight bytes, not thirty-six."""
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
        except IndexError:  # a vocabulary with holes has ids past its size
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
                break  # unpacked: millions of ids would hold the interpreter lock for long
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
    # Right only after tokenizing, which leaves a UTF-8 copy in a text that is not ASCII.
    return getsizeof(piece) + getsizeof(ids) + _ENTRY_BYTES


def _joined(pieces: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    ids: list[int] = []
    for piece in pieces:
        ids += piece
    return tuple(ids)


def _cut_tokens(tokenizer: Tokenizer) -> list[str]:
    """Special tokens found before all else, wherever they stand and without what stands before them."""
    return [
        token.content
        for token in tokenizer.get_added_tokens_decoder().values()
        if token.special and not (token.normalized or token.lstrip or token.single_word) and token.content
    ]


def longest_of(tokens: Iterable[str]) -> str:
    """A pattern for the longest token at a place; a trie, so a text full of "<" costs one step at each."""
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
"""They see one piece at a time. Metaspace asks whether a piece is the text's first: as each of ours but the
first starts with its special token, the text behind that token is not the first there either."""

_IDLE_PROCESSORS = {"BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"}
"""They leave the ids alone when no special tokens are asked for."""


def reason_against_cutting(tokenizer: Tokenizer) -> str | None:
    """Why `encode(a + b)` might not be `encode(a) + encode(b)` where b starts with a special token.

    A normalizer, whatever it does, gets one piece between special tokens at a time.
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
            continue  # looked for inside a piece only
        if token.rstrip and any(token[0].isspace() for token in cuts):
            return f"its token {text!r} takes the start of a special token for space beside it"
        if token.single_word and any(token[0].isalnum() or token[0] == "_" for token in cuts):
            return f"its token {text!r} takes the start of a special token for a letter beside it"
        # The leftmost token of a text wins, then the longest: only one that starts earlier can take a special
        # token's place, or one that starts with it.
        if text not in cuts and (cut.search(text) or any(text[n:] in heads for n in range(len(text)))):
            return f"its token {text!r} can swallow the start of a special token"
    return None


def _reason_in_stages(tokenizer: Tokenizer) -> str | None:
    try:
        _state(tokenizer.normalizer)
        pre_tokenizers = list(_parts(_state(tokenizer.pre_tokenizer), "pretokenizers"))
        processors = list(_parts(_state(tokenizer.post_processor), "processors"))
    except Exception as error:  # the library raises nothing narrower for a stage written in Python
        return f"a stage of it cannot be read: {error}"
    for stage in pre_tokenizers:
        if stage["type"] not in _PIECEWISE_PRE_TOKENIZERS:
            return f"its pre-tokenizer {stage['type']} is not known"
    for stage in processors:
        if stage["type"] not in _IDLE_PROCESSORS:
            return f"its post-processor {stage['type']} is not known"
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
    """The rules above are read from one version of the library; a newer one is tried, not trusted."""
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
