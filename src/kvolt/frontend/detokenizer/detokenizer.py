"""Incremental conversion of token ids to text: a Vocabulary per model, a Detokenizer per choice.

Runs once per token of each stream. The text of a token is computed once and then looked up. Most tokens are complete
characters, which need no Detokenizer: see `plain_json`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer

from kvolt.frontend.detokenizer.byte_level import ByteLevelDecoding
from kvolt.frontend.detokenizer.sentencepiece import SentencePieceDecoding, read_rules
from kvolt.frontend.detokenizer.tokens import Tokens
from kvolt.frontend.detokenizer.window import WindowDecoding


class Detokenizer(Protocol):
    """Text of one choice. The joined results of `feed` and `finish` equal batch decoding."""

    clean: bool
    """Nothing is buffered, and the text of the next token is as in `plain_json`, so that `feed` may be skipped. Never
    set when special tokens are shown, because `plain_json` omits them."""

    def feed(self, token_id: int) -> str:
        """Add a token; returns the text that is certain: "" within a character or for an unknown id."""
        ...

    def finish(self) -> str:
        """Return the buffered text as in batch decoding: U+FFFD for incomplete characters."""
        ...


_Decoding = ByteLevelDecoding | SentencePieceDecoding | WindowDecoding

_INLINE_TOKENS = 4096


class Vocabulary:
    """Tokens of a model, built once from its tokenizer.json."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self.tokenizer = Tokenizer.from_buffer(tokenizer_json)
        """Shared, since a second copy would take tens of megabytes."""
        self.size = _vocabulary_size(self.tokenizer)
        """Highest id plus one; some vocabularies have holes."""
        tokens = Tokens(self.tokenizer)
        self.special_ids = tokens.special_ids
        self._decoding = _choose_decoding(self.tokenizer, tokens)
        self.plain_json: Mapping[int, bytes | None] = self._decoding.plain_json
        """By token id: JSON-escaped text of a token that is complete by itself, b"" for special tokens and unknown
        ids, None if a Detokenizer is needed. Filled on lookup: use only subscripts. Valid while the Detokenizer is
        `clean`."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode a sequence; unknown ids are skipped."""
        try:
            return self._decode(token_ids, skip_special_tokens)
        except OverflowError:
            fitting = [token_id for token_id in token_ids if 0 <= token_id < self.size]
            return self._decode(fitting, skip_special_tokens)

    def _decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        if len(token_ids) <= _INLINE_TOKENS:
            return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        # The batch call releases the interpreter lock.
        [text] = self.tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of a token, including special ones; b"" for an unknown id."""
        return self._decoding.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """Text of a token for log probabilities; U+FFFD for part of a character."""
        return self._decoding.token_text(token_id)

    def token_id(self, token: str) -> int | None:
        """Id of a token as spelled by the tokenizer; added tokens are spelled as written."""
        return self.tokenizer.token_to_id(token)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        return self._decoding.detokenizer(skip_special_tokens)


def _vocabulary_size(tokenizer: Tokenizer) -> int:
    """Tests each id, because a dict of the whole vocabulary would leave tens of megabytes allocated."""
    num_tokens = tokenizer.get_vocab_size()
    if None in map(tokenizer.id_to_token, range(num_tokens)):
        return max(tokenizer.get_vocab().values(), default=-1) + 1
    return num_tokens


def _choose_decoding(tokenizer: Tokenizer, tokens: Tokens) -> _Decoding:
    if tokenizer.decoder is None:  # tokens joined by spaces
        return WindowDecoding(tokenizer, tokens)
    # Normalized by the library: older files have other spellings.
    steps = _flat(msgspec.json.decode(tokenizer.decoder.__getstate__()))
    names = [step["type"] for step in steps]
    if names[:1] == ["ByteLevel"] and set(names[1:]) <= {"Fuse"}:
        return ByteLevelDecoding(tokens)
    rules = read_rules(steps)
    return WindowDecoding(tokenizer, tokens) if rules is None else SentencePieceDecoding(tokens, rules)


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """Decoders in order of application."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flat(inner)]
