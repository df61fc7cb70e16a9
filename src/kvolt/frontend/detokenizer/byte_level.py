"""Byte-level BPE (GPT-2, Llama 3, Qwen, DeepSeek): every token is a byte string, and the text is their UTF-8
decoding.

Invalid UTF-8 becomes U+FFFD. Rust's lossy decoding and Python's "replace" both emit one per maximal subpart of a
character (Unicode 3.9, table 3-8), so decoding incrementally in Python equals the library's batch decoding.
"""

from __future__ import annotations

from codecs import utf_8_decode

from kvolt.frontend.detokenizer.tokens import Tokens, TokenTable, json_escaped


def _symbol_bytes() -> dict[str, int]:
    """GPT-2's printable symbols for the 256 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    symbols = {chr(byte): byte for byte in printable}
    for shift, byte in enumerate(sorted(set(range(256)) - set(printable))):
        symbols[chr(0x100 + shift)] = byte
    return symbols


_SYMBOL_BYTES = _symbol_bytes()


def token_bytes(token: str) -> bytes:
    """Bytes of a token. A token with a character that is not a byte symbol (some added tokens) is its own UTF-8."""
    try:
        return bytes(map(_SYMBOL_BYTES.__getitem__, token))
    except KeyError:
        return token.encode()


def _complete_text(token: str) -> str | None:
    try:
        return token_bytes(token).decode()
    except UnicodeDecodeError:
        return None


def _complete_json(token: str) -> bytes | None:
    text = _complete_text(token)
    return None if text is None else json_escaped(text)


class ByteLevelDecoding:
    """Tables shared by all detokenizers of a byte-level vocabulary."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self.plain_json = TokenTable[bytes | None](tokens, _complete_json, b"", True)
        self._tables = {skip: _Tables(tokens, skip) for skip in (True, False)}

    def token_bytes(self, token_id: int) -> bytes:
        token = self._tokens.get(token_id)
        return b"" if token is None else token_bytes(token)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def detokenizer(self, skip_special_tokens: bool) -> ByteLevelDetokenizer:
        return ByteLevelDetokenizer(self._tables[skip_special_tokens], skip_special_tokens)


class _Tables:
    def __init__(self, tokens: Tokens, skip_special: bool) -> None:
        self.texts = TokenTable[str | None](tokens, _complete_text, "", skip_special)
        """None for a token that starts or ends within a character."""
        self.data = TokenTable[bytes](tokens, token_bytes, b"", skip_special)
        """Filled by tokens that need the slow path."""


class ByteLevelDetokenizer:
    """Buffers at most three bytes: an incomplete character."""

    __slots__ = ("_data", "_held", "_skips", "_texts", "clean")

    def __init__(self, tables: _Tables, skip_special_tokens: bool) -> None:
        self._texts = tables.texts
        self._data = tables.data
        self._held = b""
        self._skips = skip_special_tokens
        self.clean = skip_special_tokens

    def feed(self, token_id: int) -> str:
        if not self._held:
            text = self._texts[token_id]
            if text is not None:
                return text
        data = self._held + self._data[token_id]
        text, num_used = utf_8_decode(data, "replace", False)
        self._held = data[num_used:]
        self.clean = self._skips and not self._held
        return text

    def finish(self) -> str:
        text = self._held.decode(errors="replace")
        self._held = b""
        self.clean = self._skips
        return text
