"""JSON schemas as the grammar library takes them.

The library bounds its work by fuel, but not where several patterns hold for one string (each member of an
`allOf` may bring one): the time for that grows exponentially with their number. It also calls itself at
each reference. So both are bounded here, whoever made the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from kvolt.core.errors import InvalidRequest

OPTIONS_KEY = "x-guidance"
"""Under this a schema may carry options of the library: a client may know it and set some."""

DEFAULT_OPTIONS: Mapping[str, Any] = {"whitespace_pattern": r"\x20|\r?\n[\x20\t]{0,40}"}
"""Between tokens of JSON at most a space, or a line break and an indent: with any whitespace allowed a weak
model writes nothing else."""

_KNOWN_FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"]
)
_DATA = frozenset(["enum", "const", "default", "examples", "example"])
"""Keywords whose values are data, not schemas."""
_BY_NAME = frozenset(["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"])
"""Keywords whose values are schemas under names, which may look like keywords."""


_MAX_PATTERNS = 10
"""That may hold for one string."""
_MAX_DEPTH = 250
"""Of schemas within schemas, references followed."""


def prepared_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """With our options where the schema sets none, and without formats that the library does not know.

    A `format` is a remark unless it is understood, so JSON Schema says; the library refuses what it does not.
    """
    if _Weigher(schema).weigh(schema, 0) > _MAX_PATTERNS:
        raise InvalidRequest(
            f"the schema lets more than {_MAX_PATTERNS} patterns hold for one string", param="grammar"
        )
    own = schema.get(OPTIONS_KEY)
    options = {**DEFAULT_OPTIONS, **(own if isinstance(own, dict) else {})}
    return {**_without_unknown_formats(schema), OPTIONS_KEY: options}


def _without_unknown_formats(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_unknown_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _inside(key, value)
        for key, value in schema.items()
        if not (key == "format" and isinstance(value, str) and value not in _KNOWN_FORMATS)
    }


def _inside(key: str, value: Any) -> Any:
    if key in _DATA:
        return value
    if key in _BY_NAME and isinstance(value, dict):
        return {name: _without_unknown_formats(schema) for name, schema in value.items()}
    return _without_unknown_formats(value)


class _Weigher:
    """How many patterns can come to hold for one string at most. Errs on the side of too many."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[int, int] = {}

    def weigh(self, schema: Any, depth: int) -> int:
        if not isinstance(schema, dict):
            return 0
        if depth > _MAX_DEPTH:
            raise InvalidRequest(f"the schema goes deeper than {_MAX_DEPTH} levels", param="grammar")
        known = self._known.get(id(schema))
        if known is not None:
            return known
        self._known[id(schema)] = 0  # a reference back to it adds nothing
        weight = ("pattern" in schema) + ("format" in schema)
        deepest = 0
        for key, value in schema.items():
            if key in _DATA:
                continue
            if key == "allOf" and isinstance(value, list):
                for member in value:
                    weight += self.weigh(member, depth + 1)
            elif key == "$ref":
                weight += self.weigh(self._target(value), depth + 1)
            elif isinstance(value, dict | list):
                parts = value if isinstance(value, list) else value.values() if key in _BY_NAME else [value]
                for part in parts:
                    deepest = max(deepest, self.weigh(part, depth + 1))
        self._known[id(schema)] = weight + deepest
        return weight + deepest

    def _target(self, reference: object) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            raise InvalidRequest("a schema may refer to its own parts only: #/...", param="grammar")
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
