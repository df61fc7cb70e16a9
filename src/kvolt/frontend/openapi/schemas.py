"""Schemas of the OpenAPI document: the supported fields of the request and response structs, with their docstrings.

A known field that is always answered with 501 is omitted from its schema and listed in the description, so that
generated clients do not use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kvolt.core.field_docs import field_texts
from kvolt.frontend.openai_api.nvext import NOT_YET

Json = dict[str, Any]

SCHEMAS = "#/components/schemas/"

NOT_SERVED: dict[str, tuple[str, ...]] = {
    "ChatRequest": (
        "audio",
        "chat_template",
        "function_call",
        "functions",
        "guided_whitespace_pattern",
        "modalities",
        "web_search_options",
    ),
    "CompletionRequest": ("best_of", "guided_whitespace_pattern", "suffix"),
    "StructuredOutputs": ("whitespace_pattern",),
    "Thinking": ("budget_tokens",),
    "TokenizeRequest": ("chat_template",),
}
"""Additional fields (besides `nvext.NOT_YET`) that are answered with 501, by struct."""

NOT_SERVED_PARTS = ("ImagePart", "InputAudioPart", "AudioPart", "VideoPart", "FilePart")
"""Message parts that are answered with 501."""


def schemas_of(types: Iterable[Any]) -> tuple[dict[Any, Json], dict[str, Json]]:
    """Schema of each type, and the components that they refer to."""
    types = list(dict.fromkeys(types))
    type_schemas, components = msgspec.json.schema_components(types, ref_template=SCHEMAS + "{name}")
    for struct in _structs(types):
        if struct.__name__ in components:
            _describe(components[struct.__name__], struct)
    _leave_out_fields(components)
    _leave_out_nvext(components)
    _leave_out_parts(components)
    return dict(zip(types, type_schemas, strict=True)), components


# omitted fields


def _leave_out_fields(components: dict[str, Json]) -> None:
    for name, fields in NOT_SERVED.items():
        schema = components[name]
        for field in fields:
            del schema["properties"][field]
        _add_text(schema, f"Answered with 501: {', '.join(f'`{field}`' for field in fields)}.")


def _leave_out_nvext(components: dict[str, Json]) -> None:
    nvext = components["NvExt"]
    for field in NOT_YET:
        *path, last = field.split(".")[1:]
        schema = nvext
        for name in path:
            schema = _target(schema["properties"][name], components)
        if "properties" in schema:
            del schema["properties"][last]
        else:
            schema["enum"].remove(last)
    for name, schema in list(nvext["properties"].items()):
        target = _target(schema, components)
        if target.get("properties") == {}:
            del nvext["properties"][name], components[target["title"]]
    listed = "\n".join(f"- `{field}`: {why}" for field, why in NOT_YET.items())
    _add_text(nvext, f"Answered with 501:\n{listed}")


def _target(schema: Json, components: dict[str, Json]) -> Json:
    """Schema of an optional field's value, resolving `anyOf`, a reference and a list."""
    schema = schema.get("anyOf", [schema])[0]
    if "$ref" in schema:
        return components[schema["$ref"].removeprefix(SCHEMAS)]
    return _target(schema["items"], components) if "items" in schema else schema


def _leave_out_parts(components: dict[str, Json]) -> None:
    omitted = {f"{SCHEMAS}{name}" for name in NOT_SERVED_PARTS}
    for name in NOT_SERVED_PARTS:
        del components[name]
    for node in _nodes(components):
        if "anyOf" in node:
            node["anyOf"] = [option for option in node["anyOf"] if option.get("$ref") not in omitted]
        if "discriminator" in node:
            kinds = node["discriminator"]["mapping"]
            node["discriminator"]["mapping"] = {tag: ref for tag, ref in kinds.items() if ref not in omitted}


def _nodes(value: Any) -> Iterator[Json]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _nodes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _nodes(inner)


# descriptions


def _add_text(schema: Json, text: str) -> None:
    schema["description"] = f"{schema['description']}\n\n{text}" if "description" in schema else text


def _describe(schema: Json, struct: type[msgspec.Struct]) -> None:
    """Add the docstrings of a struct and its fields to its schema."""
    if "description" in schema:
        schema["description"] = inspect.cleandoc(schema["description"])
    names = dict(zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True))
    for field, text in field_texts(struct).items():
        if field in names:
            schema["properties"][names[field]].setdefault("description", inspect.cleandoc(text))


def _structs(types: Iterable[Any]) -> Iterator[type[msgspec.Struct]]:
    """Every struct reachable from `types`, once."""
    seen: set[type] = set()
    waiting = list(msgspec.inspect.multi_type_info(types))
    while waiting:
        info = waiting.pop()
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls not in seen:
                seen.add(info.cls)
                yield info.cls
                waiting.extend(field.type for field in info.fields)
        else:
            waiting.extend(_inner(info))


def _inner(info: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    for name in ("type", "item_type", "key_type", "value_type"):
        inner = getattr(info, name, None)
        if isinstance(inner, msgspec.inspect.Type):
            yield inner
    for name in ("types", "item_types"):
        yield from getattr(info, name, ())
