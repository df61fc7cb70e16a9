"""Putting one JSON schema inside another without breaking its references."""

from __future__ import annotations

from typing import Any

_NAMED = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
"""Keywords whose keys are names of the caller's, not keywords."""
_DATA = frozenset(("const", "default", "enum", "example", "examples"))
"""Keywords that hold values, in which `$ref` would be a word like any other."""


def has_refs(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(has_refs, schema))
    if isinstance(schema, dict):
        return isinstance(schema.get("$ref"), str) or any(map(has_refs, schema.values()))
    return False


def moved(schema: Any, to: str) -> Any:
    """A copy whose local references still point into it when it stands at the pointer `to` of another."""
    if isinstance(schema, list):
        return [moved(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _moved_value(key, value, to) for key, value in schema.items()}


def _moved_value(key: str, value: Any, to: str) -> Any:
    if key == "$ref" and isinstance(value, str):
        return f"{to}{value[1:]}"
    if key in _NAMED and isinstance(value, dict):
        return {name: moved(below, to) for name, below in value.items()}
    return value if key in _DATA else moved(value, to)
