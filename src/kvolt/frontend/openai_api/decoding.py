"""Decodes request bodies into typed requests, and finds unknown top-level fields.

A duplicate top-level field is rejected, since a gateway might read another value. In nested objects the last value
wins, as in most JSON parsers.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import msgspec

from kvolt.core.errors import InvalidRequest
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
            raise _not_utf8(body, position)
        try:
            request = self._decoder.decode(body)
            names = _field_names(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _decoding_error(body, error) from error
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


# --- error messages: what is wrong, and in which field
#
# Run only for rejected requests, in time that does not depend on the text after the error.

_SCAN_BYTES = 1024 * 1024
"""An error beyond this position is reported without its field."""
_SCAN_TOKENS = 20_000
_SURROGATE_WINDOW = 16
_MAX_PROBLEM_CHARS = 200
_MAX_PATH_CHARS = 256
_DEEP = 64

_TOKEN = re.compile(rb'"(?:[^"\\]+|\\.)*+"?|[{}\[\],:]', re.DOTALL)
_BYTE = re.compile(r"\(byte (\d+)\)")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_PATH = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
_TYPES = re.compile(r"`([a-z |]+)`")
_MISSING = re.compile(r"^Object missing required field `(.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)

_TYPE_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
    "null": "null",
}

_KNOWN_VALUES = (
    (re.compile(r"messages\[\d+\]\.role"), "system, developer, user, assistant, tool, function"),
    (re.compile(r"messages\[\d+\]\.content\[\d+\]\.type"), "text, image_url, input_audio, video_url, file"),
    (re.compile(r"response_format\.type"), "text, json_object, json_schema, structural_tag"),
    (re.compile(r"reasoning_effort"), "none, minimal, low, medium, high, xhigh, max"),
    (re.compile(r"verbosity"), "low, medium, high"),
    (re.compile(r"thinking\.type"), "enabled, disabled, adaptive, auto"),
    (re.compile(r"tool_choice\.allowed_tools\.mode"), "auto, required"),
)


def _decoding_error(body: bytes, error: Exception) -> InvalidRequest:
    """InvalidRequest for a decoding error of msgspec."""
    if isinstance(error, msgspec.ValidationError):
        return _wrong_value(str(error))
    if isinstance(error, RecursionError):
        return _located("the body is nested too deeply", _path_at(body, len(body), max_depth=_DEEP))
    return _not_json(body, str(error))


def _not_utf8(body: bytes, position: int) -> InvalidRequest:
    return _located(f"the body is not valid UTF-8 (byte {position})", _path_at(body, position))


def _located(message: str, param: str | None) -> InvalidRequest:
    return InvalidRequest(f"{param}: {message}" if param else message, param=param)


def _wrong_value(text: str) -> InvalidRequest:
    """Parse msgspec's "Expected `int`, got `str` - at `$.messages[0].content`" into a message and a param."""
    path_match = _PATH.search(text)
    param = path_match["path"].replace("[...]", "") if path_match else ""
    problem = text[: path_match.start()] if path_match else text
    for pattern, message in ((_MISSING, "is required"), (_UNKNOWN, "is not a known field")):
        if field_match := pattern.match(problem):
            name = field_match[1][:_MAX_NAME_CHARS]
            param = f"{param}.{name}" if param else name
            return InvalidRequest(f"{param} {message}", param=param)
    if problem.startswith("Invalid"):
        problem = problem[:_MAX_PROBLEM_CHARS]
        problem += next((f"; known: {names}" for known, names in _KNOWN_VALUES if known.fullmatch(param)), "")
    else:
        problem = _TYPES.sub(_type_names, problem.replace(", got `float`", ", got a decimal number"))
    if not param:
        return InvalidRequest(f"the body must be a JSON object: {problem}", param=None)
    subject = f"a key of {param}" if path_match and path_match["key"] else param
    return InvalidRequest(f"{subject}: {problem[0].lower()}{problem[1:]}", param=param)


def _type_names(types: re.Match[str]) -> str:
    names = types[1].split(" | ")
    return " or ".join(_TYPE_NAMES[name] for name in names) if all(map(_TYPE_NAMES.get, names)) else types[0]


def _not_json(body: bytes, text: str) -> InvalidRequest:
    byte = _BYTE.search(text)
    offset = int(byte[1]) if byte else len(body)
    start = max(0, offset - _SURROGATE_WINDOW)
    if escape := _SURROGATE_ESCAPE.search(body, start, offset + _SURROGATE_WINDOW):
        message = f"a \\u escape is an unpaired surrogate (byte {escape.start()})"
        return _located(message, _path_at(body, escape.start()))
    if not byte:
        text = "the body is empty" if not body.strip() else f"unexpected end of JSON (byte {offset})"
    return _located(text, _path_at(body, offset))


def _path_at(body: bytes, offset: int, max_depth: int | None = None) -> str | None:
    """Path of the value at a byte offset, such as `messages[0].content`.

    With `max_depth`: the first top-level field that is nested deeper.
    """
    if offset > _SCAN_BYTES and max_depth is None:
        return None
    path_parts: list[str | int] = []
    text = b""
    for count, token in enumerate(_TOKEN.finditer(body, 0, min(offset + 1, _SCAN_BYTES))):
        kind = body[token.start()]
        if count > _SCAN_TOKENS:
            return None
        if kind == ord('"'):
            text = token[0]
        elif kind == ord("{"):
            path_parts.append("")
        elif kind == ord("["):
            path_parts.append(0)
        elif kind in b"}]":
            if path_parts:
                path_parts.pop()
        elif path_parts:
            last = path_parts[-1]
            if kind == ord(":") and isinstance(last, str):
                path_parts[-1] = _name(text)
            elif kind == ord(","):
                path_parts[-1] = last + 1 if isinstance(last, int) else ""
        if max_depth is not None and len(path_parts) > max_depth:
            return _format_path(path_parts[:1])
    return _format_path(path_parts) if max_depth is None else None


def _name(token: bytes) -> str:
    text = token.strip(b'"')[:_MAX_NAME_CHARS].decode("utf-8", "replace")
    return text if text.isprintable() else ascii(text)[1:-1]


def _format_path(path_parts: list[str | int]) -> str | None:
    path = ""
    for path_match in path_parts:
        if isinstance(path_match, int):
            path += f"[{path_match}]"
        elif path_match:
            path += f".{path_match}" if path else path_match
    return path[:_MAX_PATH_CHARS] or None
