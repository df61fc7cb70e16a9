"""Whether a JSON schema can become a grammar: well-formed where it matters, closed in itself, bounded.

A small check of our own rather than a whole validator. It finds what an engine's grammar compiler would
choke on: unknown types, references to elsewhere, references that never get anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.openai_api.nesting import nests_deeper

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 10_000
MAX_SCHEMA_BYTES = 512 * 1024

TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")

_IN_PLACE = ("allOf", "anyOf", "else", "if", "not", "oneOf", "then")
"""Keywords whose schemas describe the same value again, and so take nothing from the text."""

_MAX_INT = 2**63 - 1
_INDEX = re.compile(r"[0-9]{1,6}")
_encode = msgspec.json.Encoder().encode


def schema_text(schema: dict[str, Any], param: str) -> str:
    """A schema, checked before, as compact JSON."""
    text = _encode(schema)
    if len(text) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"{param} has {len(text)} bytes, over {MAX_SCHEMA_BYTES}", param=param)
    return text.decode()


def check_schema(schema: dict[str, Any], param: str) -> int:
    """The number of schemas in it, counting itself. InvalidRequest for what no grammar can be made of."""
    check = _SchemaCheck(schema)
    try:
        check.run()
    except _Unusable as error:
        where = param + "".join(reversed(error.place))
        raise InvalidRequest(f"{where} is no usable JSON schema: {error.reason}", param=where) from None
    return len(check.schemas)


class _Unusable(Exception):
    """Gathers its place on the way up: no path is spelled out while all is well."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.place: list[str] = []


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
            raise _Unusable("a schema is an object or a boolean")
        if depth > MAX_DEPTH:
            raise _Unusable(f"it nests deeper than {MAX_DEPTH} levels")
        self.schemas.append(schema)
        if len(self.schemas) > MAX_SUBSCHEMAS:
            raise _Unusable(f"it has more than {MAX_SUBSCHEMAS} parts")
        for key, value in schema.items():
            rule = _RULES.get(key)
            try:
                if rule is not None:
                    rule(self, value, depth)
                elif isinstance(value, dict | list) and nests_deeper(value, MAX_DEPTH):
                    raise _Unusable(f"it nests deeper than {MAX_DEPTH} levels")
            except _Unusable as error:
                error.place.append(f".{key[:64]}")
                raise

    def check_named(self, value: Any, depth: int) -> None:
        if not isinstance(value, dict):
            raise _Unusable("an object of schemas is needed")
        for name, below in value.items():
            try:
                self.check(below, depth + 1)
            except _Unusable as error:
                error.place.append(f".{name[:64]}")
                raise

    def check_list(self, value: Any, depth: int) -> None:
        if not isinstance(value, list) or not value:
            raise _Unusable("a list with at least one schema is needed")
        for index, below in enumerate(value):
            try:
                self.check(below, depth + 1)
            except _Unusable as error:
                error.place.append(f"[{index}]")
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
            raise _Unusable("the list of types is empty")
        for name in names:
            if name not in TYPES:
                raise _Unusable(f"{_short(name)} is not one of {', '.join(TYPES)}")

    def check_enum(self, value: Any, depth: int) -> None:
        if not isinstance(value, list) or not value:
            raise _Unusable("a list with at least one value is needed")
        if nests_deeper(value, MAX_DEPTH):
            raise _Unusable(f"it nests deeper than {MAX_DEPTH} levels")

    def check_required(self, value: Any, depth: int) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _Unusable("a list of property names is needed")

    def check_count(self, value: Any, depth: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT:
            raise _Unusable("a whole number of at least 0 and at most 63 bits is needed")

    def check_number(self, value: Any, depth: int) -> None:
        if not isinstance(value, int | float) or (isinstance(value, int) and abs(value) > _MAX_INT):
            raise _Unusable("a number is needed, a whole one of at most 63 bits")

    def check_text(self, value: Any, depth: int) -> None:
        if not isinstance(value, str):
            raise _Unusable("a string is needed")

    def check_reference(self, value: Any, depth: int) -> None:
        self.check_text(value, depth)
        self.resolve(value)
        self.references.append(value)

    def resolve(self, reference: str) -> Any:
        pointer = reference.partition("#")[2]
        if not reference.startswith("#") or (pointer and not pointer.startswith("/")):
            raise _Unusable(f"{_short(reference)} is not of the form #/$defs/NAME")
        target: Any = self.root
        for step in _steps(pointer):
            if isinstance(target, dict) and step in target:
                target = target[step]
            elif isinstance(target, list) and _INDEX.fullmatch(step) and int(step) < len(target):
                target = target[int(step)]
            else:
                raise _Unusable(f"{_short(reference)} leads nowhere")
        return target

    def check_progress(self) -> None:
        """Going only through schemas of the same value one must not come back: nothing would be described."""
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
            raise _Unusable("a $ref leads back to itself without describing anything") from None


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
