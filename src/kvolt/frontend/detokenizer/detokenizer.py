"""From token ids to text, as they come: one Vocabulary for a model, one Detokenizer for a choice.

This runs once for each token of each stream. What a token says is worked out once and then looked up,
and most tokens are whole characters by themselves: those need no detokenizer at all, see `plain_json`.
Pure: no clock, no I/O.
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
    """One choice's text. All that `feed` gave and then `finish` is what batch decoding says."""

    clean: bool
    """Nothing is held back and the next token, where `plain_json` knows it, says just that. It may then
    go past `feed`, which need not be told. Never so when special tokens are shown: `plain_json` skips them."""

    def feed(self, token_id: int) -> str:
        """Text that is certain now; "" while a character is incomplete or for an id that names no token."""
        ...

    def finish(self) -> str:
        """What was held back, as batch decoding says it: U+FFFD for bytes that became no character."""
        ...


class _Decoding(Protocol):
    """A kind of decoder, with the tables for one vocabulary."""

    @property
    def plain_json(self) -> Mapping[int, bytes | None]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_text(self, token_id: int) -> str: ...

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer: ...


_INLINE_TOKENS = 4096


class Vocabulary:
    """A model's tokens, built once from its tokenizer.json."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self.tokenizer = Tokenizer.from_buffer(tokenizer_json)
        """To share: a second copy would cost tens of megabytes."""
        self.size = _vocabulary_size(self.tokenizer)
        """One more than the highest id; some vocabularies have holes below it."""
        tokens = Tokens(self.tokenizer)
        self.special_ids = tokens.special_ids
        self._decoding = _choose_decoding(self.tokenizer, tokens)
        self.plain_json = self._decoding.plain_json
        """By token id: the JSON-escaped text of a token that is whole by itself, b"" for special tokens
        and ids that name no token, None when only a Detokenizer can say. Fills as tokens are asked for:
        subscript it, nothing else. Holds for a Detokenizer that is `clean`."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """All at once; ids that name no token are skipped."""
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
        """The token's own bytes, also of a special one; b"" for an id that names no token."""
        return self._decoding.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """The token's own text as a log probability names it; U+FFFD for part of a character."""
        return self._decoding.token_text(token_id)

    def token_id(self, token: str) -> int | None:
        """Of a token as the tokenizer spells it: an added one is spelled as it is written."""
        return self.tokenizer.token_to_id(token)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        return self._decoding.detokenizer(skip_special_tokens)


def _vocabulary_size(tokenizer: Tokenizer) -> int:
    """Asks for each id, since a dict of the whole vocabulary would leave tens of megabytes behind."""
    num_tokens = tokenizer.get_vocab_size()
    if None in map(tokenizer.id_to_token, range(num_tokens)):
        return max(tokenizer.get_vocab().values(), default=-1) + 1
    return num_tokens


def _choose_decoding(tokenizer: Tokenizer, tokens: Tokens) -> _Decoding:
    if tokenizer.decoder is None:  # tokens joined by spaces
        return WindowDecoding(tokenizer, tokens)
    # The library's own spelling of it: files in the wild have older ones.
    steps = _flat(msgspec.json.decode(tokenizer.decoder.__getstate__()))
    names = [step["type"] for step in steps]
    if names[:1] == ["ByteLevel"] and set(names[1:]) <= {"Fuse"}:
        return ByteLevelDecoding(tokens)
    rules = read_rules(steps)
    return WindowDecoding(tokenizer, tokens) if rules is None else SentencePieceDecoding(tokens, rules)


def _flat(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """Decoders in the order in which they work."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flat(inner)]
