"""Input that a chat template expects, read once from its source: content as a string or parts, tools, roles."""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import nodes


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    tools: bool
    """Reads `tools`."""
    developer: bool
    """Handles the `developer` role; other templates drop or reject it."""
    parts: bool
    """Iterates over the parts of a content."""
    only_parts: bool
    """Iterates over parts without testing whether content is a string."""
    none: bool
    """Tests whether content is none, to recognize a message with only tool calls."""


def read_traits(source: str, tree: nodes.Template) -> TemplateTraits:
    names = _names_of_content(tree)
    parts = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    tests = list(tree.find_all(nodes.Test))
    return TemplateTraits(
        tools=any(name.name == "tools" and name.ctx == "load" for name in tree.find_all(nodes.Name)),
        developer="developer" in source,
        parts=parts,
        only_parts=parts
        and not any(test.name == "string" and _is_content(test.node, names) for test in tests),
        none=any(test.name == "none" and _is_content(test.node, set()) for test in tests),
    )


def _names_of_content(tree: nodes.Template) -> set[str]:
    """Variables and macro parameters to which a message's content is assigned."""
    parameters = {macro.name: macro.args for macro in tree.find_all(nodes.Macro)}
    bound: list[tuple[nodes.Node, nodes.Node]] = [
        (assign.target, assign.node) for assign in tree.find_all(nodes.Assign)
    ]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name):
            bound += zip(parameters.get(call.node.name, ()), call.args, strict=False)
    names: set[str] = set()
    while new := {
        target.name
        for target, value in bound
        if isinstance(target, nodes.Name) and target.name not in names and _is_content(value, names)
    }:
        names |= new
    return names


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    match node:
        case nodes.Filter():
            return _is_content(node.node, names)
        case nodes.CondExpr():
            return _is_content(node.expr1, names) or _is_content(node.expr2, names)
        case nodes.Name():
            return node.name in names
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False
