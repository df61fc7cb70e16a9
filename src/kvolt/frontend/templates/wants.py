"""What a chat template wants of its input, read from its source once: content as one string or as parts, tools."""

from __future__ import annotations

from dataclasses import dataclass

from jinja2 import nodes


@dataclass(frozen=True, slots=True)
class Wants:
    tools: bool
    """It reads `tools`."""
    developer: bool
    """It knows the role that newer clients give to system messages; others drop or refuse it."""
    parts: bool
    """It walks through a content's parts."""
    only_parts: bool
    """And never asks whether content is a string."""
    none: bool
    """It asks whether content is none: that is how it knows a message of tool calls alone."""


def read_wants(source: str, tree: nodes.Template) -> Wants:
    names = _names_of_content(tree)
    parts = any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    tests = list(tree.find_all(nodes.Test))
    return Wants(
        tools=any(name.name == "tools" and name.ctx == "load" for name in tree.find_all(nodes.Name)),
        developer="developer" in source,
        parts=parts,
        only_parts=parts
        and not any(test.name == "string" and _is_content(test.node, names) for test in tests),
        none=any(test.name == "none" and _is_content(test.node, set()) for test in tests),
    )


def _names_of_content(tree: nodes.Template) -> set[str]:
    """Variables and macro parameters that a message's content is given to."""
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
