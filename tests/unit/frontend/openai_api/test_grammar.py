"""What constrains an output, in all its spellings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import Grammar, GrammarKind
from kvolt.frontend.openai_api.checks import parse_completion
from kvolt.frontend.openai_api.grammar import is_guided, request_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
SCHEMA_TEXT = json.dumps(SCHEMA, separators=(",", ":"))


def grammar(**fields: Any) -> Grammar | None:
    request = parse_completion(json.dumps({"model": "m", "prompt": "x", **fields}).encode()).request
    return request_grammar(request)


def json_schema(schema: Any, **fields: Any) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **fields}}
    }


TAG = {"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"}
OLD_TAG = {"type": "structural_tag", "structures": [TAG], "triggers": ["<f="]}
NEW_TAG = {"type": "structural_tag", "format": {"type": "tag", "begin": "<a>", "content": {}, "end": "</a>"}}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (json_schema(SCHEMA), "json_schema", SCHEMA_TEXT),
        (json_schema(SCHEMA, strict=True, description="d"), "json_schema", SCHEMA_TEXT),
        (json_schema({}), "json_schema", "{}"),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA_TEXT),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA_TEXT),
        ({"guided_regex": r"\d{3}-[a-z]+"}, "regex", r"\d{3}-[a-z]+"),
        ({"guided_regex": "(?i)" + "[\x00-\U0010ffff]" * 800}, "regex", "(?i)" + "[\x00-\U0010ffff]" * 800),
        ({"guided_regex": "[[a]"}, "regex", "[[a]"),
        ({"guided_choice": ["yes", "né"]}, "choice", '["yes","né"]'),
        ({"guided_grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, "json_schema", SCHEMA_TEXT),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA_TEXT),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
        ({"structured_outputs": {"grammar": "x"}}, "ebnf", "x"),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        (
            {"structured_outputs": {"structural_tag": json.dumps(OLD_TAG)}},
            "structural_tag",
            json.dumps(OLD_TAG, separators=(",", ":")),
        ),
        ({"response_format": OLD_TAG}, "structural_tag", json.dumps(OLD_TAG, separators=(",", ":"))),
        ({"response_format": NEW_TAG}, "structural_tag", json.dumps(NEW_TAG, separators=(",", ":"))),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, "regex", "a"),
    ],
)
def test_what_becomes_a_grammar(fields: dict[str, Any], kind: str, text: str) -> None:
    assert grammar(**fields) == Grammar(GrammarKind(kind), text)


def test_no_constraint() -> None:
    assert grammar() is None
    assert grammar(response_format={"type": "text"}) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (json_schema(SCHEMA, name=""), "response_format.json_schema.name"),
        (json_schema(None), "response_format.json_schema.schema"),
        (json_schema([]), "response_format.json_schema.schema"),
        (json_schema("{}"), "response_format.json_schema.schema"),
        (json_schema({"type": "obj"}), "response_format.json_schema.schema.type"),
        (json_schema({"maximum": 10**40}), "response_format.json_schema.schema.maximum"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": "[" * 5000}, "guided_json"),
        ({"guided_json": '{"a":"\\ud800"}'}, "guided_json"),
        ({"guided_json": {"properties": 3}}, "guided_json.properties"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_regex": "(" * 2000}, "guided_regex"),
        ({"guided_regex": "a{99999999999}"}, "guided_regex"),
        ({"guided_regex": f"(?P<{'é-' * 1000}>a)"}, "guided_regex"),
        ({"guided_regex": "x" * 4097}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice[0]"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_choice": ["a"] * 4097}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_grammar": ""}, "guided_grammar"),
        ({"guided_grammar": " \n"}, "guided_grammar"),
        ({"guided_grammar": "x" * 200_000}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"structural_tag": json.dumps({"type": "x" * 5000})}},
            "structured_outputs.structural_tag",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {**OLD_TAG, **NEW_TAG}}, "response_format"),
        ({"response_format": {**OLD_TAG, "triggers": ["<g"]}}, "response_format.structures[0].begin"),
        ({"response_format": {**OLD_TAG, "triggers": None}}, "response_format.structures[0].begin"),
        ({"response_format": {**OLD_TAG, "triggers": []}}, "response_format.triggers"),
        (
            {"response_format": {**OLD_TAG, "structures": [{**TAG, "schema": {"type": "x"}}]}},
            "response_format.structures[0].schema.type",
        ),
        (
            {"response_format": {**OLD_TAG, "structures": [{**TAG, "schema": {"allOf": [{}] * 6000}}] * 2}},
            "response_format",
        ),
        ({"response_format": {**OLD_TAG, "structures": [{**TAG, "end": "x" * 600_000}]}}, "response_format"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format.type"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
    ],
)
def test_what_does_not(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar(**fields)
    assert caught.value.fields["param"] == param
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {}, "guided_whitespace_pattern": " ?"},
        {"structured_outputs": {"json": {}, "whitespace_pattern": " ?"}},
    ],
)
def test_whitespace_patterns_have_no_mechanism(fields: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as caught:
        grammar(**fields)
    assert caught.value.fields["feature"] == "guided_whitespace_pattern"


def test_which_spelling_was_used() -> None:
    def guided(**fields: Any) -> bool:
        body = json.dumps({"model": "m", "prompt": "x", **fields}).encode()
        return is_guided(parse_completion(body).request)

    assert guided(guided_regex="a")
    assert guided(structured_outputs={"regex": "a"})
    assert not guided(response_format={"type": "json_object"})
    assert not guided()


@pytest.mark.parametrize("fields", [{"guided_json": "X"}, {"structured_outputs": {"structural_tag": "X"}}])
def test_a_text_that_is_too_long_is_not_decoded(fields: dict[str, Any]) -> None:
    text = json.dumps(fields).replace('"X"', '"{' + " " * 600_000 + '"')  # else it would not be JSON
    with pytest.raises(InvalidRequest, match="has 600001 characters; the limit is 524288"):
        grammar(**json.loads(text))
