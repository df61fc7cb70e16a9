"""Output constraints: converts response_format, structured_outputs and guided_* into one Grammar.

Everything is validated here, so that an engine's grammar compiler gets no invalid input from clients. The text of a
Grammar by kind: a JSON schema; empty (json_object); a regular expression; a JSON array of strings (choice); a
grammar; a JSON object (structural tag).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from re import _parser  # type: ignore[attr-defined]
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import Grammar, GrammarKind
from kvolt.frontend.openai_api.schemas import MAX_SCHEMA_BYTES, MAX_SUBSCHEMAS, check_schema, schema_text
from kvolt.frontend.openai_api.structure import check_nesting

MAX_REGEX_CHARS = 4096
MAX_GRAMMAR_CHARS = 128 * 1024
MAX_CHOICES = 4096
_MAX_ERROR_CHARS = 200

parse_regex = _parser.parse
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

_Text = Annotated[str, Meta(min_length=1)]


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    pass


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    name: _Text
    description: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None
    """Accepted; the schema is always enforced."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class TagStructure(msgspec.Struct, frozen=True, kw_only=True):
    """Output between `begin` and `end` must match the schema."""

    begin: _Text
    schema: dict[str, Any]
    end: str


class StructuralTagFormat(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="structural_tag", omit_defaults=True
):
    """Either `structures` with `triggers`, or `format`."""

    structures: Annotated[list[TagStructure], Meta(min_length=1)] | None = None
    triggers: Annotated[list[_Text], Meta(min_length=1)] | None = None
    format: dict[str, Any] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat

Choices = Annotated[list[_Text], Meta(min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's successor of guided_*."""

    json: str | dict[str, Any] | None = None
    regex: _Text | None = None
    choice: Choices | None = None
    grammar: _Text | None = None
    json_object: bool | None = None
    structural_tag: _Text | None = None
    whitespace_pattern: str | None = None


class GuidedFields(msgspec.Struct, frozen=True, kw_only=True):
    """Request fields that constrain the output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: _Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: _Text | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    """Accepted and ignored: the engine has its own backend."""


def request_grammar(request: GuidedFields) -> Grammar | None:
    """Return the output constraint of a request, or None; raises InvalidRequest if there are several."""
    constraints = _constraints(request)
    if request.guided_whitespace_pattern is not None:
        raise Unsupported(
            "guided_whitespace_pattern is not supported",
            feature="guided_whitespace_pattern",
            param="guided_whitespace_pattern",
        )
    if not constraints:
        return None
    if len(constraints) > 1:
        names = " and ".join(param for param, _, _ in constraints)
        raise InvalidRequest(f"{names} are mutually exclusive", param=constraints[1][0])
    param, kind, value = constraints[0]
    return Grammar(kind, _text(param, kind, value))


def is_guided(request: GuidedFields) -> bool:
    """Whether a vLLM-style field constrains the output, rather than `response_format`."""
    return any(param != "response_format" for param, _, _ in _constraints(request))


def grammar_param(request: GuidedFields) -> str | None:
    """Name of the field that constrains the output."""
    return next((param for param, _, _ in _constraints(request)), None)


_Constraint = tuple[str, GrammarKind, Any]


def _constraints(request: GuidedFields) -> list[_Constraint]:
    constraints: list[_Constraint] = []
    if request.response_format is not None:
        constraints.extend(_from_response_format(request.response_format))
    if request.structured_outputs is not None:
        constraints.extend(_from_structured_outputs(request.structured_outputs))
    for param, kind, value in (
        ("guided_json", GrammarKind.JSON_SCHEMA, request.guided_json),
        ("guided_regex", GrammarKind.REGEX, request.guided_regex),
        ("guided_choice", GrammarKind.CHOICE, request.guided_choice),
        ("guided_grammar", GrammarKind.EBNF, request.guided_grammar),
    ):
        if value is not None:
            constraints.append((param, kind, value))
    return constraints


def _from_response_format(field: ResponseFormat) -> Sequence[_Constraint]:
    match field:
        case TextFormat():
            return ()
        case JsonObjectFormat():
            return (("response_format", GrammarKind.JSON_OBJECT, None),)
        case JsonSchemaFormat():
            return (("response_format", GrammarKind.JSON_SCHEMA, field.json_schema),)
        case StructuralTagFormat():
            return (("response_format", GrammarKind.STRUCTURAL_TAG, field),)


def _from_structured_outputs(field: StructuredOutputs) -> Sequence[_Constraint]:
    if field.whitespace_pattern is not None:
        raise Unsupported(
            "structured_outputs.whitespace_pattern is not supported",
            feature="guided_whitespace_pattern",
            param="structured_outputs.whitespace_pattern",
        )
    constraints = [
        (f"structured_outputs.{name}", kind, value)
        for name, kind, value in (
            ("json", GrammarKind.JSON_SCHEMA, field.json),
            ("regex", GrammarKind.REGEX, field.regex),
            ("choice", GrammarKind.CHOICE, field.choice),
            ("grammar", GrammarKind.EBNF, field.grammar),
            ("json_object", GrammarKind.JSON_OBJECT, field.json_object or None),
            ("structural_tag", GrammarKind.STRUCTURAL_TAG, field.structural_tag),
        )
        if value is not None
    ]
    if not constraints:
        raise InvalidRequest(
            "structured_outputs requires one of json, regex, choice, grammar, json_object, structural_tag",
            param="structured_outputs",
        )
    return constraints


def _text(param: str, kind: GrammarKind, value: Any) -> str:
    match kind:
        case GrammarKind.JSON_OBJECT:
            return ""
        case GrammarKind.JSON_SCHEMA:
            where = f"{param}.json_schema.schema" if isinstance(value, JsonSchema) else param
            schema = value.schema if isinstance(value, JsonSchema) else _object(value, param)
            check_schema(schema, where)
            return schema_text(schema, where)
        case GrammarKind.REGEX:
            return _regex(value, param)
        case GrammarKind.CHOICE:
            return _encode(value).decode()
        case GrammarKind.EBNF:
            return _ebnf(value, param)
        case GrammarKind.STRUCTURAL_TAG:
            return _structural_tag(value, param)


def _object(value: str | dict[str, Any], param: str) -> dict[str, Any]:
    """Return a JSON object, which may be given as text."""
    if isinstance(value, str):
        _check_length(value, param)
        try:
            decoded = _decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{param} is not JSON: {_brief(error)}", param=param) from error
        if not isinstance(decoded, dict):
            raise InvalidRequest(f"{param} must be a JSON object", param=param)
        return decoded
    return value


def _check_length(text: str, param: str) -> None:
    """Check the length before decoding, which takes much more memory than the text."""
    if len(text) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(
            f"{param} has {len(text)} characters; the limit is {MAX_SCHEMA_BYTES}", param=param
        )


def _brief(error: Exception) -> str:
    return str(error)[:_MAX_ERROR_CHARS]


def _regex(pattern: str, param: str) -> str:
    if len(pattern) > MAX_REGEX_CHARS:
        raise InvalidRequest(
            f"{param} has {len(pattern)} characters; the limit is {MAX_REGEX_CHARS}", param=param
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Only parsed: compiling finds few more errors and takes milliseconds per wide class such as [^a].
            parse_regex(pattern)
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        raise InvalidRequest(
            f"{param} is not a valid regular expression: {_brief(error)}", param=param
        ) from error
    return pattern


def _ebnf(text: str, param: str) -> str:
    if not text.strip():
        raise InvalidRequest(f"{param} is empty", param=param)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"{param} has {len(text)} characters; the limit is {MAX_GRAMMAR_CHARS}", param=param
        )
    return text


_tag_decoder = msgspec.json.Decoder(StructuralTagFormat)


def _structural_tag(value: str | StructuralTagFormat, param: str) -> str:
    if isinstance(value, str):
        _check_length(value, param)
        try:
            value = _tag_decoder.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(
                f"{param} is not a valid structural tag: {_brief(error)}", param=param
            ) from error
    if (value.format is None) == (value.structures is None):
        raise InvalidRequest(f"{param} requires either format or structures with triggers", param=param)
    if value.format is not None:
        check_nesting(value.format, f"{param}.format")
        if not isinstance(value.format.get("type"), str):
            raise InvalidRequest(f"{param}.format.type must be a string", param=f"{param}.format.type")
    _check_structures(value, param)
    text = _encode(value)
    if len(text) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"{param} has {len(text)} bytes; the limit is {MAX_SCHEMA_BYTES}", param=param)
    return text.decode()


def _check_structures(value: StructuralTagFormat, param: str) -> None:
    triggers = tuple(value.triggers or ())
    num_schemas = 0
    for index, structure in enumerate(value.structures or ()):
        where = f"{param}.structures[{index}]"
        num_schemas += check_schema(structure.schema, f"{where}.schema")
        if num_schemas > MAX_SUBSCHEMAS:
            raise InvalidRequest(f"{param} has more than {MAX_SUBSCHEMAS} schemas in total", param=param)
        if not structure.begin.startswith(triggers):
            raise InvalidRequest(
                f"{where}.begin is {structure.begin[:80]!r}; it must start with one of the triggers",
                param=f"{where}.begin",
            )
