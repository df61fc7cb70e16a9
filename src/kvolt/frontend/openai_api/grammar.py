"""What the output must look like: response_format, structured_outputs and guided_* become one Grammar.

All is validated here, so that an engine's grammar compiler meets nothing that a client has made up.
A Grammar's text, by kind: a JSON schema; nothing (json_object); a regular expression; a JSON array of
strings (choice); a grammar; a JSON object (structural tag).
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
from kvolt.frontend.openai_api.nesting import check_nesting
from kvolt.frontend.openai_api.schemas import MAX_SCHEMA_BYTES, MAX_SUBSCHEMAS, check_schema, schema_text

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
    """Taken; the output is held to the schema either way."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


class TagStructure(msgspec.Struct, frozen=True, kw_only=True):
    """Between `begin` and `end` the output follows the schema."""

    begin: _Text
    schema: dict[str, Any]
    end: str


class StructuralTagFormat(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="structural_tag", omit_defaults=True
):
    """Either `structures` with `triggers`, or the newer `format`."""

    structures: Annotated[list[TagStructure], Meta(min_length=1)] | None = None
    triggers: Annotated[list[_Text], Meta(min_length=1)] | None = None
    format: dict[str, Any] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat

Choices = Annotated[list[_Text], Meta(min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's newer spelling of guided_*."""

    json: str | dict[str, Any] | None = None
    regex: _Text | None = None
    choice: Choices | None = None
    grammar: _Text | None = None
    json_object: bool | None = None
    structural_tag: _Text | None = None
    whitespace_pattern: str | None = None


class GuidedFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a request that constrain its output."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: _Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: _Text | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    """Taken and not used: the engine knows its own."""


def request_grammar(request: GuidedFields) -> Grammar | None:
    """The one constraint that a request names, if any; two at once are refused."""
    asked = _asked(request)
    if request.guided_whitespace_pattern is not None:
        raise Unsupported(
            "guided_whitespace_pattern is not supported: leave it out",
            feature="guided_whitespace_pattern",
            param="guided_whitespace_pattern",
        )
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(param for param, _, _ in asked)
        raise InvalidRequest(f"{names} are given together; only one can hold", param=asked[1][0])
    param, kind, value = asked[0]
    return Grammar(kind, _text(param, kind, value))


def is_guided(request: GuidedFields) -> bool:
    """Whether a vLLM-style field constrains the output, rather than `response_format`."""
    return any(param != "response_format" for param, _, _ in _asked(request))


def grammar_param(request: GuidedFields) -> str | None:
    """The field that constrains the output."""
    return next((param for param, _, _ in _asked(request)), None)


_Asked = tuple[str, GrammarKind, Any]


def _asked(request: GuidedFields) -> list[_Asked]:
    asked: list[_Asked] = []
    if request.response_format is not None:
        asked.extend(_from_response_format(request.response_format))
    if request.structured_outputs is not None:
        asked.extend(_from_structured_outputs(request.structured_outputs))
    for param, kind, value in (
        ("guided_json", GrammarKind.JSON_SCHEMA, request.guided_json),
        ("guided_regex", GrammarKind.REGEX, request.guided_regex),
        ("guided_choice", GrammarKind.CHOICE, request.guided_choice),
        ("guided_grammar", GrammarKind.EBNF, request.guided_grammar),
    ):
        if value is not None:
            asked.append((param, kind, value))
    return asked


def _from_response_format(wanted: ResponseFormat) -> Sequence[_Asked]:
    match wanted:
        case TextFormat():
            return ()
        case JsonObjectFormat():
            return (("response_format", GrammarKind.JSON_OBJECT, None),)
        case JsonSchemaFormat():
            return (("response_format", GrammarKind.JSON_SCHEMA, wanted.json_schema),)
        case StructuralTagFormat():
            return (("response_format", GrammarKind.STRUCTURAL_TAG, wanted),)


def _from_structured_outputs(wanted: StructuredOutputs) -> Sequence[_Asked]:
    if wanted.whitespace_pattern is not None:
        raise Unsupported(
            "structured_outputs.whitespace_pattern is not supported: leave it out",
            feature="guided_whitespace_pattern",
            param="structured_outputs.whitespace_pattern",
        )
    asked = [
        (f"structured_outputs.{name}", kind, value)
        for name, kind, value in (
            ("json", GrammarKind.JSON_SCHEMA, wanted.json),
            ("regex", GrammarKind.REGEX, wanted.regex),
            ("choice", GrammarKind.CHOICE, wanted.choice),
            ("grammar", GrammarKind.EBNF, wanted.grammar),
            ("json_object", GrammarKind.JSON_OBJECT, wanted.json_object or None),
            ("structural_tag", GrammarKind.STRUCTURAL_TAG, wanted.structural_tag),
        )
        if value is not None
    ]
    if not asked:
        raise InvalidRequest(
            "structured_outputs must have one of json, regex, choice, grammar, json_object, structural_tag",
            param="structured_outputs",
        )
    return asked


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
    """A JSON object that may also be given as its text."""
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
    """Before it is decoded, which takes much more memory than its text."""
    if len(text) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"{param} has {len(text)} characters, over {MAX_SCHEMA_BYTES}", param=param)


def _brief(error: Exception) -> str:
    return str(error)[:_MAX_ERROR_CHARS]


def _regex(pattern: str, param: str) -> str:
    if len(pattern) > MAX_REGEX_CHARS:
        raise InvalidRequest(f"{param} has {len(pattern)} characters, over {MAX_REGEX_CHARS}", param=param)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Compiling finds hardly more, and takes milliseconds for each wide class like [^a]: seconds in all.
            parse_regex(pattern)
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        raise InvalidRequest(f"{param} is not a regular expression: {_brief(error)}", param=param) from error
    return pattern


def _ebnf(text: str, param: str) -> str:
    if not text.strip():
        raise InvalidRequest(f"{param} is empty", param=param)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(f"{param} has {len(text)} characters, over {MAX_GRAMMAR_CHARS}", param=param)
    return text


_tag_decoder = msgspec.json.Decoder(StructuralTagFormat)


def _structural_tag(value: str | StructuralTagFormat, param: str) -> str:
    if isinstance(value, str):
        _check_length(value, param)
        try:
            value = _tag_decoder.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{param} is not a structural tag: {_brief(error)}", param=param) from error
    if (value.format is None) == (value.structures is None):
        raise InvalidRequest(f"{param} must have either format or structures with triggers", param=param)
    if value.format is not None:
        check_nesting(value.format, f"{param}.format")
        if not isinstance(value.format.get("type"), str):
            raise InvalidRequest(f"{param}.format.type must be a string", param=f"{param}.format.type")
    _check_structures(value, param)
    text = _encode(value)
    if len(text) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"{param} has {len(text)} bytes, over {MAX_SCHEMA_BYTES}", param=param)
    return text.decode()


def _check_structures(value: StructuralTagFormat, param: str) -> None:
    triggers = tuple(value.triggers or ())
    num_schemas = 0
    for index, structure in enumerate(value.structures or ()):
        where = f"{param}.structures[{index}]"
        num_schemas += check_schema(structure.schema, f"{where}.schema")
        if num_schemas > MAX_SUBSCHEMAS:
            raise InvalidRequest(f"{param} has more than {MAX_SUBSCHEMAS} schemas in all", param=param)
        if not structure.begin.startswith(triggers):
            raise InvalidRequest(
                f"{where}.begin is {structure.begin[:80]!r}; it must start with one of the triggers",
                param=f"{where}.begin",
            )
