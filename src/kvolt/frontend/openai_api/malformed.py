"""Error messages for bodies that cannot be decoded: what is wrong, and in which field.

Runs only for rejected requests, in time that does not depend on the text after the error.
"""

from __future__ import annotations

import re

import msgspec

from kvolt.core.errors import InvalidRequest

_SCAN_BYTES = 1024 * 1024
"""An error beyond this position is reported without its field."""
_SCAN_TOKENS = 20_000
_SURROGATE_WINDOW = 16
_MAX_NAME_CHARS = 64
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


def decoding_error(body: bytes, error: Exception) -> InvalidRequest:
    """InvalidRequest for a decoding error of msgspec."""
    if isinstance(error, msgspec.ValidationError):
        return _wrong_value(str(error))
    if isinstance(error, RecursionError):
        return _located("the body is nested too deeply", _path_at(body, len(body), max_depth=_DEEP))
    return _not_json(body, str(error))


def not_utf8(body: bytes, position: int) -> InvalidRequest:
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
