"""Checks that a JSON schema can be converted to a grammar: relevant keywords valid, self-contained, bounded.

Not a full validator. Finds what an engine's grammar compiler cannot handle: unknown types, external references,
circular references.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.openai_api.structure import MAX_DEPTH, nests_deeper

MAX_SUBSCHEMAS = 10_000
MAX_SCHEMA_BYTES = 512 * 1024

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")

_IN_PLACE = ("allOf", "anyOf", "else", "if", "not", "oneOf", "then")
"""Keywords whose schemas apply to the same value, so they consume no text."""

_MAX_INT = 2**63 - 1
_INDEX = re.compile(r"[0-9]{1,6}")
_encode = msgspec.json.Encoder().encode

_NAMED = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
"""Keywords whose keys are property names, not keywords."""
_DATA = frozenset(("const", "default", "enum", "example", "examples"))
"""Keywords that contain values, in which `$ref` has no meaning."""


def schema_text(schema: dict[str, Any], param: str) -> str:
    """Encode a checked schema as compact JSON."""
    text = _encode(schema)
    if len(text) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"{param} has {len(text)} bytes; the limit is {MAX_SCHEMA_BYTES}", param=param)
    return text.decode()


def check_schema(schema: dict[str, Any], param: str) -> int:
    """Check a schema; returns the number of schemas in it, including itself. Raises InvalidRequest."""
    check = _SchemaCheck(schema)
    try:
        check.run()
    except _Unsupported as error:
        where = param + "".join(reversed(error.path))
        raise InvalidRequest(f"{where} is not a supported JSON schema: {error.reason}", param=where) from None
    return len(check.schemas)


class _Unsupported(Exception):
    """Collects its path while it propagates, so that a valid schema does not pay for paths."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.path: list[str] = []


class _SchemaCheck:
    __slots__ = ("references", "root", "schemas")

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.schemas: list[dict[str, Any]] = []
        self.references: list[str] = []

    def run(self) -> None:
        self.check(self.root, 0)
        if not self.references:
            return
        seen = {id(schema) for schema in self.schemas}
        for reference in self.references:  # grows while targets outside of $defs are checked
            target = self.resolve(reference)
            if id(target) not in seen:
                first = len(self.schemas)
                self.check(target, 0)
                seen.update(id(schema) for schema in self.schemas[first:])
        self.check_progress()

    def check(self, schema: Any, depth: int) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            raise _Unsupported("a schema must be an object or a boolean")
        if depth > MAX_DEPTH:
            raise _Unsupported(f"nested deeper than {MAX_DEPTH} levels")
        self.schemas.append(schema)
        if len(self.schemas) > MAX_SUBSCHEMAS:
            raise _Unsupported(f"more than {MAX_SUBSCHEMAS} subschemas")
        for key, value in schema.items():
            rule = _RULES.get(key)
            try:
                if rule is not None:
                    rule(self, value, depth)
                elif isinstance(value, dict | list) and nests_deeper(value, MAX_DEPTH):
                    raise _Unsupported(f"nested deeper than {MAX_DEPTH} levels")
            except _Unsupported as error:
                error.path.append(f".{key[:64]}")
                raise

    def check_named(self, value: Any, depth: int) -> None:
        if not isinstance(value, dict):
            raise _Unsupported("must be an object of schemas")
        for name, children in value.items():
            try:
                self.check(children, depth + 1)
            except _Unsupported as error:
                error.path.append(f".{name[:64]}")
                raise

    def check_list(self, value: Any, depth: int) -> None:
        if not isinstance(value, list) or not value:
            raise _Unsupported("must be a list with at least one schema")
        for index, children in enumerate(value):
            try:
                self.check(children, depth + 1)
            except _Unsupported as error:
                error.path.append(f"[{index}]")
                raise

    def check_one(self, value: Any, depth: int) -> None:
        self.check(value, depth + 1)

    def check_items(self, value: Any, depth: int) -> None:
        if isinstance(value, list):
            if value:
                self.check_list(value, depth)
        else:
            self.check(value, depth + 1)

    def check_type(self, value: Any, depth: int) -> None:
        names = value if isinstance(value, list) else (value,)
        if not names:
            raise _Unsupported("the list of types is empty")
        for name in names:
            if name not in TYPES:
                raise _Unsupported(f"{_short(name)} is not one of {', '.join(TYPES)}")

    def check_enum(self, value: Any, depth: int) -> None:
        if not isinstance(value, list) or not value:
            raise _Unsupported("must be a list with at least one value")
        if nests_deeper(value, MAX_DEPTH):
            raise _Unsupported(f"nested deeper than {MAX_DEPTH} levels")

    def check_required(self, value: Any, depth: int) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _Unsupported("must be a list of property names")

    def check_count(self, value: Any, depth: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT:
            raise _Unsupported("must be an integer from 0 to 2**63 - 1")

    def check_number(self, value: Any, depth: int) -> None:
        if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) > _MAX_INT):
            raise _Unsupported("must be a number; integers must fit in 63 bits")

    def check_text(self, value: Any, depth: int) -> None:
        if not isinstance(value, str):
            raise _Unsupported("must be a string")

    def check_reference(self, value: Any, depth: int) -> None:
        self.check_text(value, depth)
        self.resolve(value)
        self.references.append(value)

    def resolve(self, reference: str) -> Any:
        pointer = reference.partition("#")[2]
        if not reference.startswith("#") or (pointer and not pointer.startswith("/")):
            raise _Unsupported(f"{_short(reference)} must have the form #/$defs/NAME")
        target: Any = self.root
        for step in _steps(pointer):
            if isinstance(target, dict) and step in target:
                target = target[step]
            elif isinstance(target, list) and _INDEX.fullmatch(step) and int(step) < len(target):
                target = target[int(step)]
            else:
                raise _Unsupported(f"{_short(reference)} does not exist")
        return target

    def check_progress(self) -> None:
        """Reject cycles of schemas that apply to the same value and so never consume text."""
        same_value: dict[int, list[int]] = {}
        for schema in self.schemas:
            followers = [schema[key] for key in _IN_PLACE if key in schema]
            if "$ref" in schema:
                followers.append(self.resolve(schema["$ref"]))
            same_value[id(schema)] = [
                id(item) for each in followers for item in (each if isinstance(each, list) else [each])
            ]
        try:
            TopologicalSorter(same_value).prepare()
        except CycleError:
            raise _Unsupported("circular $ref that describes nothing") from None


_Rule = Callable[[_SchemaCheck, Any, int], None]


def _rules() -> dict[str, _Rule]:
    groups: tuple[tuple[_Rule, str], ...] = (
        (_SchemaCheck.check_type, "type"),
        (_SchemaCheck.check_enum, "enum"),
        (_SchemaCheck.check_required, "required"),
        (_SchemaCheck.check_reference, "$ref"),
        (_SchemaCheck.check_text, "format pattern"),
        (_SchemaCheck.check_named, "properties patternProperties $defs definitions dependentSchemas"),
        (_SchemaCheck.check_list, "allOf anyOf oneOf"),
        (_SchemaCheck.check_items, "items prefixItems"),
        (_SchemaCheck.check_one, "additionalItems additionalProperties contains else if not propertyNames"),
        (_SchemaCheck.check_one, "then unevaluatedItems unevaluatedProperties"),
        (_SchemaCheck.check_count, "maxContains maxItems maxLength maxProperties"),
        (_SchemaCheck.check_count, "minContains minItems minLength minProperties"),
        (_SchemaCheck.check_number, "exclusiveMaximum exclusiveMinimum maximum minimum multipleOf"),
    )
    return {key: rule for rule, keys in groups for key in keys.split()}


_RULES = _rules()


def _steps(pointer: str) -> Iterator[str]:
    for step in pointer.split("/")[1:]:
        yield unquote(step).replace("~1", "/").replace("~0", "~")


def _short(value: Any) -> str:
    return repr(value[:80]) if isinstance(value, str) else f"a {type(value).__name__}"


def has_refs(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(has_refs, schema))
    if isinstance(schema, dict):
        return isinstance(schema.get("$ref"), str) or any(map(has_refs, schema.values()))
    return False


def relocate_refs(schema: Any, to: str) -> Any:
    """Copy of a schema whose local references are valid when it is placed at the pointer `to` of another schema."""
    if isinstance(schema, list):
        return [relocate_refs(item, to) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _relocate_value(key, value, to) for key, value in schema.items()}


def _relocate_value(key: str, value: Any, to: str) -> Any:
    if key == "$ref" and isinstance(value, str):
        return f"{to}{value[1:]}"
    if key in _NAMED and isinstance(value, dict):
        return {name: relocate_refs(subschema, to) for name, subschema in value.items()}
    return value if key in _DATA else relocate_refs(value, to)
