"""Decodes request bodies into typed requests, and finds unknown top-level fields.

A duplicate top-level field is rejected, since a gateway might read another value. In nested objects the last value
wins, as in most JSON parsers.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.openai_api.malformed import decoding_error, not_utf8
from kvolt.frontend.openai_api.structure import check_structure, not_utf8_at

_MAX_FIELDS = 1024
_MAX_UNKNOWN = 32
_MAX_NAME_CHARS = 64
SMALL_BODY_BYTES = 64 * 1024
"""Larger bodies take milliseconds to decode and validate, so they are processed off the event loop."""

T = TypeVar("T", bound=msgspec.Struct)


class Parsed(msgspec.Struct, Generic[T], frozen=True):
    """A request that passed all checks that do not need the model."""

    request: T
    unknown: tuple[str, ...] = ()
    """Unknown top-level fields: printable, truncated, at most 32; safe in a header."""
    is_large: bool = False
    """The body exceeds SMALL_BODY_BYTES: work proportional to the request stays off the event loop."""


class _Field:
    """One top-level field name. Compared by identity, so that duplicates are counted."""

    __slots__ = ("name",)

    def __init__(self, kind: type, name: Any) -> None:
        """Called by msgspec for types that it does not know."""
        self.name: str = name


_Fields = dict[_Field, msgspec.Raw]

_fields_decoder = msgspec.json.Decoder(_Fields, dec_hook=_Field)


class RequestDecoder(Generic[T]):
    """Decoder of one request type."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._known = frozenset(kind.__struct_encode_fields__)

    def decode(self, body: bytes) -> Parsed[T]:
        """Decode a body. The first pass skips unknown fields; a second pass reads only top-level names."""
        check_structure(body)
        if (position := not_utf8_at(body)) is not None:
            raise not_utf8(body, position)
        try:
            request = self._decoder.decode(body)
            names = _field_names(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise decoding_error(body, error) from error
        known = self._known
        distinct = known.intersection(names)
        is_large = len(body) > SMALL_BODY_BYTES
        if len(distinct) == len(names):
            return Parsed(request, (), is_large)
        return Parsed(request, self._unknown(names), is_large)

    def _unknown(self, names: list[str]) -> tuple[str, ...]:
        seen: set[str] = set()
        for name in names:
            if name in seen:
                name_text = _printable(name)
                raise InvalidRequest(f"duplicate field {name_text}", param=name_text)
            seen.add(name)
        return tuple(_printable(name) for name in names if name not in self._known)[:_MAX_UNKNOWN]


def _field_names(body: bytes) -> list[str]:
    if len(body) <= SMALL_BODY_BYTES:
        return [field.name for field in _fields_decoder.decode(body)]
    return _bounded_field_names(body)


def _bounded_field_names(body: bytes) -> list[str]:
    """Top-level names of a large body; rejects one with millions of tiny fields before it fills the memory."""
    names: list[str] = []

    def count(kind: type, name: Any) -> _Field:
        names.append(name)
        if len(names) > _MAX_FIELDS:
            raise InvalidRequest(f"the body has more than {_MAX_FIELDS} fields", param=None)
        return _Field(kind, name)

    msgspec.json.Decoder(_Fields, dec_hook=count).decode(body)
    return names


def _printable(name: str) -> str:
    return ascii(name)[1:-1][:_MAX_NAME_CHARS]
