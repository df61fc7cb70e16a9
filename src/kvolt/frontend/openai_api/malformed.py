"""Words for a body that could not be decoded: what is wrong, and in which field.

Runs only when a request is refused, in time that does not grow with what follows the mistake.
"""

from __future__ import annotations

import re

import msgspec

from kvolt.core.errors import InvalidRequest

_SCAN_BYTES = 1024 * 1024
"""A mistake further behind is reported without its field."""
_SCAN_TOKENS = 20_000
_SURROGATE_WINDOW = 16
_MAX_NAME_CHARS = 64
_MAX_WHAT_CHARS = 200
_MAX_PATH_CHARS = 256
_DEEP = 64

_TOKEN = re.compile(rb'"(?:[^"\\]+|\\.)*+"?|[{}\[\],:]', re.DOTALL)
_BYTE = re.compile(r"\(byte (\d+)\)")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_PLACE = re.compile(r" - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`$")
_TYPES = re.compile(r"`([a-z |]+)`")
_MISSING = re.compile(r"^Object missing required field `(.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.DOTALL)

_WORDS = {
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


def refusal(body: bytes, error: Exception) -> InvalidRequest:
    """What to tell the caller about an error of msgspec's decoder."""
    if isinstance(error, msgspec.ValidationError):
        return _wrong_value(str(error))
    if isinstance(error, RecursionError):
        return _located("the body nests too deep", _path_at(body, len(body), max_depth=_DEEP))
    return _not_json(body, str(error))


def not_utf8(body: bytes, position: int) -> InvalidRequest:
    return _located(f"the body is not valid UTF-8 (byte {position})", _path_at(body, position))


def _located(message: str, param: str | None) -> InvalidRequest:
    return InvalidRequest(f"{param}: {message}" if param else message, param=param)


def _wrong_value(text: str) -> InvalidRequest:
    """msgspec's "Expected `int`, got `str` - at `$.messages[0].content`", with the place as param."""
    place = _PLACE.search(text)
    param = place["path"].replace("[...]", "") if place else ""
    what = text[: place.start()] if place else text
    for pattern, message in ((_MISSING, "is required"), (_UNKNOWN, "is not a known field")):
        if found := pattern.match(what):
            name = found[1][:_MAX_NAME_CHARS]
            param = f"{param}.{name}" if param else name
            return InvalidRequest(f"{param} {message}", param=param)
    if what.startswith("Invalid"):
        what = what[:_MAX_WHAT_CHARS]
        what += next((f"; known: {names}" for known, names in _KNOWN_VALUES if known.fullmatch(param)), "")
    else:
        what = _TYPES.sub(_in_words, what.replace(", got `float`", ", got a decimal number"))
    if not param:
        return InvalidRequest(f"the body must be a JSON object: {what}", param=None)
    subject = f"a key of {param}" if place and place["key"] else param
    return InvalidRequest(f"{subject}: {what[0].lower()}{what[1:]}", param=param)


def _in_words(types: re.Match[str]) -> str:
    names = types[1].split(" | ")
    return " or ".join(_WORDS[name] for name in names) if all(map(_WORDS.get, names)) else types[0]


def _not_json(body: bytes, text: str) -> InvalidRequest:
    byte = _BYTE.search(text)
    offset = int(byte[1]) if byte else len(body)
    start = max(0, offset - _SURROGATE_WINDOW)
    if escape := _SURROGATE_ESCAPE.search(body, start, offset + _SURROGATE_WINDOW):
        message = f"a \\u escape is half of a surrogate pair, which is no character (byte {escape.start()})"
        return _located(message, _path_at(body, escape.start()))
    if not byte:
        text = "the body is empty" if not body.strip() else f"the JSON ends too early (byte {offset})"
    return _located(text, _path_at(body, offset))


def _path_at(body: bytes, offset: int, max_depth: int | None = None) -> str | None:
    """The path of the value at a byte, as `messages[0].content`.

    With max_depth: the name of the first top-level field that nests deeper.
    """
    if offset > _SCAN_BYTES and max_depth is None:
        return None
    places: list[str | int] = []
    text = b""
    for count, token in enumerate(_TOKEN.finditer(body, 0, min(offset + 1, _SCAN_BYTES))):
        kind = body[token.start()]
        if count > _SCAN_TOKENS:
            return None
        if kind == ord('"'):
            text = token[0]
        elif kind == ord("{"):
            places.append("")
        elif kind == ord("["):
            places.append(0)
        elif kind in b"}]":
            if places:
                places.pop()
        elif places:
            last = places[-1]
            if kind == ord(":") and isinstance(last, str):
                places[-1] = _name(text)
            elif kind == ord(","):
                places[-1] = last + 1 if isinstance(last, int) else ""
        if max_depth is not None and len(places) > max_depth:
            return _spell(places[:1])
    return _spell(places) if max_depth is None else None


def _name(token: bytes) -> str:
    text = token.strip(b'"')[:_MAX_NAME_CHARS].decode("utf-8", "replace")
    return text if text.isprintable() else ascii(text)[1:-1]


def _spell(places: list[str | int]) -> str | None:
    path = ""
    for place in places:
        if isinstance(place, int):
            path += f"[{place}]"
        elif place:
            path += f".{place}" if path else place
    return path[:_MAX_PATH_CHARS] or None
