"""Tools: what may be offered, what tool_choice comes to, and what a demanded call must look like."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.request import GrammarKind
from kvolt.frontend.openai_api import tools as tools_module
from kvolt.frontend.openai_api.schemas import check_schema
from kvolt.frontend.openai_api.tools import (
    NO_TOOLS,
    Tool,
    ToolChoice,
    Toolset,
    check_tools,
    resolve_tools,
    template_tools,
    tool_grammar,
)

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/Node"}},
    "$defs": {
        "Node": {
            "type": "object",
            "properties": {"sons": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
        }
    },
}


def function(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def build(*tools: dict[str, Any]) -> list[Tool]:
    built = msgspec.convert(list(tools), list[Tool])
    check_tools(built)
    return built


def choice(value: Any) -> ToolChoice | None:
    return msgspec.convert(value, ToolChoice | None)  # type: ignore[arg-type,no-any-return]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "function"}, "tools[0].function"),
        ({"type": "retrieval", "function": {"name": "f"}}, "tools[0].type"),
        (function(""), "tools[0].function.name"),
        (function("a b"), "tools[0].function.name"),
        (function("a.b"), "tools[0].function.name"),
        (function("é"), "tools[0].function.name"),
        (function("x" * 129), "tools[0].function.name"),
        (function("auto"), "tools[0].function.name"),
        (function("f", {"type": "array"}), "tools[0].function.parameters.type"),
        (function("f", {"type": ["object"]}), "tools[0].function.parameters.type"),
        (
            function("f", {"properties": {"a": {"type": "any"}}}),
            "tools[0].function.parameters.properties.a.type",
        ),
        (function("f", {"$ref": "#/$defs/none"}), "tools[0].function.parameters.$ref"),
    ],
)
def test_wrong_tools(tool: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(tool)
    assert caught.value.fields["param"] == param


@pytest.mark.parametrize(
    "tool", [function("x" * 128), function("a_B-9"), function("f", {}), function("f", CITY, strict=True)]
)
def test_tools_that_may_be_offered(tool: dict[str, Any]) -> None:
    build(tool)


def test_two_functions_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="duplicate function name 'f'"):
        build(function("f"), function("g"), function("f", CITY))


def test_custom_tools_are_not_supported() -> None:
    with pytest.raises(Unsupported) as caught:
        build({"type": "custom", "custom": {"name": "f"}})
    assert caught.value.fields["feature"] == "custom_tools"


def test_all_schemas_of_a_request_together_are_bounded() -> None:
    schema = {"type": "object", "properties": {str(number): {} for number in range(9000)}}
    with pytest.raises(InvalidRequest, match="50000 schemas in total"):
        build(*(function(f"f{number}", schema) for number in range(6)))


def test_tools_that_passed_are_remembered_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []

    def count(schema: dict[str, Any], param: str) -> int:
        checked.append(param)
        return check_schema(schema, param)

    monkeypatch.setattr(tools_module, "check_schema", count)
    monkeypatch.setattr(tools_module, "_remembered", {})
    monkeypatch.setattr(tools_module, "_MAX_REMEMBERED", 2)
    for _ in range(3):
        build(function("one", CITY))
    assert len(checked) == 1
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            build(function("bad", {"type": "object", "required": 3}))
    assert len(checked) == 3
    build(function("two", CITY))
    build(function("three", CITY))
    assert len(tools_module._remembered) == 2
    build(function("one", CITY))
    assert len(checked) == 6


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, ("auto", ["f", "g"])),
        ("auto", ("auto", ["f", "g"])),
        ("none", ("none", [])),
        ("required", ("required", ["f", "g"])),
        ({"type": "function", "function": {"name": "g"}}, ("g", ["f", "g"])),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
            },
            ("auto", ["g"]),
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": name}} for name in ("g", "f", "g")],
                },
            },
            ("required", ["g", "f"]),
        ),
    ],
)
def test_what_tool_choice_comes_to(asked: Any, expected: tuple[str, list[str]]) -> None:
    toolset = resolve_tools(build(function("f"), function("g", CITY)), choice(asked))
    assert (toolset.choice, [tool.name for tool in toolset.tools]) == expected


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ("any", "tool_choice"),
        ("f", "tool_choice"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "function", "function": {"name": "h"}}, "tool_choice.function.name"),
        ({"type": "retrieval", "function": {"name": "f"}}, "tool_choice.type"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": [{"function": {"name": "h"}}]}},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
    ],
)
def test_wrong_choices(asked: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_tools(build(function("f")), choice(asked))
    assert caught.value.fields["param"] == param


def test_choices_without_tools() -> None:
    for tools in (None, []):
        for harmless in (None, "none", "auto"):
            assert resolve_tools(tools, harmless) is NO_TOOLS
        for demand in ("required", choice({"type": "function", "function": {"name": "f"}})):
            with pytest.raises(InvalidRequest, match="requires tools"):
                resolve_tools(tools, demand)


def test_a_template_sees_equal_tools_alike() -> None:
    one = build(function("f", CITY, description="d", strict=True))
    other = build({"function": {"description": "d", "parameters": CITY, "name": "f"}, "type": "function"})
    expected = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": CITY}}]
    assert template_tools(one) == template_tools(other) == expected
    assert json.dumps(template_tools(one)) == json.dumps(template_tools(other))
    assert template_tools(()) is None
    (bare,) = template_tools(build(function("g"))) or []
    assert bare["function"] == {"name": "g", "parameters": {"type": "object", "properties": {}}}


def grammar_of(toolset: Toolset, parallel: bool = True) -> Any:
    grammar = tool_grammar(toolset, parallel)
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    schema = json.loads(grammar.text)
    check_schema(schema, "grammar")
    return schema


def test_no_grammar_where_the_model_may_choose() -> None:
    tools = build(function("f", CITY))
    assert tool_grammar(NO_TOOLS) is None
    assert tool_grammar(resolve_tools(tools, "auto")) is None


def test_a_named_function_demands_its_arguments() -> None:
    tools = build(function("f", CITY), function("tree", TREE), function("bare"), function("loose", {}))
    assert grammar_of(Toolset("f", tuple(tools))) == CITY
    assert grammar_of(Toolset("tree", tuple(tools))) == TREE
    for name in ("bare", "loose"):
        assert grammar_of(Toolset(name, tuple(tools)))["type"] == "object"


def test_required_demands_an_array_of_calls() -> None:
    toolset = Toolset("required", tuple(build(function("f", CITY), function("tree", TREE))))
    schema = grammar_of(toolset)
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert "maxItems" not in schema
    f, tree = schema["items"]["anyOf"]
    assert f["properties"] == {"name": {"type": "string", "enum": ["f"]}, "parameters": CITY}
    assert f["required"] == ["name", "parameters"]
    assert tree["properties"]["parameters"] == {"$ref": "#/$defs/tree"}
    node = schema["$defs"]["tree"]["$defs"]["Node"]
    assert node["properties"]["sons"]["items"] == {"$ref": "#/$defs/tree/$defs/Node"}
    assert grammar_of(toolset, parallel=False)["maxItems"] == 1


def test_equal_names_of_definitions_do_not_meet() -> None:
    other = {**TREE, "$defs": {"Node": {"type": "string"}}}
    schema = grammar_of(Toolset("required", tuple(build(function("a", TREE), function("b", other)))))
    assert schema["$defs"]["b"]["$defs"]["Node"] == {"type": "string"}
    assert schema["$defs"]["a"]["$defs"]["Node"]["type"] == "object"
