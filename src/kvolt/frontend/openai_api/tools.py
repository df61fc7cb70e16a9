"""Tools of a chat request: validation, tool choice, template input and grammar."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import Grammar, GrammarKind
from kvolt.frontend.openai_api.schemas import check_schema, has_refs, relocate_refs, schema_text

MAX_TOOLS = 1536
MAX_SUBSCHEMAS = 50_000
"""Limit over all tools of a request."""
_MAX_REMEMBERED = 1024
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_RESERVED = ("none", "auto", "required")
"""Values of `tool_choice`, which cannot be function names."""


class Function(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; None: no parameters."""
    strict: bool | None = None
    """Accepted, but arguments are only constrained to the schema if `tool_choice` requires a call."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "function"
    function: Function | None = None

    @property
    def name(self) -> str:
        assert self.function is not None, "checked"
        return self.function.name

    @property
    def schema(self) -> dict[str, Any]:
        assert self.function is not None, "checked"
        return self.function.parameters or {"type": "object", "properties": {}}


class ChosenName(msgspec.Struct, frozen=True):
    name: str


class ChosenTool(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `allowed_tools`."""

    type: str = "function"
    function: ChosenName | None = None


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ChosenTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoiceObject(msgspec.Struct, frozen=True, kw_only=True):
    """A function by name, or a subset of the tools."""

    type: str = "function"
    function: ChosenName | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = str | ToolChoiceObject


class Toolset(msgspec.Struct, frozen=True):
    """Tools visible to the model, and whether it may, must or must not call them."""

    choice: str = "none"
    """"none", "auto", "required" or the name of the function to call."""
    tools: tuple[Tool, ...] = ()


NO_TOOLS = Toolset()

_encode = msgspec.json.Encoder().encode
_remembered: dict[bytes, None] = {}
"""Digests of validated tools: an agent sends the same tools with every turn."""


def check_tools(tools: Sequence[Tool]) -> None:
    try:
        digest = hashlib.blake2b(_encode(tools), digest_size=16).digest()
    except RecursionError:
        _check_tools(tools)  # its errors name the tool
        return
    if digest not in _remembered:
        _check_tools(tools)
        if len(_remembered) >= _MAX_REMEMBERED:
            _remembered.pop(next(iter(_remembered)), None)
        _remembered[digest] = None


def _check_tools(tools: Sequence[Tool]) -> None:
    num_schemas = 0
    names: set[str] = set()
    for index, tool in enumerate(tools):
        param = f"tools[{index}]"
        _check_kind(tool.type, f"{param}.type")
        if tool.function is None:
            raise InvalidRequest(f"{param}.function is required", param=f"{param}.function")
        _check_name(tool.function.name, f"{param}.function.name")
        if tool.function.name in names:
            raise InvalidRequest(
                f"{param}: duplicate function name {tool.function.name!r}",
                param=f"{param}.function.name",
            )
        names.add(tool.function.name)
        if tool.function.parameters is not None:
            num_schemas += _check_parameters(tool.function.parameters, f"{param}.function.parameters")
        if num_schemas > MAX_SUBSCHEMAS:
            raise InvalidRequest(f"tools have more than {MAX_SUBSCHEMAS} schemas in total", param="tools")


def _check_kind(kind: str, param: str) -> None:
    if kind == "custom":
        raise Unsupported(
            "custom tools are not supported; use a function", feature="custom_tools", param=param
        )
    if kind != "function":
        raise InvalidRequest(f"{param} is {kind[:64]!r}; it must be 'function'", param=param)


def _check_name(name: str, param: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{param} is {name[:140]!r}; it must be 1 to 128 of the characters a-z A-Z 0-9 _ -", param=param
        )
    if name in _RESERVED:
        raise InvalidRequest(f"{param} is {name!r}, which is reserved for tool_choice", param=param)


def _check_parameters(schema: dict[str, Any], param: str) -> int:
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{param}.type must be 'object'", param=f"{param}.type")
    return check_schema(schema, param)


def resolve_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> Toolset:
    """Resolve validated tools and `tool_choice`."""
    if isinstance(choice, str) and choice not in _RESERVED:
        raise InvalidRequest(
            f"tool_choice is {choice[:64]!r}; it must be 'none', 'auto', 'required' or an object with a function",
            param="tool_choice",
        )
    if not tools:
        if choice is not None and choice not in ("none", "auto"):
            raise InvalidRequest("tool_choice requires tools", param="tool_choice")
        return NO_TOOLS
    if choice == "none":
        return NO_TOOLS
    if choice is None or isinstance(choice, str):
        return Toolset(choice or "auto", tuple(tools))
    return _resolve_object({tool.name: tool for tool in tools}, choice)


def _resolve_object(tools: dict[str, Tool], choice: ToolChoiceObject) -> Toolset:
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise InvalidRequest(
                "tool_choice of this type requires allowed_tools", param="tool_choice.allowed_tools"
            )
        chosen = [
            _named(tools, entry.type, entry.function, f"tool_choice.allowed_tools.tools[{index}]")
            for index, entry in enumerate(choice.allowed_tools.tools)
        ]
        allowed = {tool.name: tool for tool in chosen}
        return Toolset(choice.allowed_tools.mode, tuple(allowed.values()))
    named = _named(tools, choice.type, choice.function, "tool_choice")
    return Toolset(named.name, tuple(tools.values()))


def _named(tools: dict[str, Tool], kind: str, function: ChosenName | None, param: str) -> Tool:
    _check_kind(kind, f"{param}.type")
    if function is None:
        raise InvalidRequest(f"{param}.function is required", param=f"{param}.function")
    if function.name not in tools:
        raise InvalidRequest(
            f"{param}: unknown function {function.name[:140]!r}",
            param=f"{param}.function.name",
        )
    return tools[function.name]


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Tools for a chat template, with keys in a fixed order, so that equal tools give equal prompts."""
    return [_template_tool(tool) for tool in tools] or None


def _template_tool(tool: Tool) -> dict[str, Any]:
    function = tool.function
    assert function is not None, "checked"
    plain: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        plain["description"] = function.description
    plain["parameters"] = tool.schema
    return {"type": "function", "function": plain}


def tool_grammar(toolset: Toolset, parallel: bool = True) -> Grammar | None:
    """Grammar of the output if a tool call is required; None otherwise.

    For a named function its arguments; else an array of {"name": ..., "parameters": ...}.
    """
    if toolset.choice in ("none", "auto"):
        return None
    if toolset.choice != "required":
        tool = next(tool for tool in toolset.tools if tool.name == toolset.choice)
        return Grammar(GrammarKind.JSON_SCHEMA, schema_text(_as_object(tool.schema), "tools"))
    schema: dict[str, Any] = {"type": "array", "minItems": 1}
    if not parallel:
        schema["maxItems"] = 1
    definitions: dict[str, Any] = {}
    schema["items"] = {"anyOf": [_call_schema(tool, definitions) for tool in toolset.tools]}
    if definitions:
        schema["$defs"] = definitions
    return Grammar(GrammarKind.JSON_SCHEMA, schema_text(schema, "tools"))


def _as_object(schema: dict[str, Any]) -> dict[str, Any]:
    return schema if "type" in schema or "$ref" in schema else {"type": "object", **schema}


def _call_schema(tool: Tool, definitions: dict[str, Any]) -> dict[str, Any]:
    """Schema of a call. A schema with references is placed under `$defs`, where they are rewritten."""
    parameters = _as_object(tool.schema)
    if has_refs(parameters):
        reference = f"#/$defs/{tool.name}"
        definitions[tool.name] = relocate_refs(parameters, reference)
        parameters = {"$ref": reference}
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [tool.name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
