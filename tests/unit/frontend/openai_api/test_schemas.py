"""JSON schemas: which become grammars, and how one stands inside another."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.openai_api.schemas import (
    MAX_SUBSCHEMAS,
    check_schema,
    has_refs,
    relocate_refs,
    schema_text,
)

PERSON: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "pattern": "^[A-Z]", "description": "a name"},
        "age": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}], "default": None},
        "kind": {"enum": ["a", None, 3, {"x": [1]}]},
        "tags": {"type": "array", "items": {"type": ["string", "null"]}, "maxItems": 5},
        "pair": {"type": "array", "prefixItems": [{"type": "number"}, True], "items": False},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/Person"}},
        "self": {"$ref": "#"},
        "const": {"const": {"$ref": "not a reference"}},
        "$ref": {"type": "string"},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"Person": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Person"}}}},
}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": ["string", "null"]},
        PERSON,
        {"definitions": {"a/b~c": {"type": "null"}}, "$ref": "#/definitions/a~1b~0c"},
        {"definitions": {"é": {"type": "null"}}, "$ref": "#/definitions/%C3%A9"},
        {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/anyOf/1"}}]},
        {"components": {"x": {"type": "string"}}, "properties": {"a": {"$ref": "#/components/x"}}},
        {"items": [{"type": "string"}], "additionalItems": False},
        {"unheard-of": 3, "x-order": ["a"]},
    ],
)
def test_usable_schemas(schema: dict[str, Any]) -> None:
    assert check_schema(schema, "p") >= 1
    assert json.loads(schema_text(schema, "p")) == schema


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"type": "any"}, "p.type"),
        ({"type": []}, "p.type"),
        ({"type": ["string", 3]}, "p.type"),
        ({"type": {"a": 1}}, "p.type"),
        ({"properties": {"a": {"type": "str"}}}, "p.properties.a.type"),
        ({"properties": {"a": {"properties": {"b": {"type": "x"}}}}}, "p.properties.a.properties.b.type"),
        ({"properties": {"a": "string"}}, "p.properties.a"),
        ({"properties": ["a"]}, "p.properties"),
        ({"items": 3}, "p.items"),
        ({"items": [{}, 3]}, "p.items[1]"),
        ({"anyOf": []}, "p.anyOf"),
        ({"anyOf": {"type": "null"}}, "p.anyOf"),
        ({"anyOf": [{"type": "null"}, {"type": "nul"}]}, "p.anyOf[1].type"),
        ({"enum": []}, "p.enum"),
        ({"enum": "a"}, "p.enum"),
        ({"required": True}, "p.required"),
        ({"required": [1]}, "p.required"),
        ({"minLength": -1}, "p.minLength"),
        ({"minItems": True}, "p.minItems"),
        ({"maxItems": 1.5}, "p.maxItems"),
        ({"maximum": "3"}, "p.maximum"),
        ({"maximum": 2**63}, "p.maximum"),
        ({"maxItems": 2**63}, "p.maxItems"),
        ({"pattern": 3}, "p.pattern"),
        ({"$ref": 3}, "p.$ref"),
        ({"$ref": "http://example.com/schema"}, "p.$ref"),
        ({"$ref": "other.json#/a"}, "p.$ref"),
        ({"$ref": "#anchor"}, "p.$ref"),
        ({"$ref": "#/$defs/nothing"}, "p.$ref"),
        ({"properties": {"a": {"$ref": "#/anyOf/7"}}, "anyOf": [{}]}, "p.properties.a.$ref"),
        ({"properties": {"a": {"$ref": "#/anyOf/-1"}}, "anyOf": [{}]}, "p.properties.a.$ref"),
        ({"a": {"b": {"type": "nope"}}, "$ref": "#/a/b"}, "p.type"),
        ({"a": 3, "$ref": "#/a"}, "p"),
        ({"not": 3}, "p.not"),
    ],
)
def test_unusable_schemas_name_the_place(schema: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match="JSON schema") as caught:
        check_schema(schema, "p")
    assert caught.value.fields["param"] == param


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        {"$defs": {"a": {"allOf": [{"not": {"$ref": "#/$defs/a"}}]}}},
    ],
)
def test_references_that_get_nowhere(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="circular"):
        check_schema(schema, "p")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_depth_and_size_are_bounded() -> None:
    check_schema(nested(60), "p")
    for deep in (nested(65), nested(5000), {"default": [nested(200)]}, {"enum": [nested(200)]}):
        with pytest.raises(InvalidRequest, match="deeper than 64"):
            check_schema(deep, "p")
    wide = {"properties": {str(number): True for number in range(MAX_SUBSCHEMAS)}}
    assert check_schema(wide, "p") == 1
    with pytest.raises(InvalidRequest, match="more than 10000 subschemas"):
        check_schema({"properties": {str(number): {} for number in range(MAX_SUBSCHEMAS)}}, "p")
    with pytest.raises(InvalidRequest, match="the limit is 524288"):
        schema_text({"description": "x" * 600_000}, "p")


def test_a_long_chain_of_references_is_no_deep_one() -> None:
    definitions: dict[str, Any] = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(3000)}
    definitions["3000"] = {"type": "string"}
    assert check_schema({"$ref": "#/$defs/0", "$defs": definitions}, "p") == 3002


def test_a_moved_schema_still_finds_its_parts() -> None:
    assert has_refs(PERSON)
    assert not has_refs({"type": "object", "properties": {"a": {"enum": ["$ref"]}}})
    whole = {
        "$defs": {"person": relocate_refs(PERSON, "#/$defs/person")},
        "items": {"$ref": "#/$defs/person"},
    }
    check_schema(whole, "p")
    inside = whole["$defs"]["person"]
    assert inside["properties"]["self"] == {"$ref": "#/$defs/person"}
    assert inside["properties"]["friends"]["items"] == {"$ref": "#/$defs/person/$defs/Person"}
    assert inside["properties"]["const"] == PERSON["properties"]["const"]


def test_a_property_may_be_named_like_a_keyword() -> None:
    schema = {"properties": {"default": {"$ref": "#/$defs/x"}, "enum": {"$ref": "#"}}, "$defs": {"x": {}}}
    inside = relocate_refs(schema, "#/$defs/f")
    assert inside["properties"] == {"default": {"$ref": "#/$defs/f/$defs/x"}, "enum": {"$ref": "#/$defs/f"}}
