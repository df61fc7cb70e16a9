"""From bytes to a typed request, and the names of the top-level fields that nobody knows.

A top-level field given twice is refused: a gateway and we might read different ones. Deeper inside, the
last one counts, as with every reader of JSON.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.openai_api.malformed import not_utf8, refusal
from kvolt.frontend.openai_api.structure import check_structure, not_utf8_at

_MAX_FIELDS = 1024
_MAX_UNKNOWN = 32
_MAX_NAME_CHARS = 64
SMALL_BODY_BYTES = 64 * 1024
"""A larger body takes milliseconds to parse and check: not on an event loop."""

T = TypeVar("T", bound=msgspec.Struct)


class Parsed(msgspec.Struct, Generic[T], frozen=True):
    """A request that passed every check that needs no model."""

    request: T
    unknown: tuple[str, ...] = ()
    """Top-level fields that are not known: printable, cut to length, 32 at most; fit for a header."""
    is_large: bool = False
    """Over SMALL_BODY_BYTES. What takes time in proportion to the request stays off the event loop."""


class _Field:
    """One top-level name. Without an equality of its own, so that a name given twice is seen twice."""

    __slots__ = ("name",)

    def __init__(self, kind: type, name: Any) -> None:
        """As msgspec calls its hook for a type that it does not know."""
        self.name: str = name


_Fields = dict[_Field, msgspec.Raw]

_fields_decoder = msgspec.json.Decoder(_Fields, dec_hook=_Field)


class RequestDecoder(Generic[T]):
    """Decodes one kind of request."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._known = frozenset(kind.__struct_encode_fields__)

    def decode(self, body: bytes) -> Parsed[T]:
        """Unknown fields are skipped by the first pass; the second reads only the top-level names."""
        check_structure(body)
        if (position := not_utf8_at(body)) is not None:
            raise not_utf8(body, position)
        try:
            request = self._decoder.decode(body)
            names = _field_names(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise refusal(body, error) from error
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
                shown = _shown(name)
                raise InvalidRequest(f"the field {shown} is given more than once", param=shown)
            seen.add(name)
        return tuple(_shown(name) for name in names if name not in self._known)[:_MAX_UNKNOWN]


def _field_names(body: bytes) -> list[str]:
    if len(body) <= SMALL_BODY_BYTES:
        return [field.name for field in _fields_decoder.decode(body)]
    return _bounded_field_names(body)


def _bounded_field_names(body: bytes) -> list[str]:
    """Millions of tiny fields are refused before they fill the memory."""
    names: list[str] = []

    def count(kind: type, name: Any) -> _Field:
        names.append(name)
        if len(names) > _MAX_FIELDS:
            raise InvalidRequest(f"the body has more than {_MAX_FIELDS} fields", param=None)
        return _Field(kind, name)

    msgspec.json.Decoder(_Fields, dec_hook=count).decode(body)
    return names


def _shown(name: str) -> str:
    return ascii(name)[1:-1][:_MAX_NAME_CHARS]
