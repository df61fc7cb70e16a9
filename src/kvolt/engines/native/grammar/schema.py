"""Prepares JSON schemas for the grammar library.

The library bounds its work with a fuel limit, except for several patterns that apply to one string (each member of an
`allOf` may add one): its time grows exponentially with their number. It also recurses at each reference. Both are
bounded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from kvolt.core.errors import InvalidRequest

OPTIONS_KEY = "x-guidance"
"""Key of the library's options in a schema; clients may set some."""

DEFAULT_OPTIONS: Mapping[str, Any] = {"whitespace_pattern": r"\x20|\r?\n[\x20\t]{0,40}"}
"""Whitespace between JSON tokens: at most a space, or a line break and an indent. With unlimited whitespace
weak models generate nothing else."""

_KNOWN_FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"]
)
_DATA = frozenset(["enum", "const", "default", "examples", "example"])
"""Keywords whose values are data, not schemas."""
_BY_NAME = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
"""Keywords whose values are schemas under names, which may look like keywords."""


_MAX_PATTERNS = 10
"""Most patterns that may apply to one string."""
_MAX_DEPTH = 250
"""Deepest nesting of schemas, including references."""


def prepared_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with default options and without formats that the library does not know.

    In JSON Schema an unknown `format` is an annotation; the library would reject it.
    """
    if _PatternCounter(schema).count(schema, 0) > _MAX_PATTERNS:
        raise InvalidRequest(
            f"more than {_MAX_PATTERNS} patterns of the schema apply to one string", param="grammar"
        )
    client_options = schema.get(OPTIONS_KEY)
    options = {**DEFAULT_OPTIONS, **(client_options if isinstance(client_options, dict) else {})}
    return {**_without_unknown_formats(schema), OPTIONS_KEY: options}


def _without_unknown_formats(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_unknown_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _clean_value(key, value)
        for key, value in schema.items()
        if not (key == "format" and isinstance(value, str) and value not in _KNOWN_FORMATS)
    }


def _clean_value(key: str, value: Any) -> Any:
    if key in _DATA:
        return value
    if key in _BY_NAME and isinstance(value, dict):
        return {name: _without_unknown_formats(schema) for name, schema in value.items()}
    return _without_unknown_formats(value)


class _PatternCounter:
    """Upper bound of the number of patterns that apply to one string."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, int] = {}

    def count(self, schema: Any, depth: int) -> int:
        if not isinstance(schema, dict):
            return 0
        if depth > _MAX_DEPTH:
            raise InvalidRequest(f"the schema is nested more than {_MAX_DEPTH} levels deep", param="grammar")
        known = self._known.get(id(schema))
        if known is not None:
            return known
        self._known[id(schema)] = 0  # a recursive reference adds nothing
        num_patterns = ("pattern" in schema) + ("format" in schema)
        deepest = 0
        for key, value in schema.items():
            if key in _DATA:
                continue
            if key == "allOf" and isinstance(value, list):
                for member in value:
                    num_patterns += self.count(member, depth + 1)
            elif key == "$ref":
                num_patterns += self.count(self._target(value), depth + 1)
            elif isinstance(value, dict | list):
                parts = value if isinstance(value, list) else value.values() if key in _BY_NAME else [value]
                for part in parts:
                    deepest = max(deepest, self.count(part, depth + 1))
        self._known[id(schema)] = num_patterns + deepest
        return num_patterns + deepest

    def _target(self, reference: object) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise InvalidRequest("a schema may only refer to its own parts: #/...", param="grammar")
        target: Any = self._root
        for step in unquote(reference[1:]).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, dict) and name in target:
                target = target[name]
            else:
                raise InvalidRequest(f"the schema has no {reference[:80]!r}", param="grammar")
        return target
